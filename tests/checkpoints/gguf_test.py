import dataclasses

from absl.testing import parameterized
import chex
import gguf as gguf_package
from gguf import quants
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.checkpoints import gguf
from llamarl_jax.models import llama
from llamarl_jax.models.config import LlamaConfig
from tests.oracles import numpy_llama

Q4_1 = gguf_package.GGMLQuantizationType.Q4_1
Q8_0 = gguf_package.GGMLQuantizationType.Q8_0
# Widths are multiples of 32, the block of the quantized formats.
CONFIG = LlamaConfig(
  vocab_size=7,
  width=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_width=64,
  rope_theta=100.0,
  norm_epsilon=1e-5,
  tie_embeddings=True,
  max_position=64,
)
TOKENS = ('<end>', '<begin>', 'a', 'b', 'ab', 'Ġ', 'é')


def _tensors(config, seed=0):
  """Returns random weights by GGUF name, [out, in]."""
  rng = np.random.default_rng(seed)
  width, inner = config.width, config.mlp_width
  queries = config.num_heads * config.head_dim
  keys = config.num_kv_heads * config.head_dim
  shapes = {
    'token_embd.weight': (config.vocab_size, width),
    'output_norm.weight': (width,),
  }
  if not config.tie_embeddings:
    shapes['output.weight'] = (config.vocab_size, width)
  for i in range(config.num_layers):
    for name, shape in {
      'attn_norm': (width,),
      'attn_q': (queries, width),
      'attn_k': (keys, width),
      'attn_v': (keys, width),
      'attn_output': (width, queries),
      'ffn_norm': (width,),
      'ffn_gate': (inner, width),
      'ffn_up': (inner, width),
      'ffn_down': (width, inner),
    }.items():
      shapes[f'blk.{i}.{name}.weight'] = shape
  return {
    # Large enough that positions and heads matter.
    name: rng.normal(0, 0.3, shape).astype(np.float32) + (len(shape) == 1)
    for name, shape in shapes.items()
  }


def _write(path, config, tensors, kinds=None, **fields):
  """Writes a file by the package's writer, an implementation not ours."""
  writer = gguf_package.GGUFWriter(path, fields.pop('architecture', 'llama'))
  writer.add_block_count(config.num_layers)
  writer.add_context_length(config.max_position)
  writer.add_embedding_length(config.width)
  writer.add_feed_forward_length(config.mlp_width)
  writer.add_head_count(config.num_heads)
  writer.add_head_count_kv(config.num_kv_heads)
  writer.add_layer_norm_rms_eps(config.norm_epsilon)
  writer.add_rope_freq_base(config.rope_theta)
  writer.add_rope_dimension_count(config.head_dim)
  writer.add_tokenizer_model(fields.pop('tokenizer', 'gpt2'))
  writer.add_tokenizer_pre('smollm')
  writer.add_token_list(TOKENS)
  writer.add_token_types([3, 3, 1, 1, 1, 1, 1])
  writer.add_token_merges(['a b'])
  writer.add_eos_token_id(0)
  writer.add_bos_token_id(1)
  writer.add_chat_template('{{ messages }}')
  if 'scaling' in fields:
    writer.add_rope_scaling_type(fields['scaling'])
  for name, tensor in tensors.items():
    kind = (kinds or {}).get(name)
    if kind is None:
      writer.add_tensor(name, tensor)
    else:
      writer.add_tensor(name, quants.quantize(tensor, kind), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return str(path)


class GGUFTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _folder(self, tmp_path):
    self.path = tmp_path / 'model.gguf'

  @parameterized.parameters(True, False)
  def test_model_agrees_with_numpy_on_the_file(self, tie_embeddings):
    config = dataclasses.replace(CONFIG, tie_embeddings=tie_embeddings)
    path = _write(
      self.path,
      config,
      _tensors(config),
      {'blk.0.attn_q.weight': Q4_1, 'token_embd.weight': Q8_0},
    )
    self.assertEqual(
      dataclasses.replace(gguf.read_model_file(path).config, norm_epsilon=1e-5),
      config,
    )
    weights, _ = numpy_llama.read_weights(path)
    tokens = np.array([1, 3, 2, 2, 6, 0, 4, 5, 3], np.int32)
    expected = numpy_llama.forward(
      weights,
      tokens,
      layers=config.num_layers,
      heads=config.num_heads,
      kv_heads=config.num_kv_heads,
      theta=config.rope_theta,
      epsilon=config.norm_epsilon,
    )
    params = jax.tree.map(jnp.asarray, gguf.load_params(path, config))
    hidden = llama.hidden_states(
      config,
      params,
      tokens[None],
      np.arange(len(tokens))[None],
      np.ones_like(tokens)[None],
    )
    actual = llama.logits(config, params, hidden)[0]
    # float32 against float64, logits of size 10.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)

  def test_tree_is_that_of_the_model(self):
    path = _write(self.path, CONFIG, _tensors(CONFIG))
    params = gguf.load_params(path, CONFIG)
    wanted = jax.eval_shape(
      lambda: llama.init_params(CONFIG, jax.random.key(0))
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(params, wanted)

  def test_rows_are_put_in_half_split_order(self):
    rows = np.arange(12, dtype=np.float32)[:, None]  # Two heads of six.
    actual = gguf.half_split_rows(rows, 6)[:, 0]
    np.testing.assert_array_equal(
      actual, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    )

  def test_tokenizer_and_template(self):
    file = gguf.read_model_file(_write(self.path, CONFIG, _tensors(CONFIG)))
    self.assertEqual(
      file.tokenizer,
      gguf.TokenizerFields(
        tokens=TOKENS,
        merges=('a b',),
        token_types=(3, 3, 1, 1, 1, 1, 1),
        pre_tokenizer='smollm',
        eos_id=0,
        pad_id=None,
        bos_id=1,
      ),
    )
    self.assertEqual(file.chat_template, '{{ messages }}')
    self.assertEqual((file.bos_token, file.eos_token), ('<begin>', '<end>'))

  def test_all_bad_tensors_are_named(self):
    tensors = _tensors(CONFIG)
    del tensors['blk.1.ffn_up.weight']
    tensors['rope_freqs.weight'] = np.ones(4, np.float32)
    tensors['blk.0.attn_k.weight'] = np.ones((8, 32), np.float32)
    path = _write(self.path, CONFIG, tensors)
    with self.assertRaises(ValueError) as caught:
      gguf.load_params(path, CONFIG)
    for message in (
      'blk.1.ffn_up.weight is missing',
      'rope_freqs.weight is unknown',
      'blk.0.attn_k.weight is (8, 32), not (16, 32)',
    ):
      self.assertIn(message, str(caught.exception))

  @parameterized.parameters(
    ({'architecture': 'qwen2'}, "architecture 'qwen2' is not supported"),
    ({'tokenizer': 'llama'}, "tokenizer 'llama' is not supported"),
    (
      {'scaling': gguf_package.RopeScalingType.YARN},
      "rotary scaling 'yarn' is not supported",
    ),
  )
  def test_unsupported_model(self, fields, message):
    path = _write(self.path, CONFIG, _tensors(CONFIG), **fields)
    with self.assertRaisesRegex(ValueError, message):
      gguf.read_model_file(path)

  def test_bad_files(self):
    with self.assertRaisesRegex(FileNotFoundError, 'run `make smollm2`'):
      gguf.read_model_file(str(self.path))
    self.path.write_bytes(b'PK\3\4 something else')
    with self.assertRaisesRegex(ValueError, 'is not a GGUF file'):
      gguf.read_model_file(str(self.path))

  @parameterized.parameters(6, 100, 600, -1)
  def test_file_cut_short(self, size):
    path = _write(self.path, CONFIG, _tensors(CONFIG))
    self.path.write_bytes(self.path.read_bytes()[:size])
    with self.assertRaisesRegex(ValueError, 'is cut short'):
      gguf.load_params(path, CONFIG)

  def test_missing_package(self):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(gguf.importlib.util, 'find_spec', lambda name: None)
      with self.assertRaisesRegex(FileNotFoundError, 'run `make smollm2`'):
        gguf.find_smollm2()

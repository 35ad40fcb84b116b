import dataclasses
import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy

from llamarl_jax.checkpoints import hf
from llamarl_jax.checkpoints import hf_config
from llamarl_jax.checkpoints import hf_tensors
from llamarl_jax.checkpoints import safetensors_format
from llamarl_jax.models import llama
from llamarl_jax.models.config import LlamaConfig
from llamarl_jax.models.config import LoRAConfig
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import rules

CONFIG = LlamaConfig(
  vocab_size=10,
  width=8,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  mlp_width=12,
  rope_theta=100.0,
  tie_embeddings=False,
)
VARIANTS = {
  'plain': CONFIG,
  'tied': dataclasses.replace(CONFIG, tie_embeddings=True),
  'bias': dataclasses.replace(CONFIG, qkv_bias=True),
  'norm': dataclasses.replace(CONFIG, qk_norm=True),
}


def _tensors(config, seed=0):
  """Returns random weights as transformers names and shapes them."""
  rng = np.random.default_rng(seed)
  width, inner, size = config.width, config.mlp_width, config.head_dim
  queries, keys = config.num_heads * size, config.num_kv_heads * size
  shapes = {
    'model.embed_tokens.weight': (config.vocab_size, width),
    'model.norm.weight': (width,),
  }
  if not config.tie_embeddings:
    shapes['lm_head.weight'] = (config.vocab_size, width)
  layer = {
    'input_layernorm.weight': (width,),
    'self_attn.q_proj.weight': (queries, width),
    'self_attn.k_proj.weight': (keys, width),
    'self_attn.v_proj.weight': (keys, width),
    'self_attn.o_proj.weight': (width, queries),
    'post_attention_layernorm.weight': (width,),
    'mlp.gate_proj.weight': (inner, width),
    'mlp.up_proj.weight': (inner, width),
    'mlp.down_proj.weight': (width, inner),
  }
  if config.qkv_bias:
    layer |= {
      'self_attn.q_proj.bias': (queries,),
      'self_attn.k_proj.bias': (keys,),
      'self_attn.v_proj.bias': (keys,),
    }
  if config.qk_norm:
    layer |= {
      'self_attn.q_norm.weight': (size,),
      'self_attn.k_norm.weight': (size,),
    }
  for i in range(config.num_layers):
    for name, shape in layer.items():
      shapes[f'model.layers.{i}.{name}'] = shape
  return {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def _params():
  """Returns random parameters of CONFIG."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda spec: rng.normal(size=spec.shape).astype(np.float32),
    llama.abstract_params(CONFIG),
  )


class HFTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name) / 'model'

  def _write(self, tensors):
    """Writes a file by the safetensors package, an implementation not ours."""
    self.folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(tensors, self.folder / 'model.safetensors')

  @parameterized.named_parameters(*VARIANTS.items())
  def test_every_weight_comes_to_its_place(self, config):
    tensors = _tensors(config)
    self._write(tensors)
    params = hf.load_params(self.folder, config)
    wanted = jax.eval_shape(
      lambda: llama.init_params(config, jax.random.key(0))
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(params, wanted)
    np.testing.assert_array_equal(
      params['embedding'], tensors['model.embed_tokens.weight']
    )
    if not config.tie_embeddings:
      np.testing.assert_array_equal(params['head'], tensors['lm_head.weight'].T)
    size = config.head_dim
    for i in range(config.num_layers):
      prefix = f'model.layers.{i}.'
      # Head h of a projection [out, in] is rows h A .. (h + 1) A - 1, and of
      # the projection back its columns.
      attention = params['layers']['attention']
      for leaf, name in (('query', 'q'), ('key', 'k'), ('value', 'v')):
        weight = tensors[f'{prefix}self_attn.{name}_proj.weight']
        for h in range(weight.shape[0] // size):
          rows = slice(h * size, (h + 1) * size)
          np.testing.assert_array_equal(
            attention[leaf][i, :, h], weight[rows].T
          )
          if config.qkv_bias:
            bias = tensors[f'{prefix}self_attn.{name}_proj.bias']
            np.testing.assert_array_equal(
              attention[f'{leaf}_bias'][i, h], bias[rows]
            )
        if config.qk_norm and leaf != 'value':
          np.testing.assert_array_equal(
            attention[f'{leaf}_norm']['scale'][i],
            tensors[f'{prefix}self_attn.{name}_norm.weight'],
          )
      back = tensors[f'{prefix}self_attn.o_proj.weight']
      for h in range(config.num_heads):
        np.testing.assert_array_equal(
          attention['output'][i, h], back[:, h * size : (h + 1) * size].T
        )
      for leaf in ('gate', 'up', 'down'):
        np.testing.assert_array_equal(
          params['layers']['mlp'][leaf][i],
          tensors[f'{prefix}mlp.{leaf}_proj.weight'].T,
        )
      for leaf, name in (
        ('attention_norm', 'input_layernorm'),
        ('mlp_norm', 'post_attention_layernorm'),
      ):
        np.testing.assert_array_equal(
          params['layers'][leaf]['scale'][i], tensors[f'{prefix}{name}.weight']
        )

  @parameterized.named_parameters(*VARIANTS.items())
  def test_export_is_the_inverse(self, config):
    tensors = _tensors(config)
    self._write(tensors)
    params = hf.load_params(self.folder, config)
    copy = self.folder.with_name('copy')
    hf.export(copy, params, config, dtype=np.float32)
    self.assertEqual(hf_config.read_config(copy), config)
    written = safetensors.numpy.load_file(copy / 'model.safetensors')
    chex.assert_trees_all_equal(written, tensors)

  @parameterized.parameters(
    ({'fsdp': 2},), ({'tensor': 2},), ({'data': 2},), (None,)
  )
  def test_sharded_load_reads_each_byte_once(self, axes):
    tensors = _tensors(CONFIG)
    self._write(tensors)
    expected = hf.load_params(self.folder, CONFIG)
    specs = llama.abstract_params(CONFIG)
    if axes is None:
      one = jax.sharding.SingleDeviceSharding(jax.devices()[1])
      shardings = jax.tree.map(lambda _: one, specs)
    else:
      mesh = mesh_lib.make_mesh(axes, jax.devices()[:2])
      shardings, _ = rules.shardings(specs, mesh, rules.TRAINER_RULES)
    read_at = safetensors_format._read_at
    sizes = []

    def counted(file, place, offset):
      sizes.append(len(place))
      read_at(file, place, offset)

    with mock.patch.object(safetensors_format, '_read_at', counted):
      params = hf.load_params(self.folder, CONFIG, shardings)
    self.assertEqual(sum(sizes), sum(t.nbytes for t in tensors.values()))
    chex.assert_trees_all_equal(params, expected)
    jax.tree.map(
      lambda array, sharding: self.assertTrue(
        array.sharding.is_equivalent_to(sharding, array.ndim)
      ),
      params,
      shardings,
    )

  @parameterized.parameters(jnp.bfloat16, jnp.float16, jnp.float32)
  def test_several_files_in_any_dtype(self, dtype):
    params = _params()
    hf.export(self.folder, params, CONFIG, dtype=dtype, max_file_bytes=900)
    index = json.loads((self.folder / hf_tensors.INDEX_FILE).read_text())
    files = sorted(self.folder.glob('*.safetensors'))
    self.assertGreater(len(files), 2)
    self.assertEqual(
      files[0].name, f'model-00001-of-{len(files):05}.safetensors'
    )
    found = {}
    for file in files:
      for name in safetensors.numpy.load_file(file):
        found[name] = file.name
    self.assertEqual(found, index['weight_map'])
    loaded = hf.load_params(self.folder, CONFIG, dtype=dtype)
    chex.assert_trees_all_equal(
      loaded, jax.tree.map(lambda x: x.astype(dtype), params)
    )
    # The file that is missing is named before anything is read.
    files[1].unlink()
    with self.assertRaisesRegex(FileNotFoundError, files[1].name):
      hf.load_params(self.folder, CONFIG)

  def test_all_bad_tensors_are_named_from_headers_alone(self):
    tensors = _tensors(CONFIG)
    del tensors['model.layers.1.mlp.up_proj.weight']
    tensors['model.layers.0.self_attn.k_proj.weight'] = np.ones(
      (6, 8), np.float32
    )
    tensors['model.layers.3.mlp.up_proj.weight'] = np.ones((12, 8), np.float32)
    tensors['model.norm.weight'] = np.ones(8, np.int8)
    self._write(tensors)
    with mock.patch.object(safetensors_format, '_read_at') as read:
      for call in (hf.load_params, hf.check_tensors):
        with self.assertRaises(ValueError) as caught:
          call(self.folder, CONFIG)
        for message in (
          'model.layers.1.mlp.up_proj.weight is missing',
          'model.layers.3.mlp.up_proj.weight (12, 8) is unknown',
          'self_attn.k_proj.weight is (6, 8), not (12, 8)',
          'model.norm.weight is I8, not one of',
        ):
          self.assertIn(message, str(caught.exception))
    read.assert_not_called()

  def test_rotary_buffers_and_an_equal_tied_head_are_let_pass(self):
    config = VARIANTS['tied']
    tensors = _tensors(config)
    tensors['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.ones(
      3, np.float32
    )
    tensors['lm_head.weight'] = tensors['model.embed_tokens.weight']
    self._write(tensors)
    params = hf.load_params(self.folder, config)
    np.testing.assert_array_equal(
      params['embedding'], tensors['model.embed_tokens.weight']
    )
    self._write({**tensors, 'lm_head.weight': tensors['lm_head.weight'] * 2})
    with self.assertRaisesRegex(ValueError, 'differs.*tie_word_embeddings'):
      hf.load_params(self.folder, config)

  def test_no_weights(self):
    self.folder.mkdir()
    with self.assertRaisesRegex(FileNotFoundError, 'safetensors files'):
      hf.load_params(self.folder, CONFIG)

  def test_what_comes_with_the_weights(self):
    source = self.folder.with_name('source')
    source.mkdir()
    hf_config.write_config(
      source, CONFIG, token_ids={'bos_token_id': 1, 'eos_token_id': 2}
    )
    (source / 'tokenizer.json').write_text('{"version": "1.0"}')
    (source / 'model.safetensors').write_text('weights')
    params = hf.load_params(self._exported(), CONFIG)
    hf.export(self.folder, params, CONFIG, tokenizer_files_from=source)
    names = sorted(path.name for path in self.folder.iterdir())
    self.assertEqual(
      names,
      [
        'config.json',
        'generation_config.json',
        'model.safetensors',
        'tokenizer.json',
      ],
    )
    ids = {'bos_token_id': 1, 'eos_token_id': 2}
    text = (self.folder / 'generation_config.json').read_text()
    self.assertEqual(json.loads(text), ids)
    fields = hf_config.read_fields(self.folder)
    self.assertEqual({key: fields[key] for key in ids}, ids)
    # A file that is there goes before what config.json says.
    (source / 'generation_config.json').write_text('{"eos_token_id": [2, 3]}')
    again = self.folder.with_name('again')
    hf.export(again, params, CONFIG, tokenizer_files_from=source)
    text = (again / 'generation_config.json').read_text()
    self.assertEqual(json.loads(text), {'eos_token_id': [2, 3]})

  def _exported(self):
    folder = self.folder.with_name('exported')
    params = _params()
    hf.export(folder, params, CONFIG)
    return folder

  def test_nothing_is_overwritten_or_left_half_written(self):
    params = _params()
    self.folder.mkdir()
    (self.folder / 'thesis.tex').write_text('')
    with self.assertRaisesRegex(ValueError, 'not an empty folder'):
      hf.export(self.folder, params, CONFIG)
    other = self.folder.with_name('other')
    failing = mock.patch.object(
      safetensors_format, 'write', side_effect=OSError
    )
    with failing, self.assertRaises(OSError):
      hf.export(other, params, CONFIG)
    self.assertEqual(list(self.folder.parent.iterdir()), [self.folder])

  def test_wrong_params_are_named(self):
    params = _params()
    params['head'] = params['head'][:, :9]
    del params['layers']['mlp']['up']
    adapted = dataclasses.replace(CONFIG, lora=LoRAConfig(2, 4.0, ('query',)))
    names = llama.abstract_params(adapted)['layers']['attention']
    params['layers']['attention'] |= {
      name: np.zeros(spec.shape, np.float32)
      for name, spec in names.items()
      if 'lora' in name
    }
    with self.assertRaises(ValueError) as caught:
      hf.export(self.folder, params, CONFIG)
    for message in (
      'head is (8, 9), not (8, 10)',
      'layers/mlp/up is missing',
      'layers/attention/query_lora_a is not one (merge adapters first)',
    ):
      self.assertIn(message, str(caught.exception))
    with self.assertRaisesRegex(ValueError, "'int8'.*'bfloat16'"):
      hf.export(self.folder, params, CONFIG, dtype=np.int8)

  def test_loaded_from_bfloat16_exactly(self):
    tensors = _tensors(CONFIG)
    narrow = {k: v.astype(ml_dtypes.bfloat16) for k, v in tensors.items()}
    self._write(narrow)
    params = hf.load_params(self.folder, CONFIG)
    self.assertEqual(params['embedding'].dtype, np.float32)
    np.testing.assert_array_equal(
      params['embedding'],
      narrow['model.embed_tokens.weight'].astype(np.float32),
    )

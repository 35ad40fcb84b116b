import json
import pathlib
import tempfile

from absl.testing import parameterized

from llamarl_jax.checkpoints import hf_config
from llamarl_jax.models import catalog
from llamarl_jax.models.config import LlamaConfig
from llamarl_jax.models.config import RopeScaling

# Config files as released: https://huggingface.co/meta-llama/Llama-3.2-1B,
# HuggingFaceTB/SmolLM2-135M, mistralai/Mistral-7B-v0.3, Qwen/Qwen2.5-0.5B,
# Qwen/Qwen3-0.6B and meta-llama/Llama-2-7b-hf.
LLAMA_32_1B = {
  'architectures': ['LlamaForCausalLM'],
  'attention_bias': False,
  'attention_dropout': 0.0,
  'bos_token_id': 128000,
  'eos_token_id': 128001,
  'head_dim': 64,
  'hidden_act': 'silu',
  'hidden_size': 2048,
  'initializer_range': 0.02,
  'intermediate_size': 8192,
  'max_position_embeddings': 131072,
  'mlp_bias': False,
  'model_type': 'llama',
  'num_attention_heads': 32,
  'num_hidden_layers': 16,
  'num_key_value_heads': 8,
  'pretraining_tp': 1,
  'rms_norm_eps': 1e-05,
  'rope_scaling': {
    'factor': 32.0,
    'high_freq_factor': 4.0,
    'low_freq_factor': 1.0,
    'original_max_position_embeddings': 8192,
    'rope_type': 'llama3',
  },
  'rope_theta': 500000.0,
  'tie_word_embeddings': True,
  'torch_dtype': 'bfloat16',
  'transformers_version': '4.45.0.dev0',
  'use_cache': True,
  'vocab_size': 128256,
}
LLAMA_2_7B = {
  '_name_or_path': 'meta-llama/Llama-2-7b-hf',
  'architectures': ['LlamaForCausalLM'],
  'bos_token_id': 1,
  'eos_token_id': 2,
  'hidden_act': 'silu',
  'hidden_size': 4096,
  'initializer_range': 0.02,
  'intermediate_size': 11008,
  'max_position_embeddings': 4096,
  'model_type': 'llama',
  'num_attention_heads': 32,
  'num_hidden_layers': 32,
  'num_key_value_heads': 32,
  'pretraining_tp': 1,
  'rms_norm_eps': 1e-05,
  'rope_scaling': None,
  'tie_word_embeddings': False,
  'torch_dtype': 'float16',
  'transformers_version': '4.31.0.dev0',
  'use_cache': True,
  'vocab_size': 32000,
}
SMOLLM2_135M = {
  'architectures': ['LlamaForCausalLM'],
  'attention_bias': False,
  'attention_dropout': 0.0,
  'bos_token_id': 0,
  'eos_token_id': 0,
  'hidden_act': 'silu',
  'hidden_size': 576,
  'initializer_range': 0.041666666666666664,
  'intermediate_size': 1536,
  'is_llama_config': True,
  'max_position_embeddings': 8192,
  'model_type': 'llama',
  'num_attention_heads': 9,
  'num_hidden_layers': 30,
  'num_key_value_heads': 3,
  'pretraining_tp': 1,
  'rms_norm_eps': 1e-05,
  'rope_interleaved': False,
  'rope_scaling': None,
  'rope_theta': 100000,
  'tie_word_embeddings': True,
  'torch_dtype': 'bfloat16',
  'transformers_version': '4.40.1',
  'use_cache': True,
  'vocab_size': 49152,
}
MISTRAL_7B_V03 = {
  'architectures': ['MistralForCausalLM'],
  'attention_dropout': 0.0,
  'bos_token_id': 1,
  'eos_token_id': 2,
  'hidden_act': 'silu',
  'hidden_size': 4096,
  'initializer_range': 0.02,
  'intermediate_size': 14336,
  'max_position_embeddings': 32768,
  'model_type': 'mistral',
  'num_attention_heads': 32,
  'num_hidden_layers': 32,
  'num_key_value_heads': 8,
  'rms_norm_eps': 1e-05,
  'rope_theta': 1000000.0,
  'sliding_window': None,
  'tie_word_embeddings': False,
  'torch_dtype': 'bfloat16',
  'transformers_version': '4.42.0.dev0',
  'use_cache': True,
  'vocab_size': 32768,
}
QWEN25_05B = {
  'architectures': ['Qwen2ForCausalLM'],
  'attention_dropout': 0.0,
  'bos_token_id': 151643,
  'eos_token_id': 151643,
  'hidden_act': 'silu',
  'hidden_size': 896,
  'initializer_range': 0.02,
  'intermediate_size': 4864,
  'max_position_embeddings': 32768,
  'max_window_layers': 24,
  'model_type': 'qwen2',
  'num_attention_heads': 14,
  'num_hidden_layers': 24,
  'num_key_value_heads': 2,
  'rms_norm_eps': 1e-06,
  'rope_theta': 1000000.0,
  'sliding_window': 32768,
  'tie_word_embeddings': True,
  'torch_dtype': 'bfloat16',
  'transformers_version': '4.40.1',
  'use_cache': True,
  'use_mrope': False,
  'use_sliding_window': False,
  'vocab_size': 151936,
}
QWEN3_06B = {
  'architectures': ['Qwen3ForCausalLM'],
  'attention_bias': False,
  'attention_dropout': 0.0,
  'bos_token_id': 151643,
  'eos_token_id': 151645,
  'head_dim': 128,
  'hidden_act': 'silu',
  'hidden_size': 1024,
  'initializer_range': 0.02,
  'intermediate_size': 3072,
  'max_position_embeddings': 40960,
  'max_window_layers': 28,
  'model_type': 'qwen3',
  'num_attention_heads': 16,
  'num_hidden_layers': 28,
  'num_key_value_heads': 8,
  'rms_norm_eps': 1e-06,
  'rope_scaling': None,
  'rope_theta': 1000000,
  'sliding_window': None,
  'tie_word_embeddings': True,
  'torch_dtype': 'bfloat16',
  'transformers_version': '4.51.0',
  'use_cache': True,
  'use_sliding_window': False,
  'vocab_size': 151936,
}
RELEASED = {
  'llama_2': (
    LLAMA_2_7B,
    LlamaConfig(
      *(32000, 4096, 32, 32, 32, 128, 11008, 10000.0),
      tie_embeddings=False,
      max_position=4096,
    ),
  ),
  'llama_3_2': (LLAMA_32_1B, catalog.ARCHITECTURES['llama-3.2-1b']),
  'smollm2': (
    SMOLLM2_135M,
    LlamaConfig(*(49152, 576, 30, 9, 3, 64, 1536, 100000.0), max_position=8192),
  ),
  'mistral': (
    MISTRAL_7B_V03,
    LlamaConfig(
      *(32768, 4096, 32, 32, 8, 128, 14336, 1e6),
      tie_embeddings=False,
      max_position=32768,
    ),
  ),
  'qwen2_5': (
    QWEN25_05B,
    LlamaConfig(
      *(151936, 896, 24, 14, 2, 64, 4864, 1e6),
      norm_epsilon=1e-6,
      max_position=32768,
      qkv_bias=True,
    ),
  ),
  'qwen3': (
    QWEN3_06B,
    LlamaConfig(
      *(151936, 1024, 28, 16, 8, 128, 3072, 1e6),
      norm_epsilon=1e-6,
      max_position=40960,
      qk_norm=True,
    ),
  ),
}
LLAMA3_ROPE = LLAMA_32_1B['rope_scaling']


class HFConfigTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)

  def _read(self, fields, **changes):
    fields = {**fields, **changes}
    (self.folder / 'config.json').write_text(json.dumps(fields))
    return hf_config.read_config(self.folder)

  @parameterized.named_parameters(
    (name, *pair) for name, pair in RELEASED.items()
  )
  def test_released_config(self, fields, expected):
    self.assertEqual(self._read(fields), expected)

  @parameterized.named_parameters(
    (name, pair[1]) for name, pair in RELEASED.items()
  )
  def test_what_is_written_reads_the_same(self, config):
    ids = {'bos_token_id': 1, 'eos_token_id': [2, 3]}
    hf_config.write_config(self.folder, config, token_ids=ids)
    self.assertEqual(hf_config.read_config(self.folder), config)
    fields = hf_config.read_fields(self.folder)
    self.assertEqual(fields['eos_token_id'], [2, 3])
    self.assertEqual(fields['torch_dtype'], 'bfloat16')

  @parameterized.parameters(
    ({'rope_scaling': {**LLAMA3_ROPE, 'factor': 8}}, 8, 500000),
    (
      {
        'rope_scaling': {
          **{k: v for k, v in LLAMA3_ROPE.items() if k != 'rope_type'},
          'type': 'llama3',
        }
      },
      32,
      500000,
    ),
    (
      {
        'rope_scaling': None,
        'rope_theta': None,
        'rope_parameters': {**LLAMA3_ROPE, 'rope_theta': 10000.0},
      },
      32,
      10000,
    ),
    (
      {'rope_parameters': {**LLAMA3_ROPE, 'rope_theta': 500000.0}},
      32,
      500000,
    ),
    (
      {
        'rope_scaling': None,
        'rope_theta': None,
        'rope_parameters': {'rope_type': 'default', 'rope_theta': 7.0},
      },
      None,
      7,
    ),
  )
  def test_spellings_of_rotary_scaling(self, changes, factor, theta):
    config = self._read(LLAMA_32_1B, **changes)
    self.assertEqual(config.rope_theta, theta)
    expected = factor and RopeScaling(factor, 1.0, 4.0, 8192)
    self.assertEqual(config.rope_scaling, expected)

  @parameterized.parameters(
    ({'model_type': 'mixtral'}, "'mixtral' is not supported.*qwen3"),
    ({'architectures': ['LlamaModel']}, 'LlamaModel.*LlamaForCausalLM'),
    ({'attention_bias': True}, 'attention_bias=True: biases of the attention'),
    ({'mlp_bias': True}, 'mlp_bias=True: biases of the MLP'),
    ({'hidden_act': 'gelu'}, "hidden_act='gelu': only 'silu'"),
    ({'num_local_experts': 8}, 'num_local_experts=8: mixtures'),
    ({'quantization_config': {'bits': 4}}, 'quantization_config.*bfloat16'),
    ({'attention_dropout': 0.1}, 'attention_dropout=0.1: dropout'),
    ({'use_sliding_window': True, 'sliding_window': 9}, 'sliding_window=9'),
    ({'layer_types': ['sliding_attention']}, 'sliding_attention'),
    ({'no_rope_layers': [1, 0]}, r'no_rope_layers=\[1, 0\]: not known'),
    ({'rope_interleaved': True}, 'rope_interleaved=True: not known'),
    ({'hidden_size': None}, 'hidden_size is missing'),
    ({'num_hidden_layers': '2'}, "num_hidden_layers='2' is not a whole"),
    ({'rope_theta': 'x'}, "rope_theta='x' is not a number"),
    ({'num_key_value_heads': 5}, '5.*each key/value head'),
    (
      {'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0}},
      "'yarn' is not supported.*'llama3'",
    ),
    ({'rope_scaling': {'type': 'linear', 'factor': 2.0}}, "'linear'"),
    ({'rope_scaling': {'factor': 2.0}}, "'default'.*not supported"),
    (
      {'rope_scaling': {'rope_type': 'llama3', 'factor': 8.0}},
      r"lacks \['high_freq_factor', 'low_freq_factor'",
    ),
    (
      {'rope_scaling': {**LLAMA3_ROPE, 'attention_factor': 1.1}},
      r"with \['attention_factor'\]",
    ),
    (
      {'rope_parameters': {**LLAMA3_ROPE, 'rope_theta': 1.0}},
      'rope_parameters.*differ from rope_scaling',
    ),
  )
  def test_what_is_not_supported_is_named(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      self._read(LLAMA_32_1B, **changes)

  def test_all_faults_are_named_at_once(self):
    with self.assertRaises(ValueError) as caught:
      self._read(LLAMA_32_1B, mlp_bias=True, vocab_size=0, hidden_act='relu')
    for word in ('mlp_bias', 'vocab_size=0', "'relu'"):
      self.assertIn(word, str(caught.exception))

  def test_defaults_of_left_out_keys_are_those_of_the_family(self):
    del (fields := dict(MISTRAL_7B_V03))['sliding_window']
    # Mistral has a window unless the file says null.
    with self.assertRaisesRegex(ValueError, 'sliding_window=4096'):
      self._read(fields)
    del (fields := dict(QWEN3_06B))['head_dim']
    self.assertEqual(self._read(fields).head_dim, 128)
    del (fields := dict(LLAMA_2_7B))['num_key_value_heads']
    self.assertEqual(self._read(fields).num_kv_heads, 32)

  def test_no_or_no_json_file(self):
    with self.assertRaisesRegex(FileNotFoundError, 'config.json.*folder of a'):
      hf_config.read_config(self.folder / 'nothing')
    (self.folder / 'config.json').write_text('{"model_type": ')
    with self.assertRaisesRegex(ValueError, 'config.json is damaged'):
      hf_config.read_config(self.folder)

  def test_no_architecture_has_both_switches(self):
    config = LlamaConfig(
      *(8, 8, 1, 2, 1, 4, 8, 1.0), qkv_bias=True, qk_norm=True
    )
    with self.assertRaisesRegex(ValueError, 'leave one out'):
      hf_config.write_config(self.folder, config)

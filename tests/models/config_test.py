from absl.testing import absltest
from absl.testing import parameterized

from llamarl_jax.models import config as config_lib

_FIELDS = {
  'vocab_size': 16,
  'width': 8,
  'num_layers': 2,
  'num_heads': 4,
  'num_kv_heads': 2,
  'head_dim': 2,
  'mlp_width': 12,
  'rope_theta': 1e4,
}


class ConfigTest(parameterized.TestCase):
  @parameterized.parameters(
    ('vocab_size', 0, 'vocab_size is 0'),
    ('num_kv_heads', 3, 'num_heads 4 is not a multiple of num_kv_heads 3'),
    ('head_dim', 3, 'head_dim is 3'),
    ('rope_theta', 0.0, 'rope_theta is 0.0'),
    ('norm_epsilon', -1.0, 'norm_epsilon is -1.0'),
    ('num_tokens', 17, 'num_tokens is 17.*vocab_size 16'),
    ('num_tokens', 0, 'num_tokens is 0'),
  )
  def test_refuses_a_wrong_field(self, field, value, message):
    with self.assertRaisesRegex(ValueError, message):
      config_lib.LlamaConfig(**(_FIELDS | {field: value}))

  @parameterized.parameters(
    ({'factor': 0.5}, 'factor is 0.5'),
    ({'low_frequency_factor': 4.0}, 'low_frequency_factor is 4.0.*below'),
    ({'original_max_position': 0}, 'original_max_position is 0'),
  )
  def test_refuses_wrong_rope_scaling(self, changes, message):
    fields = {
      'factor': 8.0,
      'low_frequency_factor': 1.0,
      'high_frequency_factor': 4.0,
      'original_max_position': 8192,
    }
    with self.assertRaisesRegex(ValueError, message):
      config_lib.RopeScaling(**(fields | changes))

  @parameterized.parameters(
    ({'rank': 0}, 'rank is 0'),
    ({'alpha': 0.0}, 'alpha is 0.0'),
    ({'targets': ()}, 'targets are'),
    ({'targets': ('query', 'query')}, 'once'),
    ({'targets': ('q_proj',)}, 'q_proj.*query'),
  )
  def test_refuses_wrong_adapters(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      config_lib.LoRAConfig(**({'rank': 4, 'alpha': 8.0} | changes))

  def test_counts_the_published_size_of_smollm2(self):
    # 134,515,008 parameters: https://huggingface.co/HuggingFaceTB/SmolLM2-135M
    config = config_lib.LlamaConfig(
      vocab_size=49152,
      width=576,
      num_layers=30,
      num_heads=9,
      num_kv_heads=3,
      head_dim=64,
      mlp_width=1536,
      rope_theta=1e5,
    )
    self.assertEqual(config_lib.num_parameters(config), 134_515_008)

  def test_counts_the_published_size_of_llama_3_8b(self):
    # 8,030,261,248: https://huggingface.co/meta-llama/Meta-Llama-3-8B
    config = config_lib.LlamaConfig(
      vocab_size=128256,
      width=4096,
      num_layers=32,
      num_heads=32,
      num_kv_heads=8,
      head_dim=128,
      mlp_width=14336,
      rope_theta=5e5,
      tie_embeddings=False,
    )
    self.assertEqual(config_lib.num_parameters(config), 8_030_261_248)

  def test_counts_the_published_size_of_qwen_2_5(self):
    # 494,032,768: https://huggingface.co/Qwen/Qwen2.5-0.5B
    config = config_lib.LlamaConfig(
      vocab_size=151936,
      width=896,
      num_layers=24,
      num_heads=14,
      num_kv_heads=2,
      head_dim=64,
      mlp_width=4864,
      rope_theta=1e6,
      qkv_bias=True,
    )
    self.assertEqual(config_lib.num_parameters(config), 494_032_768)


if __name__ == '__main__':
  absltest.main()

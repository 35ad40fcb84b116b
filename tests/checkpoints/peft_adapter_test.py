"""The folder that peft reads; tests/parity/lora_check.py has peft read it."""

import dataclasses
import json

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from llamarl_jax.checkpoints import peft_adapter
from llamarl_jax.checkpoints import safetensors_format
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama

_CONFIG = config_lib.LlamaConfig(
  vocab_size=16,
  width=12,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  mlp_width=20,
  rope_theta=1e4,
  lora=config_lib.LoRAConfig(
    rank=3, alpha=8.0, targets=('query', 'value', 'output', 'down')
  ),
)
# Module: in and out features, as torch's Linear has them.
_MODULES = {
  'self_attn.q_proj': (12, 24),
  'self_attn.v_proj': (12, 12),
  'self_attn.o_proj': (24, 12),
  'mlp.down_proj': (20, 12),
}


def _params(config=_CONFIG):
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda spec: jnp.asarray(rng.normal(size=spec.shape), jnp.float32),
    llama.abstract_params(config),
  )


def _read(path):
  """Returns the tensors of a file, read with nothing but numpy."""
  found = safetensors_format.read_header(path)
  return {
    name: np.memmap(
      path, safetensors_format.DTYPES[t.dtype], 'r', t.start, t.shape
    )
    for name, t in found.items()
  }


class PeftAdapterTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _folder(self, tmp_path):
    self.path = tmp_path / 'adapter'

  def test_names_and_shapes_are_those_of_peft(self):
    """https://huggingface.co/docs/peft/developer_guides/checkpoint."""
    peft_adapter.export(self.path, _params(), _CONFIG, base_model='base')
    tensors = _read(self.path / 'adapter_model.safetensors')
    expected = {}
    for i in range(2):
      for module, (inner, outer) in _MODULES.items():
        name = f'base_model.model.model.layers.{i}.{module}'
        expected[f'{name}.lora_A.weight'] = (3, inner)
        expected[f'{name}.lora_B.weight'] = (outer, 3)
    self.assertEqual({n: t.shape for n, t in tensors.items()}, expected)
    facts = json.loads((self.path / 'adapter_config.json').read_text())
    self.assertEqual(
      facts['target_modules'], ['down_proj', 'o_proj', 'q_proj', 'v_proj']
    )
    self.assertEqual((facts['r'], facts['lora_alpha']), (3, 8.0))
    self.assertEqual(facts['base_model_name_or_path'], 'base')
    self.assertEqual(facts['peft_type'], 'LORA')

  def test_tensors_are_the_adapters_in_the_layout_of_torch(self):
    """x A' B' of flat features equals the product over heads and channels."""
    params = _params()
    peft_adapter.export(self.path, params, _CONFIG, base_model='base')
    tensors = _read(self.path / 'adapter_model.safetensors')
    own = jax.tree.map(np.asarray, params['layers']['attention'])
    rng = np.random.default_rng(1)
    x, mixed = rng.normal(size=12), rng.normal(size=(4, 6))

    def apply(module, x):
      name = f'base_model.model.model.layers.1.self_attn.{module}'
      first = tensors[f'{name}.lora_A.weight']
      return tensors[f'{name}.lora_B.weight'] @ (first @ x)

    narrow = x @ own['query_lora_a'][1]
    queries = np.einsum('r,rha->ha', narrow, own['query_lora_b'][1])
    np.testing.assert_allclose(
      apply('q_proj', x).reshape(4, 6), queries, rtol=1e-4
    )
    narrow = np.einsum('ha,har->r', mixed, own['output_lora_a'][1])
    back = narrow @ own['output_lora_b'][1]
    np.testing.assert_allclose(
      apply('o_proj', mixed.reshape(-1)), back, rtol=1e-4
    )

  def test_writes_bfloat16(self):
    peft_adapter.export(
      self.path, _params(), _CONFIG, base_model='base', dtype=jnp.bfloat16
    )
    tensors = _read(self.path / 'adapter_model.safetensors')
    name = 'base_model.model.model.layers.0.mlp.down_proj.lora_A.weight'
    first = np.asarray(_params()['layers']['mlp']['down_lora_a'][0].T)
    self.assertEqual(tensors[name].dtype, ml_dtypes.bfloat16)
    np.testing.assert_array_equal(
      tensors[name], first.astype(ml_dtypes.bfloat16)
    )

  def test_refuses_what_it_cannot_write(self):
    plain = dataclasses.replace(_CONFIG, lora=None)
    with self.assertRaisesRegex(ValueError, 'no adapters.*hf.export'):
      peft_adapter.export(self.path, _params(), plain, base_model='base')
    with self.assertRaisesRegex(ValueError, 'lora_a is None'):
      peft_adapter.export(self.path, _params(plain), _CONFIG, base_model='base')
    with self.assertRaisesRegex(ValueError, 'int8'):
      peft_adapter.export(
        self.path, _params(), _CONFIG, base_model='base', dtype=jnp.int8
      )
    self.assertFalse(self.path.exists())

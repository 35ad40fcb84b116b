"""Adapters exported here, loaded by the peft package: the same logits.

Needs CPU torch, transformers and peft; `make parity` installs and runs it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers

from llamarl_jax.checkpoints import hf
from llamarl_jax.checkpoints import peft_adapter
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.models import lora

_BASE = config_lib.LlamaConfig(
  vocab_size=64,
  width=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  mlp_width=48,
  rope_theta=1e4,
)


@pytest.mark.parametrize(
  ('rank', 'alpha', 'targets'),
  [
    (4, 8.0, config_lib.PROJECTIONS),
    (3, 1.0, ('query', 'value')),
    (1, 32.0, ('output', 'down')),
  ],
)
def test_peft_gives_the_same_logits(tmp_path, rank, alpha, targets):
  """To 1e-4 of the largest logit, applied beside the weights and merged."""
  config = dataclasses.replace(
    _BASE, lora=config_lib.LoRAConfig(rank, alpha, targets)
  )
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda spec: jnp.asarray(rng.normal(0, 0.2, spec.shape), jnp.float32),
    llama.abstract_params(config),
  )
  base = lora.split_trainable(params)[1]
  hf.export(tmp_path / 'base', base, _BASE, dtype=jnp.float32)
  peft_adapter.export(
    tmp_path / 'adapter', params, config, base_model=str(tmp_path / 'base')
  )
  tokens = rng.integers(_BASE.vocab_size, size=(2, 10))
  positions = jnp.broadcast_to(jnp.arange(10)[None], tokens.shape)
  hidden = llama.hidden_states(
    config, params, jnp.asarray(tokens), positions, jnp.ones_like(positions)
  )
  expected = np.asarray(llama.logits(config, params, hidden))
  close = {'rtol': 0, 'atol': 1e-4 * np.abs(expected).max()}

  model = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'base', dtype=torch.float32
  )
  with torch.no_grad():
    plain = model(torch.from_numpy(tokens)).logits.numpy()
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / 'adapter')
    apart = adapted(torch.from_numpy(tokens)).logits.numpy()
    merged = adapted.merge_and_unload()(torch.from_numpy(tokens)).logits
  assert np.abs(plain - expected).max() > 0.01 * np.abs(expected).max()
  np.testing.assert_allclose(apart, expected, **close)
  np.testing.assert_allclose(merged.numpy(), expected, **close)

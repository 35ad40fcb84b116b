"""Random small models of every family, against transformers in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from llamarl_jax.checkpoints import hf
from llamarl_jax.checkpoints import hf_config
from llamarl_jax.checkpoints import hf_tensors
from llamarl_jax.models import llama
from llamarl_jax.sharding import spec

LENGTH = 80
# Sequences go far beyond the context that rotary scaling starts from.
ORIGINAL = 24
BATCH = 2


def _llama3(factor):
  return {
    'rope_type': 'llama3',
    'factor': factor,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': ORIGINAL,
  }


# model_type, and what the released models of the family have in common.
FAMILIES = {
  'llama_2': ('llama', {'rope_theta': 10000.0}),
  'llama_3': ('llama', {'rope_theta': 500000.0}),
  'llama_3_1': ('llama', {'rope_theta': 500000.0, 'rope': _llama3(8.0)}),
  'llama_3_2': (
    'llama',
    {'rope_theta': 500000.0, 'rope': _llama3(32.0), 'tie': True},
  ),
  'smollm2': (
    'llama',
    {'rope_theta': 100000.0, 'tie': True, 'kv_heads': 3, 'groups': 3},
  ),
  'mistral': ('mistral', {'rope_theta': 1e6, 'sliding_window': None}),
  'qwen2': ('qwen2', {'rope_theta': 1e6}),
  'qwen3': ('qwen3', {'rope_theta': 1e6}),
}
CASES = [(name, seed) for name in FAMILIES for seed in range(3)]


def _config(family, seed):
  """Returns a random config of a family, by transformers' own classes."""
  model_type, fixed = FAMILIES[family]
  fixed = dict(fixed)
  rng = np.random.default_rng([seed, *family.encode()])
  kv_heads = fixed.pop('kv_heads', int(rng.choice([1, 2, 3])))
  # The groups of a family's seeds differ: every ratio is seen.
  groups = fixed.pop('groups', (1, 2, 4)[seed])
  theta = fixed.pop('rope_theta')
  rope = fixed.pop('rope', {'rope_type': 'default'})
  return transformers.AutoConfig.for_model(
    model_type,
    vocab_size=int(rng.choice([61, 96])),
    # A multiple of the heads, as transformers asks, but not by head_dim.
    hidden_size=groups * kv_heads * int(rng.choice([6, 10])),
    intermediate_size=int(rng.choice([36, 56])),
    num_hidden_layers=2,
    num_attention_heads=groups * kv_heads,
    num_key_value_heads=kv_heads,
    head_dim=int(rng.choice([8, 12, 16])),
    max_position_embeddings=4 * LENGTH,
    rms_norm_eps=float(rng.choice([1e-5, 1e-6])),
    rope_parameters={'rope_theta': theta, **rope},
    tie_word_embeddings=fixed.pop('tie', bool(rng.integers(2))),
    attn_implementation='eager',
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=None,
    **fixed,
  )


def _model(config, seed):
  """Returns a model in which every weight matters, norms and biases too."""
  model = transformers.AutoModelForCausalLM.from_config(
    config, dtype=torch.float32
  )
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for weight in model.parameters():
      noise = torch.randn(weight.shape, generator=generator)
      if weight.ndim == 1:
        weight.add_(0.3 * noise)
      else:
        weight.copy_(noise * weight.shape[1] ** -0.5)
  return model


def _torch_logits(model, tokens):
  return model(torch.tensor(tokens, dtype=torch.long)).logits


def _torch_gradients(model, tokens, weights):
  """Returns by name the gradients of the weighted sum of log-probs."""
  log_probs = torch.log_softmax(_torch_logits(model, tokens)[:, :-1], -1)
  targets = torch.tensor(tokens[:, 1:, None], dtype=torch.long)
  chosen = log_probs.gather(-1, targets)[..., 0]
  (chosen * torch.tensor(weights)).sum().backward()
  return {name: w.grad.numpy() for name, w in model.named_parameters()}


def _ours(config, params, tokens, weights):
  """Returns logits, and gradients by the names of transformers."""

  def objective(params):
    hidden = llama.hidden_states(
      config,
      params,
      tokens,
      jnp.broadcast_to(jnp.arange(LENGTH)[None], tokens.shape),
      jnp.ones_like(tokens),
    )
    logits = llama.logits(config, params, hidden)
    log_probs = jax.nn.log_softmax(logits[:, :-1])
    targets = tokens[:, 1:, None]
    chosen = jnp.take_along_axis(log_probs, targets, -1)[..., 0]
    return jnp.sum(chosen * weights), logits

  gradients, logits = jax.jit(jax.grad(objective, has_aux=True))(params)
  leaves = spec.named_leaves(jax.device_get(gradients))
  named = {}
  for place in hf_tensors.places(config):
    leaf = leaves[place.leaf]
    layer = leaf if place.layer is None else leaf[place.layer]
    named[place.name] = place.viewed(layer).reshape(place.shape)
  return np.asarray(logits), named


def _assert_close(actual, expected, tolerance, name=''):
  """Differences are relative to the largest of the array."""
  scale = np.abs(expected).max()
  np.testing.assert_allclose(
    actual, expected, rtol=0, atol=tolerance * scale, err_msg=name
  )


@pytest.mark.parametrize(('family', 'seed'), CASES)
def test_agrees_with_transformers(family, seed, tmp_path):
  model = _model(_config(family, seed), seed)
  theirs = tmp_path / 'theirs'
  # Some in one file, some in several.
  model.save_pretrained(theirs, max_shard_size='20KB' if seed else '1GB')
  rng = np.random.default_rng(seed)
  vocab = model.config.vocab_size
  tokens = rng.integers(vocab, size=(BATCH, LENGTH)).astype(np.int32)
  weights = rng.normal(size=(BATCH, LENGTH - 1)).astype(np.float32)
  with torch.no_grad():
    expected = _torch_logits(model, tokens).numpy()

  config = hf_config.read_config(theirs)
  params = jax.tree.map(jnp.asarray, hf.load_params(theirs, config))
  logits, gradients = _ours(config, params, tokens, weights)
  _assert_close(logits, expected, 1e-4)
  wanted = _torch_gradients(model, tokens, weights)
  assert gradients.keys() == wanted.keys()
  for name, gradient in wanted.items():
    _assert_close(gradients[name], gradient, 1e-3, name)

  ours = tmp_path / 'ours'
  hf.export(
    ours,
    params,
    config,
    dtype=jnp.float32,
    tokenizer_files_from=theirs,
    max_file_bytes=20_000 if seed else 10**9,
  )
  again, report = transformers.AutoModelForCausalLM.from_pretrained(
    ours,
    dtype=torch.float32,
    attn_implementation='eager',
    output_loading_info=True,
  )
  for problem in ('missing_keys', 'unexpected_keys', 'mismatched_keys'):
    assert not report[problem], (problem, report[problem])
  with torch.no_grad():
    # The same weights in the same arithmetic.
    _assert_close(_torch_logits(again, tokens).numpy(), expected, 1e-6)
  assert again.config.eos_token_id == 1


def test_long_positions_are_scaled():
  # The check above would pass as well if both sides left scaling out.
  model = _model(_config('llama_3_1', 0), 0)
  tokens = np.arange(LENGTH)[None] % model.config.vocab_size
  plain = _config('llama_3_1', 0)
  plain.rope_parameters = {'rope_theta': 500000.0, 'rope_type': 'default'}
  other = transformers.AutoModelForCausalLM.from_config(plain)
  other.load_state_dict(model.state_dict())
  with torch.no_grad():
    scaled, unscaled = (
      _torch_logits(model, tokens),
      _torch_logits(other, tokens),
    )
  assert (scaled - unscaled).abs().max() > 1e-2

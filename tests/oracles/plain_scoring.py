"""A small model and batch, and the plain way to score it.

The plain way takes logits everywhere and shifts them by one; what it is
compared with takes those of completion tokens alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.training import batching

CONFIG = config_lib.LlamaConfig(
  vocab_size=11,
  width=16,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  mlp_width=24,
  rope_theta=1e4,
)
TEMPERATURE = 0.7
# Unequal on purpose: micro-batches of 2 hold from 4 to 9 tokens.
PROMPT_LENGTHS = (1, 2, 3, 2, 4, 1, 2, 3)
COMPLETION_LENGTHS = (5, 1, 2, 4, 3, 5, 1, 4)


@functools.cache
def params():
  """Returns random parameters, norms and biases among them."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda spec: np.float32(rng.normal(size=spec.shape) / 3),
    llama.abstract_params(CONFIG),
  )


def batch():
  """Returns eight rows of one sequence each, of 8 tokens at most."""
  rng = np.random.default_rng(1)
  rows = batching.empty_rows(len(PROMPT_LENGTHS), 8, pad_token=0)
  lengths = zip(PROMPT_LENGTHS, COMPLETION_LENGTHS, strict=True)
  for row, (prompt, completion) in enumerate(lengths):
    where = batching.place_sequence(
      rows,
      row,
      rng.integers(11, size=prompt),
      rng.integers(11, size=completion),
    )
    rows.advantages[row, where] = rng.normal()
    rows.behavior_log_probs[row, where] = rng.uniform(-3, -1, completion)
  return rows


def log_probs_and_entropy(params, batch):
  """Returns both, f32[B, T] each, 0 where no completion token is."""
  hidden = llama.hidden_states(
    CONFIG, params, batch.tokens, batch.positions, batch.segment_ids
  )
  logits = llama.logits(CONFIG, params, hidden) / TEMPERATURE
  table = jax.nn.log_softmax(logits, axis=-1)
  scored = jnp.take_along_axis(table[:, :-1], batch.tokens[:, 1:, None], -1)
  entropy = -jnp.sum(jnp.exp(table) * table, axis=-1)[:, :-1]

  def shift(values):
    values = jnp.pad(values, ((0, 0), (1, 0)))
    return jnp.where(batch.completion_mask, values, 0.0)

  return shift(scored[..., 0]), shift(entropy)

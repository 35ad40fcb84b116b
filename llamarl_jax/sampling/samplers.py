"""Drawing a token, with the log-prob of the distribution it is drawn from."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

# Tokens a block: of 128 k tokens, 1,000 blocks are drawn from, then 128 tokens.
_BLOCK = 128


class Sampled(NamedTuple):
  """One token a slot.

  Attributes:
    tokens: i32[S].
    log_probs: f32[S], under the distribution sampled from.
  """

  tokens: jax.Array
  log_probs: jax.Array


def _draw(log_weights: jax.Array, keys: chex.PRNGKey) -> jax.Array:
  """Returns an index a row, by argmax(log weight + Gumbel noise)."""
  size = log_weights.shape[-1]
  noise = jax.vmap(lambda key: jax.random.gumbel(key, (size,)))(keys)
  return jnp.argmax(log_weights + noise, axis=-1).astype(jnp.int32)


def sample(
  logits: jax.Array, keys: chex.PRNGKey, temperature: jax.Array
) -> Sampled:
  """Returns a token a slot, drawn from softmax(logits / temperature).

  log_prob = log_softmax(logits / temperature)[token]

  The Gumbel-max trick (Maddison et al. 2014, A* sampling) is used twice: on the
  total weights of blocks of the vocabulary, then on the tokens of the block
  drawn. That is the same distribution, with noise for V / 128 + 128 numbers in
  place of V; drawing noise for every token can cost half as much as the model.

  Where the temperature is 0 the token is argmax(logits), and its log-prob that
  of temperature 1.

  Args:
    logits: f32[S, V].
    keys: keys[S], one a slot.
    temperature: f32[S], at least 0.
  """
  chex.assert_rank([logits, temperature], [2, 1])
  slots, vocab_size = logits.shape
  greedy = temperature == 0
  scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
  missing = -vocab_size % _BLOCK
  blocks = jnp.pad(scaled, ((0, 0), (0, missing)), constant_values=-jnp.inf)
  blocks = blocks.reshape(slots, -1, _BLOCK)
  peak = jnp.max(scaled, axis=-1)
  weights = jnp.sum(jnp.exp(blocks - peak[:, None, None]), axis=-1)
  log_total = peak + jnp.log(jnp.sum(weights, axis=-1))

  two_keys = jax.vmap(jax.random.split)(keys)
  block = _draw(jnp.log(weights), two_keys[:, 0])
  inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  drawn = block * _BLOCK + _draw(inside, two_keys[:, 1])
  best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  tokens = jnp.where(greedy, best, drawn)
  chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
  return Sampled(tokens, chosen - log_total)

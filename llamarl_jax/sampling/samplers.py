"""Drawing a token, with the log-prob of the distribution it is drawn from.

Truncation (top-k, top-p, min-p) is a floor under the logits, found without
sorting the vocabulary: by bisection on the bits of a float.
"""

from collections.abc import Callable
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

_SIGN = np.uint32(1 << 31)


class Sampled(NamedTuple):
  """One token a slot.

  Attributes:
    tokens: i32[S].
    log_probs: f32[S], under the distribution sampled from.
  """

  tokens: jax.Array
  log_probs: jax.Array


def sample(
  logits: jax.Array,
  keys: chex.PRNGKey,
  temperature: jax.Array,
  top_k: jax.Array,
  top_p: jax.Array,
  min_p: jax.Array,
) -> Sampled:
  """Returns a token a slot, drawn from the kept part of a softmax.

  p = softmax(logits / temperature)
  kept = {v: p_v is one of the top_k largest}
  kept = {v in kept: sum of p over {u in kept: p_u > p_v} < top_p sum over kept}
  kept = {v in kept: p_v >= min_p max p}
  log_prob = log(p[token] / sum of p over kept)

  Tokens equally likely are kept or left together. Where the temperature is 0
  the token is argmax(logits), and its log-prob that of temperature 1 without
  truncation.

  The Gumbel-max trick (Maddison et al. 2014, A* sampling) is used twice: on the
  total weights of blocks of the vocabulary, then on the tokens of the block
  drawn. That is the same distribution, with noise for about 2 sqrt(V) numbers
  in place of V; noise for every token can cost half as much as the model.

  Args:
    logits: f32[S, V]; -inf is never drawn.
    keys: keys[S], one a slot.
    temperature: f32[S], at least 0.
    top_k: i32[S], tokens kept; 0 keeps all.
    top_p: f32[S], share of the weight kept, above 0; 1 keeps all.
    min_p: f32[S], of the weight of the best token, at most 1; 0 keeps all.
  """
  chex.assert_rank([logits, temperature, top_k, top_p, min_p], [2, 1, 1, 1, 1])
  slots, vocab_size = logits.shape
  size = _block_size(vocab_size)
  missing = ((0, 0), (0, -vocab_size % size))
  blocks = jnp.pad(logits, missing, constant_values=-jnp.inf)
  blocks = blocks.reshape(slots, -1, size)
  greedy = temperature == 0
  divisor = jnp.where(greedy, 1.0, temperature)[:, None]

  floor = _floor(logits, temperature, top_k, top_p, min_p)
  blocks = jnp.where(blocks >= floor[:, None, None], blocks, -jnp.inf)
  peaks = jnp.max(blocks, axis=-1)
  peak = jnp.max(peaks, axis=-1, keepdims=True)
  powers = (blocks - peak[..., None]) / divisor[..., None]
  weights = jnp.sum(jnp.exp(powers), axis=-1)
  log_total = jnp.log(jnp.sum(weights, axis=-1))

  num_blocks = weights.shape[1]
  noise = jax.vmap(lambda key: jax.random.gumbel(key, (num_blocks + size,)))
  chance = jnp.where(greedy[:, None], 0.0, noise(keys))
  scores = jnp.where(greedy[:, None], peaks, jnp.log(weights))
  block = jnp.argmax(scores + chance[:, :num_blocks], axis=-1)
  inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  inside = (inside - peak) / divisor
  place = jnp.argmax(inside + chance[:, num_blocks:], axis=-1)
  chosen = jnp.take_along_axis(inside, place[:, None], axis=-1)[:, 0]
  tokens = (block * size + place).astype(jnp.int32)
  return Sampled(tokens, chosen - log_total)


def _block_size(vocab_size: int) -> int:
  """Returns a power of two near the root of V: fewest draws for two stages."""
  return 2 ** max(round(math.log2(vocab_size) / 2), 4)


def _floor(
  logits: jax.Array,
  temperature: jax.Array,
  top_k: jax.Array,
  top_p: jax.Array,
  min_p: jax.Array,
) -> jax.Array:
  """Returns the least logit that is kept, f32[S]; -inf keeps all."""
  some_k = (top_k > 0) & (top_k < logits.shape[1]) & (temperature > 0)
  some_p = (top_p < 1) & (temperature > 0)
  some_min = (min_p > 0) & (temperature > 0)
  divisor = jnp.where(temperature > 0, temperature, 1.0)

  def by_rank(floor: jax.Array) -> jax.Array:
    keys = _sort_keys(logits)

    def enough(border: jax.Array) -> jax.Array:
      return jnp.sum(keys >= border[:, None], axis=-1) >= top_k

    return jnp.where(some_k, _largest(enough, top_k.shape), floor)

  def by_weight(floor: jax.Array) -> jax.Array:
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp((logits - peak) / divisor[:, None])
    weights = jnp.where(logits >= floor[:, None], weights, 0.0)
    wanted = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)
    wanted *= jnp.sum(weights, axis=-1)
    keys = _sort_keys(logits)

    def enough(border: jax.Array) -> jax.Array:
      above = jnp.where(keys >= border[:, None], weights, 0.0)
      return jnp.sum(above, axis=-1) >= wanted

    least = jnp.maximum(_largest(enough, top_p.shape), floor)
    return jnp.where(some_p, least, floor)

  def by_share(floor: jax.Array) -> jax.Array:
    least = jnp.max(logits, axis=-1) + divisor * jnp.log(min_p)
    return jnp.where(some_min, jnp.maximum(floor, least), floor)

  floor = jnp.full(logits.shape[:1], -jnp.inf)
  for some, narrow in (
    (some_k, by_rank),
    (some_p, by_weight),
    (some_min, by_share),
  ):
    # Passes over the vocabulary that hardly anybody asks for.
    floor = jax.lax.cond(jnp.any(some), narrow, lambda same: same, floor)
  return floor


def _sort_keys(x: jax.Array) -> jax.Array:
  """Returns integers in the order of floats, u32[...]; NaN is above all."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  return jnp.where(bits < _SIGN, bits | _SIGN, ~bits)


def _largest(
  enough: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]
) -> jax.Array:
  """Returns the largest float whose sort key is enough, f32[shape].

  Args:
    enough: sort keys u32[shape] -> bool[shape], true up to some key.
    shape: of what is searched.
  """

  def decide(i: jax.Array, key: jax.Array) -> jax.Array:
    longer = key | (_SIGN >> i.astype(jnp.uint32))
    return jnp.where(enough(longer), longer, key)

  key = jax.lax.fori_loop(0, 32, decide, jnp.zeros(shape, jnp.uint32))
  bits = jnp.where(key < _SIGN, ~key, key ^ _SIGN)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)

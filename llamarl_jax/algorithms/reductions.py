"""From one number a token to a sum and the count to divide it by.

A reduction gives each token a weight, and the batch a count. Both are sums over
rows, so that micro-batches and devices add up: divide once, at the very end, by
the count of the whole batch.
"""

from collections.abc import Callable
from collections.abc import Mapping
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from llamarl_jax.types import Mean


class TokenWeights(NamedTuple):
  """What a reduction gives.

  Attributes:
    weights: f32[R, T], 0 outside the completion mask.
    denominator: f32[], what the weighted sum is to be divided by.
  """

  weights: jax.Array
  denominator: jax.Array


# (completion_mask bool[R, T], segment_ids i32[R, T]) -> TokenWeights
ReductionFn = Callable[[jax.Array, jax.Array], TokenWeights]


def token_reduction(
  completion_mask: jax.Array, segment_ids: jax.Array
) -> TokenWeights:
  """Weighs every completion token alike; counts completion tokens.

  Args:
    completion_mask: bool[R, T].
    segment_ids: i32[R, T].

  Returns:
    weights 1 and the number of completion tokens.
  """
  _assert_layout(completion_mask, segment_ids)
  return TokenWeights(
    completion_mask.astype(jnp.float32), _count(completion_mask)
  )


def sequence_reduction(
  completion_mask: jax.Array, segment_ids: jax.Array
) -> TokenWeights:
  """Weighs every sequence alike: the mean over sequences of their means.

  A token of a long completion weighs less than one of a short completion: the
  length bias of GRPO. https://arxiv.org/abs/2402.03300, equation 3.

  Args:
    completion_mask: bool[R, T].
    segment_ids: i32[R, T].

  Returns:
    weights 1 / (completion tokens of the sequence), and the number of
    sequences that have any completion token.
  """
  _assert_layout(completion_mask, segment_ids)
  lengths = _completion_lengths(completion_mask, segment_ids)
  own_length = jnp.take_along_axis(lengths, segment_ids, axis=1)
  weights = 1.0 / jnp.maximum(own_length, 1).astype(jnp.float32)
  return TokenWeights(
    jnp.where(completion_mask, weights, 0.0), _count(lengths > 0)
  )


def constant_reduction(
  completion_mask: jax.Array, segment_ids: jax.Array, *, constant_length: int
) -> TokenWeights:
  """Weighs every token alike, and divides by the number of sequences.

  The denominator does not depend on how long the completions are, which takes
  out the length bias (Dr. GRPO). https://arxiv.org/abs/2503.20783

  Args:
    completion_mask: bool[R, T].
    segment_ids: i32[R, T].
    constant_length: tokens that stand for one sequence, such as the limit on
      new tokens.

  Returns:
    weights 1 / constant_length, and the number of sequences that have any
    completion token.
  """
  _assert_layout(completion_mask, segment_ids)
  lengths = _completion_lengths(completion_mask, segment_ids)
  return TokenWeights(
    completion_mask.astype(jnp.float32) / constant_length, _count(lengths > 0)
  )


REDUCTIONS: Mapping[str, Callable[..., TokenWeights]] = {
  'token': token_reduction,
  'sequence': sequence_reduction,
  'constant': constant_reduction,
}


def reduce_tokens(
  values: jax.Array,
  completion_mask: jax.Array,
  segment_ids: jax.Array,
  reduction_fn: ReductionFn,
) -> Mean:
  """Returns the weighted sum of `values` with the count of the reduction.

  Args:
    values: f32[R, T]; whatever stands outside the mask is not read.
    completion_mask: bool[R, T].
    segment_ids: i32[R, T].
    reduction_fn: gives weights and count.
  """
  weights, denominator = reduction_fn(completion_mask, segment_ids)
  total = jnp.sum(jnp.where(completion_mask, weights * values, 0.0))
  return Mean(total, denominator)


def masked_mean(values: jax.Array, mask: jax.Array) -> Mean:
  """Returns the sum of `values` where `mask` is True, and how many there are.

  Args:
    values: f32 or bool, of any shape.
    mask: bool, of the shape of `values`.
  """
  chex.assert_equal_shape([values, mask])
  values = values.astype(jnp.float32)
  return Mean(jnp.sum(jnp.where(mask, values, 0.0)), _count(mask))


def _completion_lengths(
  completion_mask: jax.Array, segment_ids: jax.Array
) -> jax.Array:
  """Returns i32[R, T + 1]: completion tokens in each row, by segment id."""
  # T tokens hold at most T sequences, and id 0 is the padding. Integers add up
  # to the same in any order, so the scatter is deterministic on every device.
  num_segments = segment_ids.shape[1] + 1
  return jax.vmap(
    lambda mask, ids: jax.ops.segment_sum(mask, ids, num_segments)
  )(completion_mask.astype(jnp.int32), segment_ids)


def _count(mask: jax.Array) -> jax.Array:
  # Counted in integers: float32 stops counting at 2**24.
  return jnp.sum(mask, dtype=jnp.int32).astype(jnp.float32)


def _assert_layout(completion_mask: jax.Array, segment_ids: jax.Array) -> None:
  chex.assert_rank(completion_mask, 2)
  chex.assert_equal_shape([completion_mask, segment_ids])
  chex.assert_type([completion_mask, segment_ids], [bool, int])

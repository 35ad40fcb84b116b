"""Shape and type asserts shared by every loss."""

import chex
import jax

from llamarl_jax.types import Trajectories


def assert_token_arrays(log_probs: jax.Array, batch: Trajectories) -> None:
  """Asserts that everything a loss reads has one value a token.

  Args:
    log_probs: f32[R, T].
    batch: its arrays must be [R, T] too; those that are None are left out.

  Raises:
    AssertionError: if a shape or a type differs.
  """
  floats = [log_probs, batch.behavior_log_probs, batch.advantages]
  floats += [
    optional
    for optional in (batch.reference_log_probs, batch.proximal_log_probs)
    if optional is not None
  ]
  chex.assert_rank(log_probs, 2)
  chex.assert_equal_shape([*floats, batch.completion_mask, batch.segment_ids])
  chex.assert_type(floats, float)
  chex.assert_type(batch.completion_mask, bool)
  chex.assert_type(batch.segment_ids, int)

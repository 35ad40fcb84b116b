"""Advantages from the rewards of a group: reward less a baseline.

Samples that are not valid neither get an advantage nor move the baseline of the
others. A group that says nothing (fewer than two valid samples, or all rewards
equal) gets zeros.
"""

from collections.abc import Callable
from collections.abc import Mapping

import chex
import jax
import jax.numpy as jnp

from llamarl_jax.algorithms import reductions
from llamarl_jax.types import Mean


def group_mean(
  rewards: jax.Array,
  valid: jax.Array,
  *,
  normalize_std: bool = False,
  epsilon: float = 1e-6,
) -> jax.Array:
  """Returns each reward less the mean of its group.

  A_i = r_i - (1 / n) sum_j r_j, over the n valid samples of the group; divided
  by (std + epsilon) if `normalize_std`.

  The baseline of Wu et al. (2025), section 6; with the division, that of GRPO,
  https://arxiv.org/abs/2402.03300.

  Args:
    rewards: f32[N, G]; whatever stands where `valid` is False is not read.
    valid: bool[N, G].
    normalize_std: divide by the standard deviation of the group's valid
      rewards (of the n samples, not n - 1).
    epsilon: added to the standard deviation.

  Returns:
    f32[N, G], 0 where not valid.
  """
  _assert_groups(rewards, valid)
  centered = _centered(rewards, valid)
  if normalize_std:
    centered = centered / (_std(centered, valid) + epsilon)
  return centered


def leave_one_out(
  rewards: jax.Array,
  valid: jax.Array,
  *,
  normalize_std: bool = False,
  epsilon: float = 1e-6,
) -> jax.Array:
  """Returns each reward less the mean of the others of its group.

  A_i = r_i - (1 / (n - 1)) sum_{j != i} r_j = n / (n - 1) (r_i - mean), over
  the n valid samples of the group; divided by (std + epsilon) if
  `normalize_std`.

  The baseline does not depend on the sample itself, so the policy gradient
  stays unbiased. https://openreview.net/forum?id=r1lgTGL5DE

  Args:
    rewards: f32[N, G]; whatever stands where `valid` is False is not read.
    valid: bool[N, G].
    normalize_std: divide by the standard deviation of the group's valid
      rewards (of the n samples, not n - 1).
    epsilon: added to the standard deviation.

  Returns:
    f32[N, G], 0 where not valid.
  """
  _assert_groups(rewards, valid)
  centered = _centered(rewards, valid)
  count = _num_valid(valid)
  advantages = centered * (count / jnp.maximum(count - 1.0, 1.0))
  if normalize_std:
    advantages = advantages / (_std(centered, valid) + epsilon)
  return advantages


ADVANTAGES: Mapping[str, Callable[..., jax.Array]] = {
  'group_mean': group_mean,
  'leave_one_out': leave_one_out,
}


def zero_advantage_fraction(advantages: jax.Array, valid: jax.Array) -> Mean:
  """Returns the share of groups that teach nothing: all advantages are 0.

  Args:
    advantages: f32[N, G].
    valid: bool[N, G].

  Returns:
    groups without any advantage, of the groups with a valid sample.
  """
  _assert_groups(advantages, valid)
  silent = jnp.all((advantages == 0) | ~valid, axis=1)
  return reductions.masked_mean(silent, jnp.any(valid, axis=1))


def _centered(rewards: jax.Array, valid: jax.Array) -> jax.Array:
  """Returns r - mean over the valid; exact zeros where the group is silent."""
  rewards = rewards.astype(jnp.float32)
  total = jnp.sum(
    jnp.where(valid, rewards, 0.0), axis=1, keepdims=True
  )  # f32[N, 1]
  mean = total / jnp.maximum(_num_valid(valid), 1.0)
  # The mean of equal rewards may be off by a rounding error, which a division
  # by the standard deviation would blow up: equality is tested, not computed.
  lowest = jnp.min(rewards, axis=1, keepdims=True, where=valid, initial=jnp.inf)
  highest = jnp.max(
    rewards, axis=1, keepdims=True, where=valid, initial=-jnp.inf
  )
  silent = lowest >= highest  # Also of a group without a valid sample.
  return jnp.where(valid & ~silent, rewards - mean, 0.0)


def _std(centered: jax.Array, valid: jax.Array) -> jax.Array:
  """Returns f32[N, 1], the standard deviation of centered rewards."""
  total = jnp.sum(jnp.square(centered), axis=1, keepdims=True)
  return jnp.sqrt(total / jnp.maximum(_num_valid(valid), 1.0))


def _num_valid(valid: jax.Array) -> jax.Array:
  return jnp.sum(valid, axis=1, keepdims=True, dtype=jnp.float32)  # f32[N, 1]


def _assert_groups(values: jax.Array, valid: jax.Array) -> None:
  chex.assert_rank(values, 2)
  chex.assert_equal_shape([values, valid])
  chex.assert_type([values, valid], [float, bool])

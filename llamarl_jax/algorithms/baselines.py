"""Baselines that take every token for one of the current policy's.

They do not look at the behavior policy, except to report how far off it is:
what the corrected losses are to be compared with.
"""

import jax
import jax.numpy as jnp

from llamarl_jax.algorithms import checks
from llamarl_jax.algorithms import importance
from llamarl_jax.algorithms import ppo
from llamarl_jax.algorithms import reductions
from llamarl_jax.types import LossOutput
from llamarl_jax.types import Trajectories


def reinforce_loss(
  log_probs: jax.Array,
  batch: Trajectories,
  *,
  reduction_fn: reductions.ReductionFn = reductions.token_reduction,
) -> LossOutput:
  """Returns the policy gradient's surrogate, negated.

  - sum_t w_t A_t log pi_t

  Williams (1992), https://doi.org/10.1007/BF00992696.

  Args:
    log_probs: f32[R, T], of the policy pi that is trained.
    batch: read are completion_mask, segment_ids and advantages (A); for the
      metrics, behavior_log_probs.
    reduction_fn: weighs the tokens (w).

  Returns:
    the loss, and `off_policy_metrics`.
  """
  checks.assert_token_arrays(log_probs, batch)
  mask = batch.completion_mask
  advantages = jnp.where(mask, batch.advantages, 0.0)
  loss = reductions.reduce_tokens(
    -advantages * log_probs, mask, batch.segment_ids, reduction_fn
  )
  metrics = importance.off_policy_metrics(
    log_probs, batch.behavior_log_probs, mask
  )
  return LossOutput(loss, metrics)


def plain_ppo_loss(
  log_probs: jax.Array,
  batch: Trajectories,
  *,
  clip_low: float,
  clip_high: float,
  reduction_fn: reductions.ReductionFn = reductions.token_reduction,
) -> LossOutput:
  """Returns PPO's loss with "old" log-probs that the trainer recomputed.

  - sum_t w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
  with r = pi / prox

  https://arxiv.org/abs/1707.06347, equation 7. What sampled the tokens is not
  corrected for.

  Args:
    log_probs: f32[R, T], of the policy pi that is trained.
    batch: read are completion_mask, segment_ids, advantages (A) and
      proximal_log_probs (see `ppo.proximal_log_probs`).
    clip_low: width of the trust region below 1.
    clip_high: width of the trust region above 1.
    reduction_fn: weighs the tokens (w).

  Returns:
    the loss, `off_policy_metrics`, and 'clipped_fraction'.
  """
  return ppo.surrogate_loss(
    log_probs,
    batch,
    center_log_probs=ppo.proximal_log_probs(log_probs, batch),
    weight=jnp.ones_like(log_probs),
    clip_low=clip_low,
    clip_high=clip_high,
    reduction_fn=reduction_fn,
  )


def plain_grpo_loss(
  log_probs: jax.Array,
  batch: Trajectories,
  *,
  clip_low: float,
  clip_high: float,
  reduction_fn: reductions.ReductionFn = reductions.sequence_reduction,
) -> LossOutput:
  """Returns `plain_ppo_loss`, as a mean over sequences of their means.

  Args:
    log_probs: f32[R, T], of the policy that is trained.
    batch: as `plain_ppo_loss` reads it.
    clip_low: width of the trust region below 1.
    clip_high: width of the trust region above 1.
    reduction_fn: weighs the tokens.
  """
  return plain_ppo_loss(
    log_probs,
    batch,
    clip_low=clip_low,
    clip_high=clip_high,
    reduction_fn=reduction_fn,
  )

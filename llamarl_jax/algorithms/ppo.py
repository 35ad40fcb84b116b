"""PPO's clipped surrogate without a critic, corrected for off-policy tokens.

Two corrections: the trust region around the behavior policy itself, or, in the
decoupled form, around a proximal policy, with a truncated weight in front.
"""

import jax
import jax.numpy as jnp

from llamarl_jax.algorithms import checks
from llamarl_jax.algorithms import importance
from llamarl_jax.algorithms import reductions
from llamarl_jax.types import LossOutput
from llamarl_jax.types import Mean
from llamarl_jax.types import Trajectories


def ppo_loss(
  log_probs: jax.Array,
  batch: Trajectories,
  *,
  clip_low: float,
  clip_high: float,
  reduction_fn: reductions.ReductionFn = reductions.token_reduction,
) -> LossOutput:
  """Returns the clipped surrogate around the behavior policy, negated.

  - sum_t w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
  with r = pi / mu

  https://arxiv.org/abs/1707.06347, equation 7, where the old policy is the one
  that sampled each token, whichever version that was.

  Args:
    log_probs: f32[R, T], of the policy pi that is trained.
    batch: read are completion_mask, segment_ids, behavior_log_probs (mu) and
      advantages (A).
    clip_low: width of the trust region below 1.
    clip_high: width of the trust region above 1.
    reduction_fn: weighs the tokens (w).

  Returns:
    the loss, `off_policy_metrics`, and 'clipped_fraction'.
  """
  return surrogate_loss(
    log_probs,
    batch,
    center_log_probs=batch.behavior_log_probs,
    weight=jnp.ones_like(log_probs),
    clip_low=clip_low,
    clip_high=clip_high,
    reduction_fn=reduction_fn,
  )


def decoupled_ppo_loss(
  log_probs: jax.Array,
  batch: Trajectories,
  *,
  max_importance_ratio: float,
  clip_low: float,
  clip_high: float,
  reduction_fn: reductions.ReductionFn = reductions.token_reduction,
) -> LossOutput:
  """Returns the clipped surrogate around a proximal policy, corrected.

  - sum_t w_t c_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
  with r = pi / prox and the constant c = min(prox / mu, rho)

  The trust region is around a recent policy, and c alone corrects for what
  sampled the tokens. https://arxiv.org/abs/2110.00641, section 3, with c
  truncated. Where the proximal policy is pi itself, the gradient is AIPO's.

  Args:
    log_probs: f32[R, T], of the policy pi that is trained.
    batch: read are completion_mask, segment_ids, behavior_log_probs (mu),
      advantages (A), and proximal_log_probs (see `proximal_log_probs`).
    max_importance_ratio: rho.
    clip_low: width of the trust region below 1.
    clip_high: width of the trust region above 1.
    reduction_fn: weighs the tokens (w).

  Returns:
    the loss, `off_policy_metrics` of pi / mu, `truncation_metrics` of prox /
    mu, and 'clipped_fraction'.
  """
  proximal = proximal_log_probs(log_probs, batch)
  mask = batch.completion_mask
  ratio = importance.importance_ratio(proximal, batch.behavior_log_probs, mask)
  loss, metrics = surrogate_loss(
    log_probs,
    batch,
    center_log_probs=proximal,
    weight=importance.truncated_ratio(
      ratio, max_importance_ratio=max_importance_ratio
    ),
    clip_low=clip_low,
    clip_high=clip_high,
    reduction_fn=reduction_fn,
  )
  truncation = importance.truncation_metrics(
    ratio, mask, max_importance_ratio=max_importance_ratio
  )
  return LossOutput(loss, {**metrics, **truncation})


def surrogate_loss(
  log_probs: jax.Array,
  batch: Trajectories,
  *,
  center_log_probs: jax.Array,
  weight: jax.Array,
  clip_low: float,
  clip_high: float,
  reduction_fn: reductions.ReductionFn,
) -> LossOutput:
  """Returns the weighted clipped surrogate that all variants share, negated.

  Args:
    log_probs: f32[R, T], of the policy pi that is trained.
    batch: as the variants read it.
    center_log_probs: f32[R, T], of the policy the trust region is around.
    weight: f32[R, T], a constant factor for each token.
    clip_low: width of the trust region below 1.
    clip_high: width of the trust region above 1.
    reduction_fn: weighs the tokens.

  Returns:
    the loss, `off_policy_metrics`, and 'clipped_fraction', the share of tokens
    whose gradient the clip takes away.
  """
  checks.assert_token_arrays(log_probs, batch)
  mask = batch.completion_mask
  advantages = jnp.where(mask, batch.advantages, 0.0)
  ratio = importance.importance_ratio(log_probs, center_log_probs, mask)
  unclipped = ratio * advantages
  clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
  loss = reductions.reduce_tokens(
    -weight * jnp.minimum(unclipped, clipped),
    mask,
    batch.segment_ids,
    reduction_fn,
  )
  metrics: dict[str, Mean] = importance.off_policy_metrics(
    log_probs, batch.behavior_log_probs, mask
  )
  metrics['clipped_fraction'] = reductions.masked_mean(
    clipped < unclipped, mask
  )
  return LossOutput(loss, metrics)


def proximal_log_probs(log_probs: jax.Array, batch: Trajectories) -> jax.Array:
  """Returns the log-probs of the policy at the start of the batch.

  A batch without them is taken to make a single update. Then the policy at its
  start is the one being differentiated, and its log-probs are at hand.

  Args:
    log_probs: f32[R, T], of the policy that is trained.
    batch: read is proximal_log_probs.

  Returns:
    f32[R, T], a constant.
  """
  if batch.proximal_log_probs is None:
    return jax.lax.stop_gradient(log_probs)
  return jax.lax.stop_gradient(batch.proximal_log_probs)

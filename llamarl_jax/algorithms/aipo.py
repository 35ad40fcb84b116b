"""AIPO: Asynchronous Importance-weighted Policy Optimization.

Wu et al. (2025), section 6: the policy gradient, corrected for tokens that an
older policy sampled by a one-sided truncated importance weight.
"""

import jax
import jax.numpy as jnp

from llamarl_jax.algorithms import checks
from llamarl_jax.algorithms import importance
from llamarl_jax.algorithms import reductions
from llamarl_jax.types import LossOutput
from llamarl_jax.types import Trajectories


def aipo_loss(
  log_probs: jax.Array,
  batch: Trajectories,
  *,
  max_importance_ratio: float,
  reduction_fn: reductions.ReductionFn = reductions.token_reduction,
) -> LossOutput:
  """Returns the AIPO loss, summed, with its count.

  loss     = - sum_t w_t min(pi_t / mu_t, rho) * A_t * log pi_t
  gradient = - sum_t w_t min(pi_t / mu_t, rho) * A_t * grad log pi_t

  min(...) is a constant of the update, and w_t the weight of the reduction. A
  token whose ratio exceeds rho still contributes, with weight rho, where a
  clip that is differentiated would drop it. Only the gradient has a meaning:
  the value is that of a surrogate, and need not fall as training goes on.

  Args:
    log_probs: f32[R, T], of the policy pi that is trained.
    batch: read are completion_mask, segment_ids, behavior_log_probs (mu) and
      advantages (A).
    max_importance_ratio: rho; the paper finds 2 to 10 to work.
    reduction_fn: weighs the tokens; the paper's choice is not known.

  Returns:
    the loss, and `off_policy_metrics` and `truncation_metrics` of pi / mu.
  """
  checks.assert_token_arrays(log_probs, batch)
  mask = batch.completion_mask
  ratio = importance.importance_ratio(log_probs, batch.behavior_log_probs, mask)
  coefficient = importance.truncated_ratio(
    ratio, max_importance_ratio=max_importance_ratio
  )
  advantages = jnp.where(mask, batch.advantages, 0.0)
  loss = reductions.reduce_tokens(
    -coefficient * advantages * log_probs,
    mask,
    batch.segment_ids,
    reduction_fn,
  )
  metrics = importance.off_policy_metrics(
    log_probs, batch.behavior_log_probs, mask
  ) | importance.truncation_metrics(
    ratio, mask, max_importance_ratio=max_importance_ratio
  )
  return LossOutput(loss, metrics)

"""The KL penalty to a reference policy, and how it is added to a loss.

Estimators of KL(pi || reference) from tokens sampled by pi, after
http://joschu.net/blog/kl-approx.html. They are not corrected for tokens that an
older policy sampled.
"""

from collections.abc import Callable
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from llamarl_jax.algorithms import importance
from llamarl_jax.algorithms import reductions
from llamarl_jax.types import LossFn
from llamarl_jax.types import LossOutput
from llamarl_jax.types import Mean
from llamarl_jax.types import Trajectories

# (log_probs, reference_log_probs f32[R, T], mask bool[R, T]) -> f32[R, T]
KLEstimator = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def kl_k1(
  log_probs: jax.Array, reference_log_probs: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns log pi - log ref: unbiased, of high variance.

  As a penalty to differentiate it is no use on-policy, where the expectation of
  its gradient, E[grad log pi], is 0.

  Args:
    log_probs: f32[R, T].
    reference_log_probs: f32[R, T].
    mask: bool[R, T]; the estimate is 0 outside.
  """
  return importance.log_ratio(log_probs, reference_log_probs, mask)


def kl_k2(
  log_probs: jax.Array, reference_log_probs: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns (log pi - log ref)^2 / 2: biased, of low variance.

  Its gradient is, on-policy, an unbiased estimate of that of the KL.

  Args:
    log_probs: f32[R, T].
    reference_log_probs: f32[R, T].
    mask: bool[R, T]; the estimate is 0 outside.
  """
  difference = importance.log_ratio(log_probs, reference_log_probs, mask)
  return 0.5 * jnp.square(difference)


def kl_k3(
  log_probs: jax.Array, reference_log_probs: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns ref / pi - 1 - log(ref / pi): unbiased, never negative.

  The estimator of GRPO, https://arxiv.org/abs/2402.03300, equation 4.

  Args:
    log_probs: f32[R, T].
    reference_log_probs: f32[R, T].
    mask: bool[R, T]; the estimate is 0 outside.
  """
  # expm1 keeps the digits that 1 - 1 would cancel where the two are close.
  difference = importance.log_ratio(reference_log_probs, log_probs, mask)
  return jnp.expm1(difference) - difference


KL_ESTIMATORS: Mapping[str, KLEstimator] = {
  'k1': kl_k1,
  'k2': kl_k2,
  'k3': kl_k3,
}


def with_kl(
  loss_fn: LossFn,
  *,
  estimator_fn: KLEstimator,
  coefficient: float,
  reduction_fn: reductions.ReductionFn,
) -> LossFn:
  """Returns `loss_fn` plus coefficient * KL(pi || reference).

  Args:
    loss_fn: any loss.
    estimator_fn: the estimate for one token.
    coefficient: beta, the weight of the penalty.
    reduction_fn: the reduction that `loss_fn` uses: the two sums share one
      count.

  Returns:
    a loss with the further metric 'reference_kl', the estimate per token. It
    raises a ValueError on a batch without reference log-probs.
  """

  def loss_with_kl(log_probs: jax.Array, batch: Trajectories) -> LossOutput:
    if batch.reference_log_probs is None:
      raise ValueError(
        f'a KL penalty (coefficient {coefficient}) needs'
        ' reference_log_probs, and the batch has none: run a reference'
        ' executor, or set the coefficient to 0'
      )
    loss, metrics = loss_fn(log_probs, batch)
    mask = batch.completion_mask
    kl = estimator_fn(log_probs, batch.reference_log_probs, mask)
    penalty = reductions.reduce_tokens(
      kl, mask, batch.segment_ids, reduction_fn
    )
    reference_kl = reductions.masked_mean(jax.lax.stop_gradient(kl), mask)
    return LossOutput(
      Mean(loss.total + coefficient * penalty.total, loss.count),
      {**metrics, 'reference_kl': reference_kl},
    )

  return loss_with_kl

"""Importance ratios between two policies, token by token.

The difference of log-probs is masked before it is exponentiated, as NaN * 0 is
NaN, and clamped, as exp(89) is infinite in float32.
"""

import chex
import jax
import jax.numpy as jnp

from llamarl_jax.algorithms import reductions
from llamarl_jax.types import Mean

# In nats. exp(20) = 4.9e8: far beyond any ratio worth telling apart, and its
# square, summed over a batch, still fits float32.
MAX_LOG_RATIO = 20.0


def log_ratio(
  log_probs: jax.Array, other_log_probs: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns log_probs - other_log_probs, clamped, and 0 outside the mask.

  The gradient vanishes where the clamp acts. NaN inside the mask is kept.

  Args:
    log_probs: f32[R, T], of the numerator.
    other_log_probs: f32[R, T], of the denominator.
    mask: bool[R, T].

  Returns:
    f32[R, T] within +-MAX_LOG_RATIO.
  """
  chex.assert_equal_shape([log_probs, other_log_probs, mask])
  chex.assert_type([log_probs, other_log_probs, mask], [float, float, bool])
  difference = jnp.where(mask, log_probs - other_log_probs, 0.0)
  return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_ratio(
  log_probs: jax.Array, behavior_log_probs: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns pi / mu for each token, and 1 outside the mask.

  Args:
    log_probs: f32[R, T], of the policy pi.
    behavior_log_probs: f32[R, T], of the policy mu that sampled the tokens.
    mask: bool[R, T].

  Returns:
    f32[R, T], finite where the log-probs are not NaN.
  """
  return jnp.exp(log_ratio(log_probs, behavior_log_probs, mask))


def truncated_ratio(
  ratio: jax.Array, *, max_importance_ratio: float
) -> jax.Array:
  """Returns min(ratio, rho): one-sided truncation, as a constant.

  Wu et al. (2025), section 6, from where the weight multiplies a gradient:
  nothing is differentiated through it.

  Args:
    ratio: f32[R, T].
    max_importance_ratio: rho.
  """
  return jax.lax.stop_gradient(jnp.minimum(ratio, max_importance_ratio))


def truncation_metrics(
  ratio: jax.Array, mask: jax.Array, *, max_importance_ratio: float
) -> dict[str, Mean]:
  """Returns how often, and to which mean weight, ratios are truncated.

  Args:
    ratio: f32[R, T], not truncated.
    mask: bool[R, T].
    max_importance_ratio: rho.

  Returns:
    truncated_fraction: of tokens whose ratio exceeds rho.
    importance_weight: mean of min(ratio, rho).
  """
  ratio = jax.lax.stop_gradient(ratio)
  weight = truncated_ratio(ratio, max_importance_ratio=max_importance_ratio)
  return {
    'truncated_fraction': reductions.masked_mean(
      ratio > max_importance_ratio, mask
    ),
    'importance_weight': reductions.masked_mean(weight, mask),
  }


def off_policy_metrics(
  log_probs: jax.Array, behavior_log_probs: jax.Array, mask: jax.Array
) -> dict[str, Mean]:
  """Returns how far the policy is from the one that sampled.

  Args:
    log_probs: f32[R, T], of the policy pi.
    behavior_log_probs: f32[R, T], of mu.
    mask: bool[R, T].

  Returns:
    importance_ratio: pi / mu; its mean is 1 in expectation.
    importance_ratio_squared: see `effective_sample_fraction`.
    log_prob_gap: |log pi - log mu|, in nats, not clamped.
    behavior_kl: ratio - 1 - log ratio, an unbiased estimate of KL(mu || pi)
      that is never negative. http://joschu.net/blog/kl-approx.html
  """
  log_probs = jax.lax.stop_gradient(log_probs)
  clamped = log_ratio(log_probs, behavior_log_probs, mask)
  ratio = jnp.exp(clamped)
  values = {
    'importance_ratio': ratio,
    'importance_ratio_squared': jnp.square(ratio),
    'log_prob_gap': jnp.abs(log_probs - behavior_log_probs),
    # expm1 keeps the digits that 1 - 1 would cancel where ratios are near 1.
    'behavior_kl': jnp.expm1(clamped) - clamped,
  }
  return {
    name: reductions.masked_mean(value, mask) for name, value in values.items()
  }


def fresh_metrics(
  log_probs: jax.Array,
  behavior_log_probs: jax.Array,
  mask: jax.Array,
  fresh: jax.Array,
) -> dict[str, Mean]:
  """Returns how far generator and trainer are apart on equal weights.

  Rounding differs between the two, and weights may be quantized on one side:
  what `off_policy_metrics` has beyond this is staleness.

  Args:
    log_probs: f32[R, T], of the policy pi as the trainer computes it.
    behavior_log_probs: f32[R, T], as the generator did.
    mask: bool[R, T].
    fresh: bool[R, T], whether a token was sampled from pi itself.

  Returns:
    log_prob_gap_fresh: |log pi - log mu| over fresh tokens, in nats.
    fresh_fraction: of tokens; where it is 0 the gap is not known.
  """
  gap = jnp.abs(jax.lax.stop_gradient(log_probs) - behavior_log_probs)
  return {
    'log_prob_gap_fresh': reductions.masked_mean(gap, mask & fresh),
    'fresh_fraction': reductions.masked_mean(fresh, mask),
  }


def effective_sample_fraction(ratio: Mean, squared_ratio: Mean) -> jax.Array:
  """Returns the effective sample size as a fraction of the sample.

  (sum_t r_t)^2 / (n sum_t r_t^2)

  It is 1 where all ratios are equal, and 1 / n where one outweighs all others.
  It is no mean itself, so merge the two means over all micro-batches first.
  Kong (1992), "A note on importance sampling using standardized weights".

  Args:
    ratio: the metric 'importance_ratio'.
    squared_ratio: the metric 'importance_ratio_squared'.

  Returns:
    f32[], 0 where there are no tokens.
  """
  second_moment = squared_ratio.value()
  safe = jnp.where(second_moment > 0, second_moment, 1.0)
  return jnp.square(ratio.value()) / safe

"""Importance ratios and what is reported of them, in closed form."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.algorithms import importance
from llamarl_jax.types import Mean

_MASK = jnp.asarray([[True, True, False, True]])
_RATIOS = np.asarray([[0.5, 2.0, 1.0, 8.0]])  # 1 stands for the masked token.
_LOG_PROBS = jnp.asarray([[-1.0, -2.0, jnp.nan, -0.1]])
_BEHAVIOR = _LOG_PROBS - jnp.asarray(np.log(_RATIOS), jnp.float32)


class ImportanceTest(chex.TestCase):
  def test_ratio(self):
    actual = jax.jit(importance.importance_ratio)(_LOG_PROBS, _BEHAVIOR, _MASK)
    np.testing.assert_allclose(actual, _RATIOS, rtol=1e-6)

  def test_padding_reaches_neither_value_nor_gradient(self):
    gradient = jax.grad(
      lambda x: jnp.sum(importance.importance_ratio(x, _BEHAVIOR, _MASK))
    )(_LOG_PROBS)
    # d ratio / d log pi = ratio.
    np.testing.assert_allclose(gradient, [[0.5, 2.0, 0.0, 8.0]], rtol=1e-6)

  def test_log_ratio_is_clamped(self):
    far = jnp.asarray([[1e4, -1e4, jnp.inf, -jnp.inf]])
    actual = importance.log_ratio(
      far, jnp.zeros_like(far), jnp.ones_like(far, bool)
    )
    np.testing.assert_array_equal(actual, [[20.0, -20.0, 20.0, -20.0]])

  def test_nan_of_a_real_token_is_not_hidden(self):
    actual = importance.importance_ratio(
      _LOG_PROBS, _BEHAVIOR, jnp.ones_like(_MASK)
    )
    np.testing.assert_array_equal(
      jnp.isnan(actual), [[False, False, True, False]]
    )

  def test_truncation_is_one_sided_and_constant(self):
    def truncated(ratio):
      return importance.truncated_ratio(ratio, max_importance_ratio=2.5)

    ratio = jnp.asarray([[1e-6, 1.0, 2.5, 3.0]])
    np.testing.assert_allclose(truncated(ratio), [[1e-6, 1.0, 2.5, 2.5]])
    gradient = jax.grad(lambda x: jnp.sum(truncated(x)))(ratio)
    np.testing.assert_array_equal(gradient, np.zeros((1, 4)))

  def test_truncation_metrics(self):
    metrics = importance.truncation_metrics(
      jnp.asarray(_RATIOS, jnp.float32), _MASK, max_importance_ratio=4.0
    )
    self.assertEqual(set(metrics), {'truncated_fraction', 'importance_weight'})
    # Of 0.5, 2 and 8 one exceeds 4; the weights are 0.5, 2 and 4.
    self.assertEqual(metrics['truncated_fraction'], (1.0, 3.0))
    self.assertEqual(metrics['importance_weight'], (6.5, 3.0))

  def test_off_policy_metrics(self):
    metrics = jax.jit(importance.off_policy_metrics)(
      _LOG_PROBS, _BEHAVIOR, _MASK
    )
    expected = {
      'importance_ratio': 0.5 + 2.0 + 8.0,
      'importance_ratio_squared': 0.25 + 4.0 + 64.0,
      # |log| of 1/2, 2 and 8 is once, once and three times log 2.
      'log_prob_gap': 5.0 * np.log(2.0),
      # sum of r - 1 - log r: the logs add up to log 8.
      'behavior_kl': 10.5 - 3.0 - np.log(8.0),
    }
    self.assertEqual(set(metrics), set(expected))
    for name, total in expected.items():
      np.testing.assert_allclose(metrics[name].total, total, rtol=1e-6)
      self.assertEqual(metrics[name].count, 3.0)

  def test_fresh_metrics(self):
    fresh = jnp.asarray(_MASK) & (jnp.cumsum(_MASK, axis=1) < 3)
    metrics = importance.fresh_metrics(_LOG_PROBS, _BEHAVIOR, _MASK, fresh)
    # |log| of 1/2 and 2, the first two of three tokens.
    np.testing.assert_allclose(
      metrics['log_prob_gap_fresh'].value(), np.log(2.0), rtol=1e-6
    )
    self.assertEqual(metrics['fresh_fraction'], (2.0, 3.0))

  def test_behavior_kl_is_the_kl_in_expectation(self):
    # The sum over all tokens, each weighed by mu, is the expectation.
    mu = np.asarray([[0.2, 0.3, 0.5]])
    pi = np.asarray([[0.6, 0.1, 0.3]])
    mask = jnp.ones((1, 3), bool)
    estimates = [
      importance.off_policy_metrics(
        jnp.log(jnp.asarray(pi[:, [i]], jnp.float32)),
        jnp.log(jnp.asarray(mu[:, [i]], jnp.float32)),
        mask[:, [i]],
      )['behavior_kl'].value()
      for i in range(3)
    ]
    np.testing.assert_allclose(
      np.sum(mu[0] * np.asarray(estimates)),
      np.sum(mu * np.log(mu / pi)),
      rtol=1e-5,
    )

  def test_effective_sample_fraction(self):
    def fraction(ratios):
      ratios = jnp.asarray(ratios)
      count = jnp.asarray(float(ratios.size))
      return importance.effective_sample_fraction(
        Mean(jnp.sum(ratios), count), Mean(jnp.sum(ratios**2), count)
      )

    np.testing.assert_allclose(fraction([3.0, 3.0, 3.0]), 1.0, rtol=1e-6)
    np.testing.assert_allclose(fraction([5.0, 0.0, 0.0, 0.0]), 0.25, rtol=1e-6)
    # (1 + 2)^2 / (2 (1 + 4)).
    np.testing.assert_allclose(fraction([1.0, 2.0]), 0.9, rtol=1e-6)
    nothing = Mean(jnp.asarray(0.0), jnp.asarray(0.0))
    self.assertEqual(
      importance.effective_sample_fraction(nothing, nothing), 0.0
    )

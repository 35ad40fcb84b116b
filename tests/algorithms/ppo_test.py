"""The clipped surrogates and GRPO in closed form."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.algorithms import aipo
from llamarl_jax.algorithms import baselines
from llamarl_jax.algorithms import grpo
from llamarl_jax.algorithms import ppo
from llamarl_jax.types import Trajectories

# Ratios below, inside and above the trust region 0.8 .. 1.3, each with a
# positive and a negative advantage.
_RATIOS = np.asarray([[0.5, 1.1, 2.0, 0.5, 1.1, 2.0]])
_ADVANTAGES = np.asarray([[3.0, 3.0, 3.0, -3.0, -3.0, -3.0]])
_OBJECTIVE = np.asarray([[1.5, 3.3, 3.9, -2.4, -3.3, -6.0]])
# d(r A) / d(log pi) = r A, and 0 where the clip takes the token out.
_GRADIENT = np.asarray([[1.5, 3.3, 0.0, 0.0, -3.3, -6.0]])
_CLIP = {'clip_low': 0.2, 'clip_high': 0.3}


def _batch(*, behavior_log_probs, advantages, proximal_log_probs=None):
  ones = jnp.ones(advantages.shape, jnp.int32)
  return Trajectories(
    tokens=ones,
    completion_mask=ones.astype(bool),
    segment_ids=ones,
    positions=ones,
    behavior_log_probs=behavior_log_probs,
    policy_version=ones,
    advantages=jnp.asarray(advantages, jnp.float32),
    proximal_log_probs=proximal_log_probs,
  )


def _value_and_gradient(loss_fn, log_probs, batch, **settings):
  def total(log_probs):
    output = loss_fn(log_probs, batch, **settings)
    return output.loss.total, output

  (value, output), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(
    log_probs
  )
  return value, gradient, output


class PpoTest(chex.TestCase):
  def setUp(self):
    super().setUp()
    self.log_probs = jnp.full((1, 6), -0.25)
    self.center = self.log_probs - jnp.asarray(np.log(_RATIOS), jnp.float32)

  def test_clips_around_the_behavior_policy(self):
    batch = _batch(behavior_log_probs=self.center, advantages=_ADVANTAGES)
    value, gradient, output = _value_and_gradient(
      ppo.ppo_loss, self.log_probs, batch, **_CLIP
    )
    np.testing.assert_allclose(value, -_OBJECTIVE.sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, -_GRADIENT, rtol=1e-5)
    self.assertEqual(output.metrics['clipped_fraction'], (2.0, 6.0))

  def test_decoupled_weighs_by_the_truncated_proximal_ratio(self):
    # prox / mu alternates between 4, truncated to 2.5, and 1/2.
    proximal_ratio = np.asarray([[4.0, 0.5, 4.0, 0.5, 4.0, 0.5]])
    weight = np.minimum(proximal_ratio, 2.5)
    batch = _batch(
      behavior_log_probs=self.center
      - jnp.asarray(np.log(proximal_ratio), jnp.float32),
      advantages=_ADVANTAGES,
      proximal_log_probs=self.center,
    )
    value, gradient, output = _value_and_gradient(
      ppo.decoupled_ppo_loss,
      self.log_probs,
      batch,
      max_importance_ratio=2.5,
      **_CLIP,
    )
    np.testing.assert_allclose(value, -(weight * _OBJECTIVE).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, -weight * _GRADIENT, rtol=1e-5)
    self.assertEqual(output.metrics['truncated_fraction'], (3.0, 6.0))
    self.assertEqual(output.metrics['clipped_fraction'], (2.0, 6.0))
    np.testing.assert_allclose(
      output.metrics['importance_ratio'].total,
      (_RATIOS * proximal_ratio).sum(),
      rtol=1e-5,
    )

  def test_decoupled_is_aipo_on_the_first_update(self):
    batch = _batch(behavior_log_probs=self.center, advantages=_ADVANTAGES)
    _, decoupled, _ = _value_and_gradient(
      ppo.decoupled_ppo_loss,
      self.log_probs,
      batch,
      max_importance_ratio=1.5,
      **_CLIP,
    )
    _, expected, _ = _value_and_gradient(
      aipo.aipo_loss, self.log_probs, batch, max_importance_ratio=1.5
    )
    np.testing.assert_allclose(decoupled, expected, rtol=1e-6)

  @parameterized.parameters(True, False)
  def test_plain_ppo_does_not_see_the_behavior_policy(self, has_proximal):
    batch = _batch(
      behavior_log_probs=jnp.full((1, 6), -7.0),
      advantages=_ADVANTAGES,
      proximal_log_probs=self.center if has_proximal else None,
    )
    _, gradient, _ = _value_and_gradient(
      baselines.plain_ppo_loss, self.log_probs, batch, **_CLIP
    )
    # Without proximal log-probs the policy is its own: all ratios are 1.
    np.testing.assert_allclose(
      gradient, -_GRADIENT if has_proximal else -_ADVANTAGES, rtol=1e-5
    )

  def test_reinforce_in_closed_form(self):
    batch = _batch(behavior_log_probs=self.center, advantages=_ADVANTAGES)
    value, gradient, _ = _value_and_gradient(
      baselines.reinforce_loss, self.log_probs, batch
    )
    np.testing.assert_allclose(value, 0.25 * _ADVANTAGES.sum(), atol=1e-6)
    np.testing.assert_allclose(gradient, -_ADVANTAGES, rtol=1e-6)

  @parameterized.parameters(
    (grpo.grpo_loss, {}),
    (grpo.decoupled_grpo_loss, {'max_importance_ratio': 2.0}),
    (baselines.plain_grpo_loss, {}),
  )
  def test_grpo_weighs_sequences_alike(self, loss_fn, settings):
    # A sequence of one token and one of five, on-policy: the mean over
    # sequences of their mean advantages.
    batch = _batch(
      behavior_log_probs=self.log_probs, advantages=_ADVANTAGES
    ).replace(segment_ids=jnp.asarray([[1, 2, 2, 2, 2, 2]], jnp.int32))
    _, gradient, output = _value_and_gradient(
      loss_fn, self.log_probs, batch, **_CLIP, **settings
    )
    weights = np.asarray([[1.0, 0.2, 0.2, 0.2, 0.2, 0.2]])
    np.testing.assert_allclose(gradient, -weights * _ADVANTAGES, rtol=1e-5)
    self.assertEqual(output.loss.count, 2.0)
    np.testing.assert_allclose(
      output.loss.value(), -(3.0 + (2 * 3.0 - 3 * 3.0) / 5) / 2, rtol=1e-5
    )

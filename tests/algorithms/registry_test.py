"""Making losses, reductions and advantages by name."""

import functools

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.algorithms import aipo
from llamarl_jax.algorithms import reductions
from llamarl_jax.algorithms import registry
from llamarl_jax.types import Trajectories

_SETTINGS = {'max_importance_ratio': 2.0, 'clip_low': 0.2, 'clip_high': 0.3}


def _batch():
  ones = jnp.ones((2, 3), jnp.int32)
  return Trajectories(
    tokens=ones,
    completion_mask=jnp.asarray([[True, True, True], [True, False, False]]),
    segment_ids=ones,
    positions=ones,
    behavior_log_probs=jnp.full((2, 3), -1.0),
    policy_version=ones,
    advantages=jnp.asarray([[1.0, 2.0, 3.0], [-4.0, 0.0, 0.0]]),
    reference_log_probs=jnp.full((2, 3), -2.0),
  )


class RegistryTest(chex.TestCase):
  def test_binds_what_the_loss_takes(self):
    log_probs = jnp.full((2, 3), -0.5)
    expected_fn = functools.partial(aipo.aipo_loss, max_importance_ratio=2.0)
    chex.assert_trees_all_equal(
      jax.jit(registry.make_loss('aipo', **_SETTINGS))(log_probs, _batch()),
      jax.jit(expected_fn)(log_probs, _batch()),
    )

  @parameterized.parameters(
    ('aipo', None, 4.0),
    ('grpo', None, 2.0),
    ('grpo', 'token', 4.0),
    ('aipo', 'constant', 2.0),
  )
  def test_reduction(self, name, reduction, count):
    loss_fn = jax.jit(
      registry.make_loss(
        name, **_SETTINGS, reduction=reduction, constant_length=8
      )
    )
    self.assertEqual(
      loss_fn(jnp.full((2, 3), -0.5), _batch()).loss.count, count
    )

  def test_kl_takes_the_reduction_of_the_loss(self):
    log_probs = jnp.full((2, 3), -0.5)
    plain = jax.jit(registry.make_loss('grpo', **_SETTINGS))(
      log_probs, _batch()
    )
    penalized_fn = registry.make_loss(
      'grpo', **_SETTINGS, kl_estimator='k1', kl_coefficient=0.1
    )
    penalized = jax.jit(penalized_fn)(log_probs, _batch())
    # log(pi / ref) = 1.5 for each token.
    np.testing.assert_allclose(
      penalized.loss.value() - plain.loss.value(), 0.15, rtol=1e-5
    )

  @parameterized.parameters(
    ({'name': 'aippo'}, "unknown loss 'aippo'.*aipo.*reinforce"),
    ({'reduction': 'mean'}, "unknown reduction 'mean'.*constant.*token"),
    ({'kl_estimator': 'k4'}, "unknown kl_estimator 'k4'.*k1, k2, k3"),
    ({'max_importance_ratio': 0.0}, 'max_importance_ratio must be > 0, got 0'),
    ({'clip_low': 1.5}, 'clip_low must be > 0 and <= 1, got 1.5'),
    ({'clip_high': -0.1}, 'clip_high must be > 0, got -0.1'),
    ({'kl_coefficient': -1.0}, 'kl_coefficient must be >= 0, got -1.0'),
    ({'reduction': 'constant'}, 'constant_length must be >= 1, got 0'),
  )
  def test_bad_arguments(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      registry.make_loss(**{'name': 'aipo', **_SETTINGS, **changes})

  def test_needs_proximal_names_losses(self):
    self.assertLess(registry.NEEDS_PROXIMAL, set(registry.LOSSES))

  def test_make_reduction(self):
    self.assertIs(
      registry.make_reduction('sequence'), reductions.sequence_reduction
    )

  def test_make_advantage(self):
    advantage_fn = registry.make_advantage(
      'leave_one_out', normalize_std=True, epsilon=0.5
    )
    np.testing.assert_allclose(
      advantage_fn(jnp.asarray([[1.0, 0.0]]), jnp.ones((1, 2), bool)),
      [[1.0, -1.0]],  # 1 / (1/2 + 1/2)
      rtol=1e-6,
    )
    with self.assertRaisesRegex(ValueError, "unknown advantage 'gae'.*group"):
      registry.make_advantage('gae')
    with self.assertRaisesRegex(ValueError, 'epsilon must be > 0, got 0'):
      registry.make_advantage('group_mean', epsilon=0)

"""KL estimators in closed form and in expectation, and their composition."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.algorithms import baselines
from llamarl_jax.algorithms import reductions
from llamarl_jax.algorithms import regularizers
from llamarl_jax.types import Trajectories

_PI = np.asarray([0.6, 0.1, 0.3])
_REFERENCE = np.asarray([0.2, 0.3, 0.5])


def _batch(log_probs, reference_log_probs):
  ones = jnp.ones(log_probs.shape, jnp.int32)
  return Trajectories(
    tokens=ones,
    completion_mask=ones.astype(bool),
    segment_ids=ones,
    positions=ones,
    behavior_log_probs=log_probs,
    policy_version=ones,
    advantages=jnp.full(log_probs.shape, 2.0),
    reference_log_probs=reference_log_probs,
  )


class RegularizersTest(chex.TestCase):
  @parameterized.parameters(
    # pi / ref = 4, that is, log(pi / ref) = log 4; and the masked token.
    ('k1', np.log(4.0)),
    ('k2', 0.5 * np.log(4.0) ** 2),
    ('k3', 0.25 - 1.0 + np.log(4.0)),
  )
  def test_closed_form(self, name, expected):
    actual = jax.jit(regularizers.KL_ESTIMATORS[name])(
      jnp.log(jnp.asarray([[0.8, jnp.nan]])),
      jnp.log(jnp.asarray([[0.2, 0.5]])),
      jnp.asarray([[True, False]]),
    )
    np.testing.assert_allclose(actual, [[expected, 0.0]], rtol=1e-6)

  @parameterized.parameters('k1', 'k3')
  def test_unbiased(self, name):
    estimates = regularizers.KL_ESTIMATORS[name](
      jnp.log(jnp.asarray(_PI, jnp.float32)),
      jnp.log(jnp.asarray(_REFERENCE, jnp.float32)),
      jnp.ones(3, bool),
    )
    np.testing.assert_allclose(
      np.sum(_PI * np.asarray(estimates)),
      np.sum(_PI * np.log(_PI / _REFERENCE)),
      rtol=1e-5,
    )

  @parameterized.parameters('k1', 'k2')
  def test_expected_gradient_on_policy(self, name):
    # What a sampled token's estimate gives, weighed by its probability under
    # the policy, which is a constant: the gradient of KL(pi || ref) for k2,
    # and nothing for k1.
    reference = jnp.log(jnp.asarray(_REFERENCE, jnp.float32))

    def expected_penalty(logits):
      estimates = regularizers.KL_ESTIMATORS[name](
        jax.nn.log_softmax(logits), reference, jnp.ones(3, bool)
      )
      return jnp.sum(jnp.asarray(_PI, jnp.float32) * estimates)

    actual = jax.jit(jax.grad(expected_penalty))(
      jnp.log(jnp.asarray(_PI, jnp.float32))
    )
    log_ratio = np.log(_PI / _REFERENCE)
    kl_gradient = _PI * (log_ratio - np.sum(_PI * log_ratio))
    np.testing.assert_allclose(
      actual, kl_gradient if name == 'k2' else np.zeros(3), rtol=1e-4, atol=1e-6
    )

  @parameterized.parameters(*regularizers.KL_ESTIMATORS)
  def test_far_policies_stay_finite(self, name):
    far = jnp.asarray([[1e4, -1e4, -jnp.inf]])
    mask = jnp.ones((1, 3), bool)
    estimator_fn = regularizers.KL_ESTIMATORS[name]
    value, gradient = jax.value_and_grad(
      lambda x: jnp.sum(estimator_fn(x, jnp.zeros((1, 3)), mask))
    )(far)
    chex.assert_tree_all_finite((value, gradient))

  @parameterized.parameters(
    reductions.token_reduction, reductions.sequence_reduction
  )
  def test_with_kl_adds_to_the_sum_and_keeps_the_count(self, reduction_fn):
    log_probs = jnp.log(jnp.asarray([[0.8, 0.4]]))
    batch = _batch(log_probs, jnp.log(jnp.asarray([[0.2, 0.1]])))

    def plain(log_probs, batch):
      return baselines.reinforce_loss(
        log_probs, batch, reduction_fn=reduction_fn
      )

    penalized = regularizers.with_kl(
      plain,
      estimator_fn=regularizers.kl_k1,
      coefficient=0.5,
      reduction_fn=reduction_fn,
    )
    before = jax.jit(plain)(log_probs, batch)
    after = jax.jit(penalized)(log_probs, batch)
    # Both tokens have log(pi / ref) = log 4, so any mean of them is that.
    np.testing.assert_allclose(
      after.loss.value() - before.loss.value(), 0.5 * np.log(4.0), rtol=1e-5
    )
    self.assertEqual(after.loss.count, before.loss.count)
    np.testing.assert_allclose(
      after.metrics['reference_kl'].value(), np.log(4.0), rtol=1e-6
    )
    self.assertEqual(set(after.metrics), {*before.metrics, 'reference_kl'})

  def test_without_reference_log_probs(self):
    loss_fn = regularizers.with_kl(
      baselines.reinforce_loss,
      estimator_fn=regularizers.kl_k3,
      coefficient=0.5,
      reduction_fn=reductions.token_reduction,
    )
    log_probs = jnp.zeros((1, 2))
    with self.assertRaisesRegex(ValueError, 'coefficient 0.5.*reference'):
      loss_fn(log_probs, _batch(log_probs, None))

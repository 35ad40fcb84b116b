"""Advantages in closed form, and groups that must teach nothing."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.algorithms import advantages

_NAMES = tuple(advantages.ADVANTAGES)
_JITTED = {
  name: jax.jit(function, static_argnames='normalize_std')
  for name, function in advantages.ADVANTAGES.items()
}
_GROUP_MEAN = _JITTED['group_mean']
_LEAVE_ONE_OUT = _JITTED['leave_one_out']


class AdvantagesTest(chex.TestCase):
  def test_group_mean(self):
    actual = _GROUP_MEAN(
      jnp.asarray([[1.0, 0.0, 0.0, 1.0], [4.0, 1.0, 1.0, 2.0]]),
      jnp.ones((2, 4), bool),
    )
    np.testing.assert_allclose(
      actual, [[0.5, -0.5, -0.5, 0.5], [2.0, -1.0, -1.0, 0.0]], rtol=1e-6
    )

  def test_leave_one_out(self):
    actual = _LEAVE_ONE_OUT(
      jnp.asarray([[1.0, 0.0, 0.0, 1.0], [4.0, 1.0, 1.0, 2.0]]),
      jnp.ones((2, 4), bool),
    )
    # Each against the mean of the other three, by hand.
    third = 1.0 / 3.0
    np.testing.assert_allclose(
      actual,
      [
        [1 - third, -2 * third, -2 * third, 1 - third],
        [4 - 4 * third, 1 - 7 * third, 1 - 7 * third, 0.0],
      ],
      rtol=1e-5,
      atol=1e-6,
    )

  def test_std_normalization(self):
    rewards = jnp.asarray([[1.0, 0.0, 0.0, 1.0]])  # Standard deviation 1/2.
    valid = jnp.ones((1, 4), bool)
    np.testing.assert_allclose(
      _GROUP_MEAN(rewards, valid, normalize_std=True, epsilon=0.5),
      [[0.5, -0.5, -0.5, 0.5]],
      rtol=1e-6,
    )
    np.testing.assert_allclose(
      _LEAVE_ONE_OUT(rewards, valid, normalize_std=True, epsilon=0.5),
      np.asarray([[2.0, -2.0, -2.0, 2.0]]) / 3.0,
      rtol=1e-6,
    )

  @parameterized.product(name=_NAMES, normalize_std=(False, True))
  def test_invalid_samples_do_not_shift_the_others(self, name, normalize_std):
    function = _JITTED[name]
    rewards = jnp.asarray([[1.0, jnp.nan, 0.25, 100.0, 0.0]])
    valid = jnp.asarray([[True, False, True, False, True]])
    actual = function(rewards, valid, normalize_std=normalize_std)
    alone = function(
      jnp.asarray([[1.0, 0.25, 0.0]]),
      jnp.ones((1, 3), bool),
      normalize_std=normalize_std,
    )
    np.testing.assert_allclose(actual[:, [0, 2, 4]], alone, rtol=1e-6)
    np.testing.assert_array_equal(actual[:, [1, 3]], [[0.0, 0.0]])

  @parameterized.product(name=_NAMES, normalize_std=(False, True))
  def test_silent_groups_get_exact_zeros(self, name, normalize_std):
    rewards = np.full((4, 7), np.nan, np.float32)
    valid = np.zeros((4, 7), bool)
    # All equal. In float32 the mean of seven times 0.9 is not 0.9.
    rewards[0], valid[0] = 0.9, True
    # One valid; then none; then five equal ones beside two that do not count.
    rewards[1, 2], valid[1, 2] = 0.7, True
    rewards[3], valid[3] = 0.9, True
    rewards[3, 5:], valid[3, 5:] = 5.0, False
    actual = _JITTED[name](
      jnp.asarray(rewards), jnp.asarray(valid), normalize_std=normalize_std
    )
    np.testing.assert_array_equal(actual, np.zeros((4, 7)))

  def test_leave_one_out_is_unbiased(self):
    # One binary choice with p = 0.3 of reward 1, groups of 3. The expectation
    # over all 8 groups of sum_i A_i grad log pi(y_i) / 3 is the gradient of the
    # expected reward with respect to the logit, p (1 - p).
    p = 0.3
    outcomes = np.asarray(
      [[(group >> i) & 1 for i in range(3)] for group in range(8)], np.float32
    )
    probabilities = np.prod(np.where(outcomes == 1, p, 1 - p), axis=1)
    actual = _LEAVE_ONE_OUT(jnp.asarray(outcomes), jnp.ones((8, 3), bool))
    gradient = np.mean(np.asarray(actual) * (outcomes - p), axis=1)
    np.testing.assert_allclose(
      np.sum(probabilities * gradient), p * (1 - p), rtol=1e-5
    )

  def test_zero_advantage_fraction(self):
    fraction = jax.jit(advantages.zero_advantage_fraction)(
      jnp.asarray([[0.5, -0.5], [0.0, 0.0], [0.0, 9.0], [0.0, 0.0]]),
      jnp.asarray([[True, True], [True, True], [True, False], [False, False]]),
    )
    # Group 2 has its only advantage where it is not valid; group 3 is empty.
    self.assertEqual(fraction, (2.0, 3.0))

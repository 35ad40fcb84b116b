"""Advantages in closed form, and groups that must teach nothing."""

from absl.testing import parameterized
import chex
import jax.numpy as jnp
import numpy as np

from llamarl_jax.algorithms import advantages

_NAMES = tuple(advantages.ADVANTAGES)


class AdvantagesTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_group_mean(self):
    actual = self.variant(advantages.group_mean)(
      jnp.asarray([[1.0, 0.0, 0.0, 1.0], [4.0, 1.0, 1.0, 2.0]]),
      jnp.ones((2, 4), bool),
    )
    np.testing.assert_allclose(
      actual, [[0.5, -0.5, -0.5, 0.5], [2.0, -1.0, -1.0, 0.0]], rtol=1e-6
    )

  @chex.variants(with_jit=True, without_jit=True)
  def test_leave_one_out(self):
    actual = self.variant(advantages.leave_one_out)(
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
      advantages.group_mean(rewards, valid, normalize_std=True, epsilon=0.5),
      [[0.5, -0.5, -0.5, 0.5]],
      rtol=1e-6,
    )
    np.testing.assert_allclose(
      advantages.leave_one_out(rewards, valid, normalize_std=True, epsilon=0.5),
      np.asarray([[2.0, -2.0, -2.0, 2.0]]) / 3.0,
      rtol=1e-6,
    )

  @parameterized.product(name=_NAMES, normalize_std=(False, True))
  def test_invalid_samples_do_not_shift_the_others(self, name, normalize_std):
    function = advantages.ADVANTAGES[name]
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
    rewards = jnp.asarray(
      [
        [0.1, 0.1, 0.1],  # Equal; three times 0.1 is not 0.3 in floats.
        [0.7, jnp.nan, jnp.nan],  # One valid.
        [jnp.nan, jnp.nan, jnp.nan],  # None valid.
        [1e6 + 0.1, 1e6 + 0.1, 5.0],  # The valid two are equal.
      ]
    )
    valid = jnp.asarray(
      [
        [True, True, True],
        [True, False, False],
        [False, False, False],
        [True, True, False],
      ]
    )
    actual = advantages.ADVANTAGES[name](
      rewards, valid, normalize_std=normalize_std
    )
    np.testing.assert_array_equal(actual, np.zeros((4, 3)))

  def test_leave_one_out_is_unbiased(self):
    # One binary choice with p = 0.3 of reward 1, groups of 3. The expectation
    # over all 8 groups of sum_i A_i grad log pi(y_i) / 3 is the gradient of the
    # expected reward with respect to the logit, p (1 - p).
    p = 0.3
    outcomes = np.asarray(
      [[(group >> i) & 1 for i in range(3)] for group in range(8)], np.float32
    )
    probabilities = np.prod(np.where(outcomes == 1, p, 1 - p), axis=1)
    actual = advantages.leave_one_out(
      jnp.asarray(outcomes), jnp.ones((8, 3), bool)
    )
    gradient = np.mean(np.asarray(actual) * (outcomes - p), axis=1)
    np.testing.assert_allclose(
      np.sum(probabilities * gradient), p * (1 - p), rtol=1e-5
    )

  def test_zero_advantage_fraction(self):
    fraction = advantages.zero_advantage_fraction(
      jnp.asarray([[0.5, -0.5], [0.0, 0.0], [0.0, 9.0], [0.0, 0.0]]),
      jnp.asarray([[True, True], [True, True], [True, False], [False, False]]),
    )
    # Group 2 has its only advantage where it is not valid; group 3 is empty.
    self.assertEqual(fraction, (2.0, 3.0))

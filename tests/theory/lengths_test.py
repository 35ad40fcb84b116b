from absl.testing import parameterized
import numpy as np

from llamarl_jax.theory import lengths


class LengthsTest(parameterized.TestCase):
  @parameterized.parameters((64, 1.0, 512), (1024, 0.5, 2048), (100, 0.2, 1000))
  def test_expectations_are_those_of_many_samples(self, mean, sigma, limit):
    given = lengths.Lengths(mean, sigma, limit)
    drawn = given.sample(np.random.default_rng(0), 200_000)
    # Standard errors are below 0.3 %; samples are rounded up to whole tokens.
    np.testing.assert_allclose(given.expected(), drawn.mean() - 0.5, rtol=0.01)
    np.testing.assert_allclose(
      given.expected_square(), np.mean((drawn - 0.5) ** 2.0), rtol=0.02
    )
    longest = drawn[: 200_000 // 32 * 32].reshape(-1, 32).max(axis=1)
    np.testing.assert_allclose(
      given.expected_longest(32), longest.mean(), rtol=0.01
    )

  def test_one_length_for_all(self):
    given = lengths.Lengths(64, 0.0, 512)
    self.assertEqual(given.expected(), 64)
    self.assertEqual(given.expected_square(), 64**2)
    self.assertEqual(given.expected_longest(1000), 64)
    np.testing.assert_array_equal(
      given.sample(np.random.default_rng(0), 3), [64, 64, 64]
    )

  def test_nothing_is_longer_than_the_limit(self):
    given = lengths.Lengths(64, 2.0, 128)
    self.assertLessEqual(given.sample(np.random.default_rng(0), 999).max(), 128)
    self.assertLessEqual(given.expected_longest(10**6), 128)

  @parameterized.parameters((0, 1.0, 10), (20, 1.0, 10), (5, -1.0, 10))
  def test_impossible_values_are_refused(self, mean, sigma, limit):
    with self.assertRaises(ValueError):
      lengths.Lengths(mean, sigma, limit)

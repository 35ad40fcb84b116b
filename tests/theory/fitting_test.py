from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import scipy.optimize

from llamarl_jax.theory import fitting


class FittingTest(parameterized.TestCase):
  def test_a_curve_is_found_again(self):
    curve = fitting.Curve(2e-3, {'active': 3e-5, 'cached': 4e-9})
    points = [
      fitting.Measurement(
        curve.seconds(active=a, cached=a * c), {'active': a, 'cached': a * c}
      )
      for a in (1, 8, 64)
      for c in (32, 512)
    ]
    found = fitting.fit(points)
    self.assertAlmostEqual(found.fixed / 2e-3, 1.0, places=6)
    self.assertAlmostEqual(found.rates['active'] / 3e-5, 1.0, places=6)
    self.assertAlmostEqual(found.rates['cached'] / 4e-9, 1.0, places=6)
    self.assertLess(found.relative_error, 1e-9)

  @parameterized.parameters(*range(10))
  def test_equals_nonnegative_least_squares(self, seed):
    """scipy's nnls, on the same relative errors."""
    rng = np.random.default_rng(seed)
    work = rng.uniform(1, 10, (8, 2))
    times = np.abs(work @ rng.normal(0, 1, 2) + rng.normal(0, 1, 8)) + 0.1
    found = fitting.fit(
      [
        fitting.Measurement(t, {'a': a, 'b': b})
        for t, (a, b) in zip(times.tolist(), work.tolist(), strict=True)
      ]
    )
    matrix = np.concatenate([np.ones((8, 1)), work], axis=1) / times[:, None]
    expected, residual = scipy.optimize.nnls(matrix, np.ones(8))
    np.testing.assert_allclose(
      [found.fixed, found.rates['a'], found.rates['b']], expected, atol=1e-9
    )
    self.assertAlmostEqual(found.relative_error, residual / 8**0.5)

  def test_bad_measurements_are_refused(self):
    one = fitting.Measurement(1.0, {'a': 1.0})
    with self.assertRaisesRegex(ValueError, 'measure more'):
      fitting.fit([one])
    with self.assertRaisesRegex(ValueError, 'units'):
      fitting.fit([one, fitting.Measurement(1.0, {'b': 1.0})])
    with self.assertRaisesRegex(ValueError, 'took 0'):
      fitting.fit([one, fitting.Measurement(0.0, {'a': 1.0})])
    with self.assertRaisesRegex(ValueError, "units \\['b'\\]"):
      fitting.Curve(1.0, {'a': 1.0}).seconds(b=1.0)


if __name__ == '__main__':
  absltest.main()

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.models import rotary


class RotaryTest(parameterized.TestCase):
  def test_equals_multiplication_by_a_unit_complex_number(self):
    """Channel i with channel i + A / 2 is a complex number, turned."""
    theta, positions = 100.0, np.array([[0, 1, 7], [3, 3, 50]])
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 6)).astype(np.float32)
    turn = rotary.rotation(jnp.asarray(positions), head_dim=6, theta=theta)
    rotated = rotary.rotate(jnp.asarray(x), turn)
    frequencies = theta ** (-np.array([0, 2, 4]) / 6)
    phase = np.exp(1j * positions[..., None] * frequencies)[:, :, None]
    expected = (x[..., :3] + 1j * x[..., 3:]) * phase
    np.testing.assert_allclose(rotated[..., :3], expected.real, atol=2e-5)
    np.testing.assert_allclose(rotated[..., 3:], expected.imag, atol=2e-5)

  def test_product_depends_on_the_distance_only(self):
    key = jax.random.key(0)
    x, y = jax.random.normal(key, (2, 1, 1, 8))

    def product(i, j):
      turns = [
        rotary.rotation(jnp.array([p]), head_dim=8, theta=1e4) for p in (i, j)
      ]
      return float(
        jnp.vdot(rotary.rotate(x, turns[0]), rotary.rotate(y, turns[1]))
      )

    self.assertAlmostEqual(product(5, 2), product(45, 42), places=4)
    self.assertNotAlmostEqual(product(5, 2), product(5, 4), places=2)


if __name__ == '__main__':
  absltest.main()

import math

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.models import config as config_lib
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

  def test_gradient_is_the_transpose(self):
    """<g, R x> = <R' g, x>, for heads of several rows."""
    keys = jax.random.split(jax.random.key(1), 2)
    x, g = (jax.random.normal(key, (2, 3, 2, 6)) for key in keys)
    positions = jnp.array([[0, 1, 9], [4, 4, 70]])
    turn = rotary.rotation(positions, head_dim=6, theta=100.0)
    y, pull_back = jax.vjp(lambda x: rotary.rotate(x, turn), x)
    (by_x,) = pull_back(g)
    for b, t in np.ndindex(2, 3):
      self.assertAlmostEqual(
        float(jnp.vdot(g[b, t], y[b, t])),
        float(jnp.vdot(by_x[b, t], x[b, t])),
        places=4,
      )

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

  @parameterized.parameters(
    # Llama 3.1 and Llama 3.2 1B, as their published configs have them.
    (128, 8.0),
    (64, 32.0),
  )
  def test_scaled_frequencies_equal_the_rule_case_by_case(
    self, head_dim, factor
  ):
    """The rule in words, https://huggingface.co/blog/llama31, one by one."""
    low, high, context = 1.0, 4.0, 8192
    expected = []
    cases = set()
    for i in range(head_dim // 2):
      frequency = 1.0 / 500000.0 ** (2 * i / head_dim)
      wavelength = 2 * math.pi / frequency
      if wavelength < context / high:
        cases.add('short')
      elif wavelength > context / low:
        cases.add('long')
        frequency /= factor
      else:
        cases.add('between')
        smooth = (context / wavelength - low) / (high - low)
        frequency = (1 - smooth) * frequency / factor + smooth * frequency
      expected.append(frequency)
    self.assertEqual(cases, {'short', 'between', 'long'})
    scaling = config_lib.RopeScaling(factor, low, high, context)
    np.testing.assert_allclose(
      rotary.frequencies(head_dim, 500000.0, scaling), expected, rtol=1e-7
    )


if __name__ == '__main__':
  absltest.main()

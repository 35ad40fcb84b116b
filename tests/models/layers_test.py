"""The norm's own backward pass, against autodiff of its formula."""

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.models import layers

_EPSILON = 1e-3


def _plain(x, scale):
  wide = x.astype(jnp.float32)
  inverse = jax.lax.rsqrt(
    jnp.mean(wide * wide, axis=-1, keepdims=True) + _EPSILON
  )
  scales = scale.reshape((1,) * (x.ndim - 1) + (-1,))
  return (wide * inverse * scales).astype(x.dtype)


class RMSNormTest(parameterized.TestCase):
  @parameterized.parameters(
    ((6, 16), 'float32', 1e-6),
    ((2, 3, 16), 'float32', 1e-6),
    ((2, 3, 4, 8), 'float32', 1e-6),
    ((1, 1, 8), 'float32', 1e-6),
    ((2, 3, 16), 'bfloat16', 1e-2),
  )
  def test_value_and_gradients(self, shape, dtype, tolerance):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], shape).astype(dtype)
    scale = 1 + 0.3 * jax.random.normal(keys[1], shape[-1:])
    gradient = jax.random.normal(keys[2], shape).astype(dtype)

    found, found_vjp = jax.vjp(
      lambda x, scale: layers.rms_norm(x, scale, _EPSILON), x, scale
    )
    expected, expected_vjp = jax.vjp(_plain, x, scale)

    np.testing.assert_array_equal(found, expected)
    for ours, theirs, like in zip(
      found_vjp(gradient), expected_vjp(gradient), (x, scale), strict=True
    ):
      self.assertEqual(ours.dtype, like.dtype)
      theirs = np.asarray(theirs, np.float32)
      np.testing.assert_allclose(
        np.asarray(ours, np.float32),
        theirs,
        atol=tolerance * np.abs(theirs).max(),
      )

  def test_zeros_have_finite_gradients(self):
    def total(x):
      return jnp.sum(layers.rms_norm(x, jnp.ones(4), _EPSILON))

    np.testing.assert_allclose(
      jax.grad(total)(jnp.zeros((2, 4))), np.full((2, 4), _EPSILON**-0.5)
    )

from absl.testing import absltest
import chex
import jax
import jax.numpy as jnp

from llamarl_jax.models import swiglu


class SwigluTest(absltest.TestCase):
  def test_value_and_gradient(self):
    """Against the derivative that JAX takes of the formula."""
    x = jnp.array([-30.0, -3.0, -0.5, 0.0, 0.1, 2.0, 30.0])
    up = jnp.array([1.0, -2.0, 0.3, 5.0, -0.7, 1.0, 2.0])

    def gradient(gate):
      return jax.jit(
        jax.grad(lambda x, up: jnp.sum(gate(x, up) * up), argnums=(0, 1))
      )(x, up)

    chex.assert_trees_all_equal(
      swiglu.gate(x, up), (lambda x, up: jax.nn.silu(x) * up)(x, up)
    )
    chex.assert_trees_all_close(
      gradient(swiglu.gate),
      gradient(lambda x, up: x / (1 + jnp.exp(-x)) * up),
      rtol=2e-6,
      atol=2e-6,
    )


if __name__ == '__main__':
  absltest.main()

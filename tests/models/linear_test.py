"""The matrix product and its gradient against einsum's."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.models import linear


class LinearTest(parameterized.TestCase):
  @parameterized.parameters(
    ((2, 3, 5), (5, 7), 1, 'btd,de->bte'),
    ((4, 5), (5, 2, 3), 1, 'bd,dha->bha'),
    ((2, 3, 2, 4), (2, 4, 5), 2, 'btha,had->btd'),
  )
  def test_value_and_gradient(self, x_shape, weight_shape, num_inner, formula):
    rng = np.random.default_rng(0)
    x = rng.normal(size=x_shape).astype(np.float32)
    weight = rng.normal(size=weight_shape).astype(np.float32)

    def of_project(x, weight):
      return jnp.sum(jnp.sin(linear.project(x, weight, num_inner)))

    def of_einsum(x, weight):
      return jnp.sum(jnp.sin(jnp.einsum(formula, x, weight)))

    ours = jax.value_and_grad(of_project, argnums=(0, 1))(x, weight)
    theirs = jax.value_and_grad(of_einsum, argnums=(0, 1))(x, weight)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-5)

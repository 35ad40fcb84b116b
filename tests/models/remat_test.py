"""What each policy computes again, counted in products."""

from absl.testing import parameterized
import jax
import jax.numpy as jnp

from llamarl_jax.models import remat


def _layer(x, weight):
  """A product with a weight, and one with a batch dimension as in attention."""
  heads = jnp.einsum('btd,da->bta', x, weight)
  return jnp.sum(jnp.sin(jnp.einsum('bta,bsa->bts', heads, heads)))


class RematTest(parameterized.TestCase):
  @parameterized.parameters(
    # Two products forward, and two for each of them backward.
    ('none', 6),
    # The one with a batch dimension once more; or both.
    ('dots', 7),
    ('full', 8),
  )
  def test_products_of_a_gradient(self, name, count):
    gradient = jax.grad(remat.POLICIES[name](_layer), argnums=(0, 1))
    program = str(
      jax.make_jaxpr(gradient)(jnp.zeros((2, 3, 4)), jnp.zeros((4, 5)))
    )
    self.assertEqual(program.count('dot_general['), count)

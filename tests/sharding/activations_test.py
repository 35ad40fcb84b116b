"""Constraints name mesh axes and leave out what does not divide."""

from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

from llamarl_jax.sharding import activations
from llamarl_jax.sharding import mesh as mesh_lib

_MESH = mesh_lib.abstract_mesh(
  {'data': 2, 'fsdp': 2, 'sequence': 2, 'tensor': 4}
)


def _layout(shape, names, mesh=_MESH):
  """Returns the PartitionSpec that a traced array of this shape is given."""

  def fn(x):
    return activations.constrain(x, *names)

  traced = jax.make_jaxpr(activations.on_mesh(fn, mesh))(jnp.zeros(shape))
  return [e.params['sharding'].spec for e in traced.eqns]


class ActivationsTest(parameterized.TestCase):
  @parameterized.parameters(
    ((8, 6, 5), ('width',), P(('data', 'fsdp'), 'sequence', None)),
    (
      (8, 6, 8, 5),
      ('heads', 'head_dim'),
      P(('data', 'fsdp'), 'sequence', 'tensor', None),
    ),
    # Keys and values are whole rows, so that each query finds all of them.
    (
      (8, 6, 4, 5),
      (None, 'kv_heads', 'head_dim'),
      P(('data', 'fsdp'), None, 'tensor', None),
    ),
    # One token a row, as in decoding.
    ((8, 12), ('vocab',), P(('data', 'fsdp'), 'tensor')),
    # 6 rows do not divide over 4 devices, nor 9 heads over 4.
    ((6, 4, 9, 5), ('heads', 'head_dim'), P(None, 'sequence', None, None)),
  )
  def test_names_become_mesh_axes(self, shape, names, expected):
    self.assertEqual(_layout(shape, names), [expected])

  def test_nothing_changes_on_one_device_and_without_a_mesh(self):
    one = mesh_lib.abstract_mesh({'fsdp': 1, 'tensor': 1})
    self.assertEqual(_layout((8, 6, 5), ('width',), one), [])
    x = jnp.ones((2, 3))
    self.assertIs(activations.constrain(x, 'width'), x)

  def test_all_but_rows_and_tokens_need_a_name(self):
    with pytest.raises(ValueError, match=r'name all but rows and tokens'):
      activations.constrain(jnp.ones((2, 3, 4, 5)), 'head_dim')

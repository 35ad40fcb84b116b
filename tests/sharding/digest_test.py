"""Digests against a twin that goes element by element; what they tell apart."""

import hashlib

from absl.testing import parameterized
import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import ml_dtypes
import numpy as np
import pytest

from llamarl_jax.sharding import digest
from llamarl_jax.sharding import mesh as mesh_lib


def _mix(x):
  """MurmurHash3's 32-bit finalizer on a Python integer."""
  x ^= x >> 16
  x = x * 0x85EBCA6B % 2**32
  x ^= x >> 13
  x = x * 0xC2B2AE35 % 2**32
  return x ^ (x >> 16)


def _numpy_digest(array):
  """The digest by its definition, one element at a time."""
  unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize]
  elements = array.reshape(-1).view(unsigned)
  name = f'{array.dtype.name}{array.shape}'
  seed = hashlib.sha256(name.encode()).digest()
  lanes = []
  for lane, column in enumerate((0x9E3779B1, 0xC2B2AE3D)):
    start = int.from_bytes(seed[4 * lane : 4 * lane + 4], 'little')
    total = start
    for index, element in enumerate(elements):
      key = (index * column + start) % 2**32
      total = (total + _mix(int(element) ^ key)) % 2**32
    lanes.append(total)
  return (lanes[0] << 32) | lanes[1]


def _digest(array):
  return digest.tree_digests({'a': array})['a']


class DigestTest(parameterized.TestCase):
  @parameterized.parameters(
    ('float32', (5, 3)),
    ('float32', ()),
    ('float32', (2, 3, 1, 5)),
    ('int32', (7,)),
    ('float16', (4, 4)),
    ('bfloat16', (5, 3)),
    ('int8', (3, 5, 2)),
    ('uint8', (9,)),
    ('float8_e4m3fn', (4, 3)),
    ('bool', (6,)),
  )
  def test_equals_numpy_twin(self, dtype, shape):
    rng = np.random.default_rng(0)
    array = np.asarray(rng.normal(size=shape) * 9).astype(dtype)
    self.assertEqual(_digest(array), _numpy_digest(array))

  def test_does_not_depend_on_sharding(self):
    mesh = mesh_lib.make_mesh({'x': 2}, jax.devices()[:2])
    rng = np.random.default_rng(1)
    array = rng.normal(size=(4, 6)).astype(np.float32)
    expected = _numpy_digest(array)
    for layout in (P(), P('x'), P(None, 'x')):
      sharded = jax.device_put(array, NamedSharding(mesh, layout))
      self.assertEqual(_digest(sharded), expected, layout)

  def test_tells_apart(self):
    rng = np.random.default_rng(2)
    a = rng.normal(size=(4, 4)).astype(np.float32)
    swapped = a.copy()
    swapped[0, 1], swapped[2, 3] = a[2, 3], a[0, 1]
    rows_swapped = a[[1, 0, 2, 3]]
    one_bit = a.copy()
    one_bit.view(np.uint32)[3, 3] ^= 1
    negative_zero = np.zeros((4, 4), np.float32)
    negative_zero[1, 1] = -0.0
    arrays = [
      a,
      swapped,
      rows_swapped,
      a.T.copy(),
      a.reshape(2, 8),
      one_bit,
      np.roll(a, 1, axis=1),
      a.astype(ml_dtypes.bfloat16),
      a.view(np.int32),
      np.zeros((4, 4), np.float32),
      negative_zero,
      np.zeros((2, 8), np.float32),
      np.zeros((16,), np.float32),
      np.zeros((16,), np.int8),
      np.zeros((17,), np.int8),
    ]
    digests = [_digest(array) for array in arrays]
    self.assertLen(set(digests), len(arrays))
    # Both halves of the digest tell them apart.
    self.assertLen({d >> 32 for d in digests}, len(arrays))
    self.assertLen({d % 2**32 for d in digests}, len(arrays))

  def test_rows_beyond_32_bits_have_places_of_their_own(self):
    # 126 layers of 16384 x 53248 as in a model of 405B parameters: 2^36.7
    # elements. Traced only; a place that did wrap would drop the layer.
    shape = (126, 16384, 53248)
    row, column = jax.eval_shape(lambda: digest._place(shape))
    self.assertEqual(row.shape, shape)
    self.assertEqual(column.shape, shape)
    jaxpr = str(jax.make_jaxpr(lambda: digest._place(shape))())
    self.assertIn('dimension=0', jaxpr)
    # Column stride of a layer would be 16384 * 53248 = 872415232.
    self.assertNotIn('872415232', jaxpr)

  def test_tree_by_path_and_as_one_number(self):
    tree = {'b': {'w': np.ones((2,), np.float32)}, 'a': np.ones((), np.int32)}
    digests = digest.tree_digests(tree)
    self.assertEqual(
      digests,
      {'a': _numpy_digest(tree['a']), 'b/w': _numpy_digest(tree['b']['w'])},
    )
    one = digest.params_digest(tree)
    self.assertRegex(one, r'^[0-9a-f]{16}$')
    self.assertEqual(one, digest.combine(dict(reversed(digests.items()))))
    renamed = {'b': {'v': tree['b']['w']}, 'a': tree['a']}
    self.assertNotEqual(digest.params_digest(renamed), one)
    self.assertEqual(digest.tree_digests({}), {})

  def test_refuses_parts_of_bytes(self):
    with pytest.raises(ValueError, match='No digest for dtype int4'):
      _digest(jax.numpy.ones((2, 2), 'int4'))

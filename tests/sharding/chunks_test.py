"""Chunks and rounds carry every element of a plan once, within their bounds."""

import itertools
import math

from absl.testing import parameterized
import numpy as np
import pytest

from llamarl_jax.sharding import chunks
from llamarl_jax.sharding import reshard
from llamarl_jax.sharding import rounds

_SHAPES = {'a': (6, 8), 'b': (5, 3, 4), 'c': (), 'd': (40,)}
_ITEMSIZES = {'a': 4, 'b': 2, 'c': 4, 'd': 1}
_DTYPES = {'a': 'float32', 'b': 'bfloat16', 'c': 'float32', 'd': 'int8'}


def _split(shape, dim, parts):
  step = shape[dim] // parts
  boxes = []
  for i in range(parts):
    box = [(0, size) for size in shape]
    box[dim] = (i * step, (i + 1) * step)
    boxes.append(tuple(box))
  return reshard.ShardMap(shape, tuple(boxes))


def _plan():
  """Two halves of a and d, replicated b and c, to other halves and copies."""
  whole = {
    leaf: reshard.ShardMap(shape, (tuple((0, size) for size in shape),) * 2)
    for leaf, shape in _SHAPES.items()
  }
  source = {**whole, 'a': _split((6, 8), 0, 2), 'd': _split((40,), 0, 2)}
  destination = {**whole, 'a': _split((6, 8), 1, 2)}
  return reshard.plan_slices(source, destination, _ITEMSIZES)


def _elements(parts):
  """Returns (leaf, destination, source, index) of every element."""
  return [
    (part.leaf, part.destination, part.source, index)
    for part in parts
    for index in itertools.product(*(range(*bounds) for bounds in part.box))
  ]


class ChunksTest(parameterized.TestCase):
  @parameterized.parameters(4, 10, 16, 64, 10_000)
  def test_every_element_once_and_none_too_large(self, max_bytes):
    plan = _plan()
    cut = chunks.cut(plan, (7, 9), max_bytes=max_bytes)
    parts = [part for chunk in cut for part in chunk.parts]
    found = _elements(parts)
    self.assertLen(set(found), len(found))
    self.assertEqual(set(found), set(_elements(plan)))
    for chunk in cut:
      self.assertLessEqual(chunk.num_bytes, max_bytes)
      self.assertEqual(
        chunk.num_bytes,
        sum(math.prod(p.shape) * _ITEMSIZES[p.leaf] for p in chunk.parts),
      )
      self.assertEqual(
        {p.destination for p in chunk.parts}, {chunk.destination}
      )
      self.assertEqual({(7, 9)[p.source] for p in chunk.parts}, {chunk.owner})

  def test_owners_take_turns(self):
    cut = chunks.cut(_plan(), (7, 9), max_bytes=16)
    self.assertEqual({chunk.owner for chunk in cut[:4]}, {7, 9})

  @parameterized.parameters(
    (((0, 10),), 4, [4, 4, 2]),
    (((3, 9), (0, 4)), 12, [12, 12]),
    (((0, 2), (0, 10)), 4, [4, 4, 2, 4, 4, 2]),
    (((0, 1), (5, 9)), 3, [2, 2]),
    ((), 1, [1]),
  )
  def test_parts_are_as_equal_as_they_can_be(self, box, limit, expected):
    parts = list(chunks.split_box(box, limit))
    volumes = [math.prod(stop - start for start, stop in p) for p in parts]
    self.assertEqual(volumes, expected)

  def test_a_chunk_holds_an_element(self):
    with pytest.raises(ValueError, match='raise chunk_bytes'):
      chunks.cut(_plan(), (0, 0), max_bytes=1)

  @parameterized.parameters(8, 64, 4096)
  def test_rounds_use_each_device_once(self, max_bytes):
    plan = _plan()
    schedule = rounds.schedule(plan, _DTYPES, max_bytes=max_bytes)
    found = _elements([part for turn in schedule for part in turn.parts])
    self.assertLen(set(found), len(found))
    self.assertEqual(set(found), set(_elements(plan)))
    for turn in schedule:
      self.assertLessEqual(
        turn.size * np.dtype(turn.dtype).itemsize, max(max_bytes, 4)
      )
      for side in ('source', 'destination'):
        used = [getattr(part, side) for part in turn.parts]
        self.assertLen(set(used), len(used))
      for part in turn.parts:
        self.assertEqual(_DTYPES[part.leaf], turn.dtype)
        self.assertLessEqual(math.prod(part.shape), turn.size)

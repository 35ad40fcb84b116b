"""The slice plan: reassembly, bytes and balance, over random shardings."""

import itertools
import math
import pickle

from absl.testing import parameterized
import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import reshard


def _slices(box):
  return tuple(slice(start, stop) for start, stop in box)


def _random_shard_map(rng, shape):
  """Cuts each dimension into equal parts and replicates; random order."""
  cuts = []
  for size in shape:
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    parts = int(rng.choice(divisors[:3]))
    step = size // parts
    cuts.append([(i * step, (i + 1) * step) for i in range(parts)])
  boxes = list(itertools.product(*cuts)) * int(rng.integers(1, 4))
  rng.shuffle(boxes)
  boxes = tuple(tuple((int(a), int(b)) for a, b in box) for box in boxes)
  return reshard.ShardMap(shape, boxes)


class ReshardTest(parameterized.TestCase):
  @parameterized.parameters(*range(25))
  def test_slices_reassemble_every_destination_shard(self, seed):
    rng = np.random.default_rng(seed)
    shapes = {
      f'leaf{i}': tuple(
        int(n) for n in rng.integers(1, 13, size=rng.integers(0, 4))
      )
      for i in range(3)
    }
    arrays = {
      path: rng.normal(size=shape).astype(np.float32)
      for path, shape in shapes.items()
    }
    source = {p: _random_shard_map(rng, s) for p, s in shapes.items()}
    destination = {p: _random_shard_map(rng, s) for p, s in shapes.items()}
    itemsizes = dict.fromkeys(shapes, 4)

    plan = reshard.plan_slices(source, destination, itemsizes)

    # The oracle holds shards only, as devices do, and pastes what the plan
    # says; NaN marks what no slice has filled.
    shards = {
      path: [array[_slices(box)] for box in source[path].boxes]
      for path, array in arrays.items()
    }
    for path, shard_map in destination.items():
      for ordinal, box in enumerate(shard_map.boxes):
        shape = tuple(stop - start for start, stop in box)
        result = np.full(shape, np.nan, np.float32)
        for s in plan:
          if (s.leaf, s.destination) != (path, ordinal):
            continue
          held = source[path].boxes[s.source]
          taken = shards[path][s.source][
            tuple(
              slice(start, start + size)
              for start, size in zip(s.offset_in(held), s.shape, strict=True)
            )
          ]
          self.assertEqual(taken.shape, s.shape)
          place = tuple(
            slice(start, start + size)
            for start, size in zip(s.offset_in(box), s.shape, strict=True)
          )
          self.assertTrue(np.isnan(result[place]).all())  # Nothing twice.
          result[place] = taken
        np.testing.assert_array_equal(result, arrays[path][_slices(box)])
    wanted = sum(
      4 * math.prod(stop - start for start, stop in box)
      for shard_map in destination.values()
      for box in shard_map.boxes
    )
    self.assertEqual(plan.num_bytes, wanted)
    self.assertEqual(reshard.destination_bytes(destination, itemsizes), wanted)

  def test_replicas_share_the_sending(self):
    # Four replicas of eight leaves of 10 bytes, for two whole copies: 160
    # bytes, 40 a replica.
    whole = ((0, 10),)
    source = {f'{i}': reshard.ShardMap((10,), (whole,) * 4) for i in range(8)}
    destination = {
      f'{i}': reshard.ShardMap((10,), (whole,) * 2) for i in range(8)
    }
    itemsizes = dict.fromkeys(source, 1)
    plan = reshard.plan_slices(source, destination, itemsizes)
    sent = [0] * 4
    for s in plan:
      sent[s.source] += math.prod(s.shape)
    self.assertEqual(sent, [40] * 4)

  def test_equal_shardings_move_whole_shards(self):
    half = reshard.ShardMap((4, 6), (((0, 2), (0, 6)), ((2, 4), (0, 6))))
    plan = reshard.plan_slices({'w': half}, {'w': half}, {'w': 4})
    self.assertEqual(
      list(plan),
      [
        reshard.Slice('w', 0, 0, ((0, 2), (0, 6))),
        reshard.Slice('w', 1, 1, ((2, 4), (0, 6))),
      ],
    )

  def test_rows_to_columns_cuts_quarters(self):
    mesh = mesh_lib.make_mesh({'fsdp': 2}, jax.devices()[:2])
    rows = reshard.shard_map_of(NamedSharding(mesh, P('fsdp', None)), (4, 6))
    columns = reshard.shard_map_of(NamedSharding(mesh, P(None, 'fsdp')), (4, 6))
    self.assertEqual(rows.boxes, (((0, 2), (0, 6)), ((2, 4), (0, 6))))
    self.assertEqual(columns.boxes, (((0, 4), (0, 3)), ((0, 4), (3, 6))))
    plan = reshard.plan_slices({'w': rows}, {'w': columns}, {'w': 4})
    self.assertEqual(
      [(s.destination, s.source, s.box) for s in plan],
      [
        (0, 0, ((0, 2), (0, 3))),
        (0, 1, ((2, 4), (0, 3))),
        (1, 0, ((0, 2), (3, 6))),
        (1, 1, ((2, 4), (3, 6))),
      ],
    )

  def test_ordinals_do_not_follow_the_order_of_the_mesh(self):
    reverse = mesh_lib.make_mesh({'fsdp': 2}, jax.devices()[1::-1])
    sharding = NamedSharding(reverse, P('fsdp'))
    shard_map = reshard.shard_map_of(sharding, (6,))
    self.assertEqual(shard_map.boxes, (((3, 6),), ((0, 3),)))
    self.assertEqual(reshard.devices_of(sharding), tuple(jax.devices()[:2]))

  @parameterized.parameters(
    (P(),),
    (P('x'),),
    (P(None, 'y'),),
    (P('y', 'x'),),
    (P(('x', 'y')),),
    (P(None, ('y', 'x')),),
    (P(None, None, 'x'),),
  )
  def test_abstract_mesh_gives_the_map_of_its_devices(self, layout):
    for axes in ({'x': 2, 'y': 1}, {'x': 1, 'y': 2}):
      mesh = mesh_lib.make_mesh(axes, jax.devices()[:2])
      abstract = mesh_lib.abstract_mesh(axes)
      self.assertEqual(
        reshard.shard_map_of(NamedSharding(abstract, layout), (4, 8, 2)),
        reshard.shard_map_of(NamedSharding(mesh, layout), (4, 8, 2)),
      )

  def test_plans_are_kept(self):
    half = reshard.ShardMap((4,), (((0, 2),), ((2, 4),)))
    whole = reshard.ShardMap((4,), (((0, 4),),))
    plan = reshard.plan_slices({'w': half}, {'w': whole}, {'w': 2})
    again = reshard.ShardMap((4,), (((0, 2),), ((2, 4),)))
    self.assertIs(
      reshard.plan_slices({'w': again}, {'w': whole}, {'w': 2}), plan
    )
    wider = reshard.plan_slices({'w': again}, {'w': whole}, {'w': 4})
    self.assertEqual((plan.num_bytes, wider.num_bytes), (8, 16))

  def test_a_part_of_a_plan(self):
    half = reshard.ShardMap((4,), (((0, 2),), ((2, 4),)))
    whole = reshard.ShardMap((4,), (((0, 4),),) * 3)
    maps = {'v': half, 'w': half}, {'v': whole, 'w': whole}
    plan = reshard.plan_slices(*maps, {'v': 1, 'w': 1})
    part = plan.restrict({'w'}, {0, 2})
    self.assertEqual(
      [s for s in plan if s.leaf == 'w' and s.destination != 1], list(part)
    )
    self.assertLen(part, 4)

  def test_description_can_be_pickled(self):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    shard_map = reshard.shard_map_of(sharding, (2, 3))
    self.assertEqual(shard_map, reshard.ShardMap((2, 3), (((0, 2), (0, 3)),)))
    self.assertEqual(pickle.loads(pickle.dumps(shard_map)), shard_map)

  def test_refuses_what_does_not_match(self):
    a = reshard.ShardMap((4,), (((0, 4),),))
    b = reshard.ShardMap((6,), (((0, 6),),))
    part = reshard.ShardMap((4,), (((0, 2),),))
    with pytest.raises(ValueError, match=r"one side only: \['v', 'w'\]"):
      reshard.plan_slices({'w': a}, {'v': a}, {'v': 4})
    with pytest.raises(ValueError, match=r'w has shape \(4,\).* \(6,\)'):
      reshard.plan_slices({'w': a}, {'w': b}, {'w': 4})
    with pytest.raises(ValueError, match='lacks 2 of the elements of w'):
      reshard.plan_slices({'w': part}, {'w': a}, {'w': 4})

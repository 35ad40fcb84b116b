"""Run by plans_test: random plans over up to sixteen simulated devices.

JAX lays arrays out; the plan moves slices between its shards, by numpy; what
comes together must be what JAX lays out at the destination. Prints the number
of cases, and of those in which a pull of shard i into shard i would have
succeeded with wrong values.
"""

import json
import math

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import reshard

NUM_CASES = 512
DTYPES = ('float32', 'bfloat16', 'float16', 'int8', 'float8_e4m3fn', 'bool')


def _random_sharding(rng, shape):
  """Returns a sharding over 1 to 16 devices, in any order of axes."""
  sizes = [int(rng.choice((1, 2, 2, 4))) for _ in range(2)]
  count = math.prod(sizes)
  start = int(rng.integers(0, 17 - count))
  devices = list(jax.devices()[start : start + count])
  rng.shuffle(devices)
  axes = dict(zip('xy', sizes, strict=True))
  layout = [[] for _ in shape]
  for axis in rng.permutation(list(axes)):
    place = int(rng.integers(-1, len(shape)))
    if place >= 0:
      parts = math.prod(axes[other] for other in layout[place])
      if shape[place] % (parts * axes[axis]) == 0:
        layout[place].append(str(axis))
  mesh = mesh_lib.make_mesh(axes, devices)
  return NamedSharding(mesh, P(*(tuple(names) or None for names in layout)))


def _check_abstract(sharding, shape):
  """Checks the map without devices against that with them."""
  axes = sharding.mesh.shape
  abstract = NamedSharding(mesh_lib.abstract_mesh(axes), sharding.spec)
  devices = sharding.mesh.devices.ravel().tolist()
  indices = sharding.devices_indices_map(shape)
  for device, box in zip(
    devices, reshard.shard_map_of(abstract, shape).boxes, strict=True
  ):
    bounds = (
      i.indices(n)[:2] for i, n in zip(indices[device], shape, strict=True)
    )
    assert tuple(bounds) == box, (sharding, shape)


def _by_ordinal(array, sharding):
  """Returns the shards that JAX makes of an array, by device ordinal."""
  laid_out = jax.device_put(array, sharding)
  data = {s.device: np.asarray(s.data) for s in laid_out.addressable_shards}
  return [data[device] for device in reshard.devices_of(sharding)]


def _paste(plan, boxes, held, dtype):
  """Returns the destination shards that the slices of a plan make up."""
  result = []
  for box in boxes:
    shape = tuple(stop - start for start, stop in box)
    result.append((np.zeros(shape, dtype), np.zeros(shape, np.int64)))
  for s in plan:
    shard, count = result[s.destination]
    place = tuple(
      slice(start, start + size)
      for start, size in zip(
        s.offset_in(boxes[s.destination]), s.shape, strict=True
      )
    )
    origin, values = held[s.source]
    taken = tuple(
      slice(start, start + size)
      for start, size in zip(s.offset_in(origin), s.shape, strict=True)
    )
    shard[place] = values[taken]
    count[place] += 1
  return result


def main():
  rng = np.random.default_rng(0)
  silent = 0
  for case in range(NUM_CASES):
    rank = int(rng.integers(0, 4))
    shape = tuple(int(n) for n in rng.choice((1, 2, 4, 6, 8, 16), size=rank))
    array = np.asarray(rng.normal(size=shape) * 9).astype(
      DTYPES[case % len(DTYPES)]
    )
    source, destination = (_random_sharding(rng, shape) for _ in range(2))
    maps = [reshard.shard_map_of(s, shape) for s in (source, destination)]
    _check_abstract(destination, shape)
    itemsize = array.dtype.itemsize
    plan = reshard.plan_slices({'w': maps[0]}, {'w': maps[1]}, {'w': itemsize})
    gives = _by_ordinal(array, source)
    wants = _by_ordinal(array, destination)
    held = list(zip(maps[0].boxes, gives, strict=True))
    for (shard, count), wanted in zip(
      _paste(plan, maps[1].boxes, held, array.dtype), wants, strict=True
    ):
      # Bit for bit, and every element moved once: no bytes too many.
      assert shard.tobytes() == wanted.tobytes(), (case, source, destination)
      assert (count == 1).all(), (case, source, destination)
    assert plan.num_bytes == sum(shard.nbytes for shard in wants)
    silent += (
      len(gives) == len(wants)
      and all(a.shape == b.shape for a, b in zip(gives, wants, strict=True))
      and any(
        a.tobytes() != b.tobytes() for a, b in zip(gives, wants, strict=True)
      )
    )
  print(json.dumps({'cases': NUM_CASES, 'silent': silent}))


if __name__ == '__main__':
  main()

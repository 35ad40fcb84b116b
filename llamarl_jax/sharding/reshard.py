"""The slice plan between two shardings of the same parameters.

A plan says which piece of which leaf moves from which source device to which
destination device. Neither world needs the other's device objects: each
describes its sharding by `ShardMap`s, plain numbers that can be pickled, with
devices numbered by `devices_of`.
"""

from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import math

import jax
import numpy as np

# (start, stop) of each dimension: a box in the index space of a whole array.
Box = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class ShardMap:
  """Where the elements of one array live.

  Attributes:
    shape: of the whole array.
    boxes: the part each device holds, by device ordinal. Devices that hold the
      same box are replicas.
  """

  shape: tuple[int, ...]
  boxes: tuple[Box, ...]


@dataclasses.dataclass(frozen=True)
class Slice:
  """One piece of one leaf, to move between two devices.

  Attributes:
    leaf: path of the leaf.
    destination: ordinal of the device that needs the piece.
    source: ordinal of the device that gives it.
    box: the piece, in global indices; within one shard on both sides.
  """

  leaf: str
  destination: int
  source: int
  box: Box

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the piece."""
    return tuple(stop - start for start, stop in self.box)

  def offset_in(self, shard: Box) -> tuple[int, ...]:
    """Returns where the piece begins within the shard `shard`."""
    return tuple(
      start - origin
      for (start, _), (origin, _) in zip(self.box, shard, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class LeafPlan:
  """The slices of one leaf, n of them, as arrays: plans can be large.

  Attributes:
    leaf: path of the leaf.
    itemsize: bytes of an element.
    destinations: i64[n], ordinals of the devices that need the slices.
    sources: i64[n], ordinals of the devices that give them.
    boxes: i64[n, rank, 2], start and stop of each dimension.
  """

  leaf: str
  itemsize: int
  destinations: np.ndarray
  sources: np.ndarray
  boxes: np.ndarray

  @property
  def slice_bytes(self) -> np.ndarray:
    """Bytes of each slice, i64[n]."""
    return _volumes(self.boxes) * self.itemsize

  def keep(self, mask: np.ndarray) -> 'LeafPlan':
    """Returns the slices where `mask`, bool[n], is set."""
    return dataclasses.replace(
      self,
      destinations=self.destinations[mask],
      sources=self.sources[mask],
      boxes=self.boxes[mask],
    )

  def __iter__(self) -> Iterator[Slice]:
    for destination, source, box in zip(
      self.destinations.tolist(),
      self.sources.tolist(),
      self.boxes.tolist(),
      strict=True,
    ):
      corners = tuple((start, stop) for start, stop in box)
      yield Slice(self.leaf, destination, source, corners)


@dataclasses.dataclass(frozen=True)
class SlicePlan:
  """All slices, in order of leaf, destination device and source shard.

  Attributes:
    leaves: the slices of each leaf.
    num_sources: devices that hold the parameters.
    num_destinations: devices that need them.
  """

  leaves: tuple[LeafPlan, ...]
  num_sources: int
  num_destinations: int

  def __len__(self) -> int:
    return sum(len(leaf.sources) for leaf in self.leaves)

  def __iter__(self) -> Iterator[Slice]:
    return itertools.chain.from_iterable(self.leaves)

  @property
  def num_bytes(self) -> int:
    """Bytes that the slices put on the wire."""
    return sum(int(leaf.slice_bytes.sum()) for leaf in self.leaves)

  def restrict(
    self, leaves: Collection[str], destinations: Collection[int]
  ) -> 'SlicePlan':
    """Returns the slices of some leaves and destination devices alone."""
    wanted = np.isin(np.arange(self.num_destinations), list(destinations))
    kept = tuple(
      leaf.keep(wanted[leaf.destinations])
      for leaf in self.leaves
      if leaf.leaf in leaves
    )
    return dataclasses.replace(self, leaves=kept)

  def traffic(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns bytes sent, i64[num_sources], and received, by ordinal."""
    sent = np.zeros(self.num_sources, np.int64)
    received = np.zeros(self.num_destinations, np.int64)
    for leaf in self.leaves:
      num_bytes = leaf.slice_bytes
      np.add.at(sent, leaf.sources, num_bytes)
      np.add.at(received, leaf.destinations, num_bytes)
    return sent, received


def devices_of(sharding: jax.sharding.Sharding) -> tuple[jax.Device, ...]:
  """Returns the devices of a sharding by ordinal: in the order of their ids."""
  return tuple(sorted(sharding.device_set, key=lambda device: device.id))


def shard_map_of(
  sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> ShardMap:
  """Returns the picklable description of `sharding` for arrays of `shape`.

  Args:
    sharding: over devices, or over an abstract mesh, whose devices are numbered
      in row-major order.
    shape: of the whole array.
  """
  if isinstance(sharding, jax.sharding.NamedSharding) and isinstance(
    sharding.mesh, jax.sharding.AbstractMesh
  ):
    return _abstract_shard_map(sharding, tuple(shape))
  indices = sharding.devices_indices_map(shape)
  boxes = tuple(
    tuple(
      # `indices` gives the step too; it is always 1.
      index.indices(size)[:2]
      for index, size in zip(indices[device], shape, strict=True)
    )
    for device in devices_of(sharding)
  )
  return ShardMap(shape=tuple(shape), boxes=boxes)


def plan_slices(
  source: Mapping[str, ShardMap],
  destination: Mapping[str, ShardMap],
  itemsizes: Mapping[str, int],
) -> SlicePlan:
  """Returns the slices that turn one sharding into another.

  Each destination shard is cut along the borders of the source shards. Where
  several source devices hold the same elements, the one that has the fewest
  bytes to send so far gives them. Plans are kept: the same question is asked
  for every version.

  Args:
    source: by leaf path, who holds what.
    destination: by leaf path, who needs what; the same leaves and shapes.
    itemsizes: bytes an element of each leaf.

  Returns:
    The plan; its bytes are those of all destination shards.

  Raises:
    ValueError: leaves or shapes differ, or the source does not hold them all.
  """
  if source.keys() != destination.keys():
    difference = sorted(source.keys() ^ destination.keys())
    raise ValueError(f'Leaves on one side only: {difference}.')
  return _plan(
    tuple(
      (leaf, source[leaf], wanted, itemsizes[leaf])
      for leaf, wanted in destination.items()
    )
  )


def destination_bytes(
  destination: Mapping[str, ShardMap], itemsizes: Mapping[str, int]
) -> int:
  """Returns the bytes of all shards of a destination, replicas counted."""
  return sum(
    math.prod(stop - start for start, stop in box) * itemsizes[leaf]
    for leaf, shard_map in destination.items()
    for box in shard_map.boxes
  )


@functools.lru_cache(maxsize=16)
def _plan(
  leaves: tuple[tuple[str, ShardMap, ShardMap, int], ...],
) -> SlicePlan:
  """Returns the plan of (leaf, source, destination, bytes of an element)."""
  num_sources = max((len(held.boxes) for _, held, _, _ in leaves), default=0)
  sent = np.zeros(num_sources, np.int64)
  return SlicePlan(
    leaves=tuple(_plan_leaf(*leaf, sent) for leaf in leaves),
    num_sources=num_sources,
    num_destinations=max(
      (len(wanted.boxes) for _, _, wanted, _ in leaves), default=0
    ),
  )


def _plan_leaf(
  leaf: str,
  source: ShardMap,
  destination: ShardMap,
  itemsize: int,
  sent: np.ndarray,
) -> LeafPlan:
  """Returns the slices of one leaf and adds to `sent`, bytes by source."""
  if source.shape != destination.shape:
    raise ValueError(
      f'{leaf} has shape {source.shape} at the source and {destination.shape} '
      'at the destination.'
    )
  rank = len(source.shape)
  held = _ordinals_by_box(source.boxes)
  shards = np.array(list(held), np.int64).reshape(len(held), rank, 2)
  holders = [np.array(ordinals) for ordinals in held.values()]
  givers: list[np.ndarray] = [np.zeros(0, np.int64)] * len(destination.boxes)
  pieces: list[np.ndarray] = [shards[:0]] * len(destination.boxes)
  for box, ordinals in _ordinals_by_box(destination.boxes).items():
    wanted = np.array(box, np.int64).reshape(rank, 2)
    starts = np.maximum(shards[..., 0], wanted[:, 0])
    stops = np.minimum(shards[..., 1], wanted[:, 1])
    (found,) = np.nonzero((starts < stops).all(axis=1))
    boxes = np.stack((starts, stops), axis=-1)[found]
    # Distinct shards of one sharding are disjoint, so counting is enough.
    missing = int(_volumes(wanted[None])[0] - _volumes(boxes).sum())
    if missing:
      raise ValueError(
        f'The source lacks {missing} of the elements of {leaf} that device '
        f'{ordinals[0]} needs.'
      )
    num_bytes = _volumes(boxes) * itemsize
    for ordinal in ordinals:
      pieces[ordinal] = boxes
      givers[ordinal] = _choose([holders[s] for s in found], num_bytes, sent)
  return LeafPlan(
    leaf=leaf,
    itemsize=itemsize,
    destinations=np.repeat(
      np.arange(len(givers)), [len(sources) for sources in givers]
    ),
    sources=np.concatenate(givers),
    boxes=np.concatenate(pieces),
  )


def _choose(
  candidates: Sequence[np.ndarray], num_bytes: np.ndarray, sent: np.ndarray
) -> np.ndarray:
  """Returns who gives each piece, the least busy first; adds to `sent`."""
  givers = np.array([held[0] for held in candidates], np.int64)
  if all(len(held) == 1 for held in candidates):
    np.add.at(sent, givers, num_bytes)
    return givers
  for i, held in enumerate(candidates):
    givers[i] = held[np.argmin(sent[held])]
    sent[givers[i]] += num_bytes[i]
  return givers


def _abstract_shard_map(
  sharding: jax.sharding.NamedSharding, shape: tuple[int, ...]
) -> ShardMap:
  """Returns the shard map over a mesh of devices that are not there."""
  axes = sharding.mesh.shape
  count = math.prod(axes.values())
  grid = np.indices(tuple(axes.values())).reshape(len(axes), count)
  places = dict(zip(axes, grid, strict=True))
  entries = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
  bounds = []
  for entry, size in zip(entries, shape, strict=True):
    names = (entry,) if isinstance(entry, str) else tuple(entry or ())
    part, parts = np.zeros(count, np.int64), 1
    for name in names:
      part, parts = part * axes[name] + places[name], parts * axes[name]
    if size % parts:
      raise ValueError(f'{size} of {shape} does not divide over {names}.')
    step = size // parts
    bounds.append([(start, start + step) for start in (part * step).tolist()])
  boxes = tuple(zip(*bounds, strict=True)) if shape else ((),) * count
  return ShardMap(shape=shape, boxes=boxes)


def _ordinals_by_box(boxes: Sequence[Box]) -> dict[Box, list[int]]:
  """Returns the devices that hold each box."""
  ordinals: dict[Box, list[int]] = {}
  for ordinal, box in enumerate(boxes):
    ordinals.setdefault(box, []).append(ordinal)
  return ordinals


def _volumes(boxes: np.ndarray) -> np.ndarray:
  """Returns the elements in each box of i64[n, rank, 2], i64[n]."""
  return (boxes[..., 1] - boxes[..., 0]).prod(axis=1)

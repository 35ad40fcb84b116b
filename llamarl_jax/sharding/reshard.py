"""The slice plan between two shardings of the same parameters.

A plan says which piece of which leaf moves from which source device to which
destination device. Neither world needs the other's device objects: each
describes its sharding by `ShardMap`s, plain numbers that can be pickled, with
devices numbered by `devices_of`.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math

import jax

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


def devices_of(sharding: jax.sharding.Sharding) -> tuple[jax.Device, ...]:
  """Returns the devices of a sharding by ordinal: in the order of their ids."""
  return tuple(sorted(sharding.device_set, key=lambda device: device.id))


def shard_map_of(
  sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> ShardMap:
  """Returns the picklable description of `sharding` for arrays of `shape`."""
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
) -> tuple[Slice, ...]:
  """Returns the slices that turn one sharding into another.

  Each destination shard is cut along the borders of the source shards. Where
  several source devices hold the same elements, the one that has the fewest
  bytes to send so far gives them.

  Args:
    source: by leaf path, who holds what.
    destination: by leaf path, who needs what; the same leaves and shapes.
    itemsizes: bytes an element of each leaf.

  Returns:
    The slices in order of leaf, destination device and source shard; their
    bytes sum to those of all destination shards.

  Raises:
    ValueError: leaves or shapes differ, or the source does not hold them all.
  """
  if source.keys() != destination.keys():
    difference = sorted(source.keys() ^ destination.keys())
    raise ValueError(f'Leaves on one side only: {difference}.')
  sent: dict[int, int] = {}
  slices: list[Slice] = []
  for leaf, wanted in destination.items():
    held = source[leaf]
    if held.shape != wanted.shape:
      raise ValueError(
        f'{leaf} has shape {held.shape} at the source and {wanted.shape} at '
        'the destination.'
      )
    slices += _plan_leaf(leaf, held, wanted, itemsizes[leaf], sent)
  return tuple(slices)


def plan_bytes(slices: Sequence[Slice], itemsizes: Mapping[str, int]) -> int:
  """Returns the bytes that the slices put on the wire."""
  return sum(math.prod(s.shape) * itemsizes[s.leaf] for s in slices)


def destination_bytes(
  destination: Mapping[str, ShardMap], itemsizes: Mapping[str, int]
) -> int:
  """Returns the bytes of all shards of a destination, replicas counted."""
  return sum(
    _volume(box) * itemsizes[leaf]
    for leaf, shard_map in destination.items()
    for box in shard_map.boxes
  )


def describe(slices: Sequence[Slice], itemsizes: Mapping[str, int]) -> str:
  """Returns the plan in one line: slices, leaves, bytes, most one sends."""
  sent: dict[int, int] = {}
  for s in slices:
    num_bytes = math.prod(s.shape) * itemsizes[s.leaf]
    sent[s.source] = sent.get(s.source, 0) + num_bytes
  leaves = {s.leaf for s in slices}
  return (
    f'{len(slices)} slices of {len(leaves)} leaves, {sum(sent.values()):,} '
    f'bytes; at most {max(sent.values(), default=0):,} from one device'
  )


def _plan_leaf(
  leaf: str,
  source: ShardMap,
  destination: ShardMap,
  itemsize: int,
  sent: dict[int, int],
) -> list[Slice]:
  """Returns the slices of one leaf and adds to `sent`, bytes by source."""
  holders: dict[Box, list[int]] = {}
  for ordinal, held in enumerate(source.boxes):
    holders.setdefault(held, []).append(ordinal)
  slices = []
  for ordinal, wanted in enumerate(destination.boxes):
    found = 0
    for held, candidates in holders.items():
      box = _intersection(held, wanted)
      if box is None:
        continue
      giver = min(candidates, key=lambda c: (sent.get(c, 0), c))
      sent[giver] = sent.get(giver, 0) + _volume(box) * itemsize
      slices.append(Slice(leaf, ordinal, giver, box))
      found += _volume(box)
    # Distinct shards of one sharding are disjoint, so counting is enough.
    if found != _volume(wanted):
      raise ValueError(
        f'The source holds {found} of the {_volume(wanted)} elements of {leaf} '
        f'that device {ordinal} needs.'
      )
  return slices


def _intersection(a: Box, b: Box) -> Box | None:
  """Returns the common part of two boxes, or None where there is none."""
  box = tuple(
    (max(start_a, start_b), min(stop_a, stop_b))
    for (start_a, stop_a), (start_b, stop_b) in zip(a, b, strict=True)
  )
  return box if all(start < stop for start, stop in box) else None


def _volume(box: Box) -> int:
  """Returns the number of elements in a box."""
  return math.prod(stop - start for start, stop in box)

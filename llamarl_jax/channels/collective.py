"""Transport in one jax.distributed world: the plan as permutations of devices.

Trainer and generators are processes of one world; slices go from device to
device, over NCCL or ICI where there is one. This is the weight update of the
paper on accelerators. All processes of both ends must be commanded together,
`serve` here and `begin` there, and share their fate: when one dies, all do.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax import types
from llamarl_jax.channels import shards
from llamarl_jax.channels import subscriber as subscriber_lib
from llamarl_jax.channels import watch as watch_lib
from llamarl_jax.channels import weights
from llamarl_jax.sharding import reshard
from llamarl_jax.sharding import rounds
from llamarl_jax.sharding import spec

NAME = 'collective'
_AXIS = 'device'


class Sender:
  """Sends the pinned arrays when all are commanded to."""

  def __init__(self, settings: weights.TransportSettings) -> None:
    """Sends buffers of at most `settings.chunk_bytes`."""
    self._chunk_bytes = settings.chunk_bytes

  def offer(
    self,
    version: types.Version,
    leaves: Mapping[str, jax.Array],
    destination: weights.Destination,
  ) -> Mapping[str, Any]:
    """Returns who holds what."""
    if destination.world != weights.world_name():
      raise weights.WeightTransferError(
        f'{version}: {destination.name} is in the JAX world'
        f' {destination.world!r}, not in {weights.world_name()!r}; the'
        " collective transport needs one world: use 'transfer'."
      )
    offer: dict[str, Any] = {
      'source': _shard_maps(leaves),
      'device_ids': _device_ids(leaves),
    }
    if _in_this_process(destination.device_ids):
      # Nobody else is there to be commanded: the receiver plays both ends.
      offer['leaves'] = dict(leaves)
    return offer

  def serve(
    self, leaves: Mapping[str, jax.Array], destination: weights.Destination
  ) -> None:
    """Sends; returns when this process has done its part."""
    if _in_this_process(destination.device_ids):
      return
    _exchange(
      _shard_maps(leaves),
      destination.leaves,
      {path: str(leaf.dtype) for path, leaf in leaves.items()},
      _device_ids(leaves),
      destination.device_ids,
      max_bytes=self._chunk_bytes,
      give=_giver(leaves),
      take=lambda part, value: None,
      settle=lambda: None,
    )

  def release(self) -> None:
    """Holds nothing."""

  def close(self) -> None:
    """Holds nothing."""


class Receiver:
  """Receives when all are commanded to."""

  background = False

  def __init__(
    self, specs: Any, shardings: Any, settings: weights.TransportSettings
  ) -> None:
    """Receives into `shardings`."""
    self._chunk_bytes = settings.chunk_bytes
    self._shardings = spec.named_leaves(shardings)
    self._dtypes = {
      path: np.dtype(leaf.dtype).name
      for path, leaf in spec.named_leaves(specs).items()
    }
    self._destination = subscriber_lib.destination_of('', specs, shardings)

  def fetch(
    self,
    manifest: weights.Manifest,
    leaves: Collection[str],
    watch: watch_lib.Watch,
    cost: subscriber_lib.Cost,
  ) -> dict[str, jax.Array]:
    """Returns the arrays; see `subscriber.Receiver`."""
    assembly = shards.Assembly(
      self._destination.leaves, self._shardings, self._dtypes
    )
    cost.staging_bytes = 2 * self._chunk_bytes  # One buffer out, one in.
    _exchange(
      manifest.offer['source'],
      self._destination.leaves,
      self._dtypes,
      manifest.offer['device_ids'],
      self._destination.device_ids,
      max_bytes=self._chunk_bytes,
      give=_giver(manifest.offer.get('leaves', {})),
      take=assembly.write,
      settle=assembly.settle,
    )
    return assembly.arrays()

  def close(self) -> None:
    """Holds nothing."""


def _exchange(
  source: Mapping[str, reshard.ShardMap],
  destination: Mapping[str, reshard.ShardMap],
  dtypes: Mapping[str, str],
  source_ids: Sequence[int],
  destination_ids: Sequence[int],
  *,
  max_bytes: int,
  give: Callable[[reshard.Slice], jax.Array],
  take: Callable[[reshard.Slice, jax.Array], None],
  settle: Callable[[], None],
) -> None:
  """Runs a plan over the devices of both ends, in every process of them.

  Args:
    source: by leaf path, who holds what.
    destination: by leaf path, who needs what.
    dtypes: name of the element type, by leaf path.
    source_ids: of devices, by ordinal.
    destination_ids: of devices, by ordinal.
    max_bytes: of a buffer.
    give: returns a slice that a device of this process holds.
    take: is given a slice that a device of this process needs, on it.
    settle: called when all slices of a round were given.
  """
  itemsizes = {path: np.dtype(name).itemsize for path, name in dtypes.items()}
  plan = reshard.plan_slices(source, destination, itemsizes)
  ids = tuple(sorted({*source_ids, *destination_ids}))
  place = {device_id: i for i, device_id in enumerate(ids)}
  by_id = {device.id: device for device in jax.devices()}
  mesh = jax.sharding.Mesh(
    np.array([by_id[device_id] for device_id in ids], dtype=object), (_AXIS,)
  )
  layout = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(_AXIS))
  own = [
    i
    for i, device_id in enumerate(ids)
    if by_id[device_id].process_index == jax.process_index()
  ]
  for turn in rounds.schedule(plan, dtypes, max_bytes=max_bytes):
    sent = {place[source_ids[part.source]]: part for part in turn.parts}
    received = {
      place[destination_ids[part.destination]]: part for part in turn.parts
    }
    buffers = [
      _pack(give(sent[i]), turn.size)
      if i in sent
      else jnp.zeros((1, turn.size), turn.dtype, device=by_id[ids[i]])
      for i in own
    ]
    pairs = tuple(
      (place[source_ids[p.source]], place[destination_ids[p.destination]])
      for p in turn.parts
    )
    moved = _permutation(layout, pairs)(
      jax.make_array_from_single_device_arrays(
        (len(ids), turn.size), layout, buffers
      )
    )
    for shard in moved.addressable_shards:
      part = received.get(shard.index[0].start or 0)
      if part is not None:
        take(part, _unpack(shard.data, part.shape))
    # Else buffers of many rounds would be alive at a time.
    jax.block_until_ready(moved)
    settle()


@functools.lru_cache(maxsize=4096)
def _permutation(
  layout: jax.sharding.NamedSharding, pairs: tuple[tuple[int, int], ...]
) -> Callable[[jax.Array], jax.Array]:
  """Returns the program that moves rows by (source, destination) place."""
  return jax.jit(
    jax.shard_map(
      lambda row: jax.lax.ppermute(row, _AXIS, pairs),
      mesh=layout.mesh,
      in_specs=layout.spec,
      out_specs=layout.spec,
    )
  )


@functools.partial(jax.jit, static_argnums=1)
def _pack(piece: jax.Array, size: int) -> jax.Array:
  """Returns a slice as one row of `size` elements, padded."""
  flat = piece.reshape(1, -1)
  return jnp.pad(flat, ((0, 0), (0, size - flat.shape[1])))


@functools.partial(jax.jit, static_argnums=1)
def _unpack(row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Returns the slice in a row."""
  return row[0, : int(np.prod(shape))].reshape(shape)


def _giver(
  leaves: Mapping[str, jax.Array],
) -> Callable[[reshard.Slice], jax.Array]:
  """Returns the function that cuts slices out of this process' shards."""
  held = {path: shards.by_ordinal(leaf) for path, leaf in leaves.items()}
  source = _shard_maps(leaves)

  def give(part: reshard.Slice) -> jax.Array:
    box = source[part.leaf].boxes[part.source]
    return shards.piece(held[part.leaf][part.source], box, part)

  return give


def _shard_maps(
  leaves: Mapping[str, jax.Array],
) -> dict[str, reshard.ShardMap]:
  """Returns who holds what of arrays, by leaf path."""
  return {
    path: reshard.shard_map_of(leaf.sharding, leaf.shape)
    for path, leaf in leaves.items()
  }


def _device_ids(leaves: Mapping[str, jax.Array]) -> tuple[int, ...]:
  """Returns the ids of the devices of arrays, by ordinal."""
  first = next(iter(leaves.values()))
  return tuple(device.id for device in reshard.devices_of(first.sharding))


def _in_this_process(device_ids: Sequence[int]) -> bool:
  """Returns whether all devices belong to this process."""
  own = {device.id for device in jax.local_devices()}
  return own.issuperset(device_ids)

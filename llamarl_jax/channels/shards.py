"""Single-device parts of sharded arrays: cut out, and put together in place."""

from collections.abc import Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.sharding import reshard


def by_ordinal(array: jax.Array) -> dict[int, jax.Array]:
  """Returns the single-device arrays of this process, by device ordinal."""
  by_device = {shard.device: shard.data for shard in array.addressable_shards}
  return {
    ordinal: by_device[device]
    for ordinal, device in enumerate(reshard.devices_of(array.sharding))
    if device in by_device
  }


def piece(
  shard: jax.Array, box: reshard.Box, wanted: reshard.Slice
) -> jax.Array:
  """Returns the part of a shard that a slice asks for, on the same device.

  Args:
    shard: one device's part of an array.
    box: where that part lies in the array.
    wanted: a slice within the box.
  """
  if wanted.box == box:
    return shard
  starts = tuple(np.int32(start) for start in wanted.offset_in(box))
  return _cut(shard, starts, wanted.shape)


class Assembly:
  """The shards of this process, filled piece by piece: the spare buffer."""

  def __init__(
    self,
    wanted: Mapping[str, reshard.ShardMap],
    shardings: Mapping[str, jax.sharding.Sharding],
    dtypes: Mapping[str, Any],
  ) -> None:
    """Allocates nothing yet.

    Args:
      wanted: by leaf path, what each device needs.
      shardings: by leaf path.
      dtypes: by leaf path.
    """
    self._wanted = wanted
    self._shardings = shardings
    self._dtypes = dtypes
    self._shards: dict[tuple[str, int], jax.Array] = {}
    self._unsettled: set[tuple[str, int]] = set()

  def write(self, part: reshard.Slice, value: jax.Array) -> None:
    """Puts a piece in its place, by and by; see `settle`."""
    key = part.leaf, part.destination
    box = self._wanted[part.leaf].boxes[part.destination]
    if part.box == box:
      self._shards[key] = value
    else:
      starts = tuple(np.int32(start) for start in part.offset_in(box))
      self._shards[key] = _paste(self._shard(*key), value, starts)
    self._unsettled.add(key)

  def settle(self) -> None:
    """Waits until all that was written is in its place, and pieces are free."""
    jax.block_until_ready([self._shards[key] for key in self._unsettled])
    self._unsettled.clear()

  def arrays(self) -> dict[str, jax.Array]:
    """Returns the arrays, of which every piece must have been written."""
    return {
      leaf: jax.make_array_from_single_device_arrays(
        self._wanted[leaf].shape,
        sharding,
        [self._shard(leaf, ordinal) for ordinal in local_ordinals(sharding)],
      )
      for leaf, sharding in self._shardings.items()
    }

  def _shard(self, leaf: str, ordinal: int) -> jax.Array:
    """Returns one shard, of zeros before anything was written to it."""
    if (leaf, ordinal) not in self._shards:
      box = self._wanted[leaf].boxes[ordinal]
      self._shards[leaf, ordinal] = jnp.zeros(
        tuple(stop - start for start, stop in box),
        self._dtypes[leaf],
        device=reshard.devices_of(self._shardings[leaf])[ordinal],
      )
    return self._shards[leaf, ordinal]


def local_ordinals(sharding: jax.sharding.Sharding) -> list[int]:
  """Returns the ordinals of the devices that belong to this process."""
  return [
    ordinal
    for ordinal, device in enumerate(reshard.devices_of(sharding))
    if device in sharding.addressable_devices
  ]


@functools.partial(jax.jit, static_argnums=2)
def _cut(
  shard: jax.Array, starts: tuple[Any, ...], sizes: tuple[int, ...]
) -> jax.Array:
  """Returns a box of `shard`; starts are not static, to compile once a size."""
  taken = jax.lax.dynamic_slice(_bits(shard), starts, sizes)
  if taken.dtype == shard.dtype:
    return taken
  return jax.lax.bitcast_convert_type(taken, shard.dtype)


@functools.partial(jax.jit, donate_argnums=0)
def _paste(
  shard: jax.Array, value: jax.Array, starts: tuple[Any, ...]
) -> jax.Array:
  """Returns `shard` with a piece at its place, in the same buffer."""
  # As integers: XLA's CPU backend would convert the whole shard to float32 and
  # back where the elements are floats of fewer bytes.
  pasted = jax.lax.dynamic_update_slice(_bits(shard), _bits(value), starts)
  if pasted.dtype == shard.dtype:
    return pasted
  return jax.lax.bitcast_convert_type(pasted, shard.dtype)


def _bits(array: jax.Array) -> jax.Array:
  """Returns short floats as unsigned integers of the same bits."""
  unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize)
  if unsigned is None or not jnp.issubdtype(array.dtype, jnp.floating):
    return array
  return jax.lax.bitcast_convert_type(array, unsigned)

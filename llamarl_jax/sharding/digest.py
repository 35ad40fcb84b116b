"""Digests of arrays, computed where the arrays live.

A digest is a 64-bit number that depends on the shape, the dtype and the bits
of every element at its place, and not on how the array is sharded: equal
digests at both ends of a transfer mean that the right values arrived.

  lane_s = sum_i mix(bits_i ^ key_s(i)) mod 2^32,  s = 0, 1

A sum is taken in any order with the same result, so each device adds up its
own shard. `mix` is the finalizer of MurmurHash3 (Appleby, public domain), a
bijection: a change of one element always changes both lanes.
"""

import functools
import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.sharding import spec as spec_lib

# Odd multipliers that spread the place of an element over 32 bits; the two
# lanes differ in them, so that values exchanged between places show.
_COLUMN = (0x9E3779B1, 0xC2B2AE3D)
_ROW = (0x27D4EB2F, 0x165667B1)
# Programs begun and not done. XLA's CPU client lets 32 a device be in flight; a
# device that waits for room holds the thread that another device needs to reach
# its collective, and the process hangs.
_MAX_IN_FLIGHT = 8
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def tree_digests(params: Any) -> dict[str, int]:
  """Returns the 64-bit digest of every leaf, by path.

  Args:
    params: pytree of arrays; all on the same devices.

  Raises:
    ValueError: a leaf has a dtype of 8 bytes or of parts of bytes.
  """
  leaves = spec_lib.named_leaves(params)
  if not leaves:
    return {}
  # A program a leaf, and not one of the tree: leaves of one kind share it.
  lanes = []
  for leaf in leaves.values():
    lanes.append(_program(_everywhere(leaf))(leaf))
    if len(lanes) > _MAX_IN_FLIGHT:
      lanes[-1 - _MAX_IN_FLIGHT].block_until_ready()
  lanes = jax.device_get(lanes)
  return {
    path: (int(high) << 32) | int(low)
    for path, (high, low) in zip(leaves, lanes, strict=True)
  }


def params_digest(params: Any) -> str:
  """Returns one digest of a whole tree, as 16 hexadecimal digits."""
  return combine(tree_digests(params))


def combine(digests: dict[str, int]) -> str:
  """Returns one digest of the digests by path, as 16 hexadecimal digits."""
  text = '\n'.join(f'{path} {digests[path]:016x}' for path in sorted(digests))
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def seeds(shape: tuple[int, ...], dtype: Any) -> tuple[int, int]:
  """Returns where the lanes begin, two 32-bit numbers told by shape and dtype.

  Zeros of another shape or dtype thereby have another digest.
  """
  text = f'{np.dtype(dtype).name}{tuple(shape)}'
  digest = hashlib.sha256(text.encode()).digest()
  return int.from_bytes(digest[:4], 'little'), int.from_bytes(
    digest[4:8], 'little'
  )


@functools.lru_cache(maxsize=64)
def _program(sharding: jax.sharding.Sharding | None) -> Any:
  """Returns the compiled `_lanes`, with results in `sharding` if given."""
  return jax.jit(_lanes, out_shardings=sharding)


def _everywhere(array: jax.Array) -> jax.sharding.Sharding | None:
  """Returns where the lanes of an array go: to each process, of several."""
  sharding = getattr(array, 'sharding', None)
  if sharding is None or sharding.is_fully_addressable:
    return None
  return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())


def _lanes(array: jax.Array) -> jax.Array:
  """Returns u32[2], the lanes of one array of any shape."""
  bits = _bits(array)
  row, column = _place(array.shape)
  start = np.array(seeds(array.shape, array.dtype), np.uint32)
  mixed = tuple(
    _mix(
      bits
      ^ (
        column * np.uint32(_COLUMN[lane])
        + row * np.uint32(_ROW[lane])
        + start[lane]
      )
    )
    for lane in range(2)
  )
  # One reduction of both lanes: XLA fuses it with all of the above, where two
  # sums would store the mixed bits of the whole array and take 15 times longer.
  sums = jax.lax.reduce(
    mixed,
    (np.uint32(0), np.uint32(0)),
    lambda a, b: (a[0] + b[0], a[1] + b[1]),
    tuple(range(array.ndim)),
  )
  return jnp.stack(sums) + start


def _bits(array: jax.Array) -> jax.Array:
  """Returns the bits of each element as u32, in the shape of `array`."""
  if array.dtype == jnp.bool_:
    return array.astype(jnp.uint32)
  itemsize = array.dtype.itemsize
  whole_bytes = jax.dtypes.itemsize_bits(array.dtype) == 8 * itemsize
  if itemsize not in _UNSIGNED or not whole_bytes:
    raise ValueError(
      f'No digest for dtype {array.dtype}; elements must have 1, 2 or 4 bytes.'
    )
  unsigned = jax.lax.bitcast_convert_type(array, _UNSIGNED[itemsize])
  return unsigned.astype(jnp.uint32)


def _place(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
  """Returns the global row and column of every element, each u32[shape].

  The trailing dimensions that stay within 2^32 elements together form a row;
  so (row, column) is unique also in the stacked layers of a very large model.
  """
  split = len(shape)
  while split > 0 and math.prod(shape[split - 1 :]) < 2**32:
    split -= 1
  row = _linear_index(shape, range(split))
  column = _linear_index(shape, range(split, len(shape)))
  return row, column


def _linear_index(shape: tuple[int, ...], dims: range) -> jax.Array:
  """Returns the row-major index over the dimensions `dims`, u32[shape]."""
  index = jnp.zeros(shape, jnp.uint32)
  stride = 1
  for dim in reversed(dims):
    iota = jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    index = index + iota * np.uint32(stride)
    stride = stride * shape[dim] % 2**32
  return index


def _mix(x: jax.Array) -> jax.Array:
  """Returns the MurmurHash3 finalizer of each element of `x`, u32."""
  x = x ^ (x >> 16)
  x = x * np.uint32(0x85EBCA6B)
  x = x ^ (x >> 13)
  x = x * np.uint32(0xC2B2AE35)
  return x ^ (x >> 16)

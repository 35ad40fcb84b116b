"""Reads the shards of parameters out of the files of a Hugging Face folder."""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
from jax.sharding import Sharding
import numpy as np

from llamarl_jax.checkpoints import hf_tensors
from llamarl_jax.checkpoints import safetensors_format
from llamarl_jax.checkpoints.hf_tensors import Place
from llamarl_jax.checkpoints.safetensors_format import Box


class Reader:
  """Reads parameters, or what this host needs of them, from open files."""

  def __init__(
    self,
    files: Mapping[pathlib.Path, int],
    tensors: Mapping[str, safetensors_format.Tensor],
    dtype: np.dtype,
    *,
    tied: bool,
  ):
    """Keeps what it is given.

    Args:
      files: descriptors, open as long as the reader is used.
      tensors: by name, those of the model.
      dtype: to give parameters in.
      tied: whether a head beside the embedding must equal it.
    """
    self._files = files
    self._tensors = tensors
    self._dtype = dtype
    self._tied = tied

  def on_host(self, places: Sequence[Place]) -> np.ndarray:
    """Returns a whole parameter.

    Args:
      places: of its layers in order, or the one of a parameter without layers.
    """
    shape = _shape(places[0])
    box = tuple(slice(0, size) for size in shape)
    array = np.empty((len(places), *shape), self._dtype)
    for layer, place in zip(array, places, strict=True):
      self._read(place, [box], [layer])
    return array[0] if places[0].layer is None else array

  def on_devices(
    self, places: Sequence[Place], sharding: Sharding
  ) -> jax.Array:
    """Returns a parameter laid out as `sharding` says; see `on_host`."""
    if places[0].layer is None:
      return self._sharded(places[0], sharding)
    shape = (len(places), *_shape(places[0]))
    zeros = functools.partial(jnp.zeros, shape, self._dtype)
    array = jax.jit(zeros, out_shardings=sharding)()
    put = jax.jit(_put, donate_argnums=0, out_shardings=sharding)
    for i, place in enumerate(places):
      layer = self._sharded(place, _of_a_layer(sharding))
      # Layers read ahead of the devices would pile up in host memory.
      array = jax.block_until_ready(put(array, layer, np.int32(i)))
    return array

  def _sharded(self, place: Place, sharding: Sharding) -> jax.Array:
    """Returns one layer of a parameter, or one that has no layers."""
    shape = _shape(place)

    def key(index: Any) -> tuple[tuple[int, ...], ...]:
      # Slices are not hashable before Python 3.12, and may be open.
      return tuple(
        part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
      )

    needed = sharding.addressable_devices_indices_map(shape)
    keys = list(dict.fromkeys(map(key, needed.values())))
    boxes = [tuple(slice(*ends) for ends in axes) for axes in keys]
    arrays = [np.empty(_sizes(box), self._dtype) for box in boxes]
    self._read(place, boxes, arrays)
    parts = dict(zip(keys, arrays, strict=True))
    return jax.make_array_from_callback(
      shape, sharding, lambda index: parts[key(index)]
    )

  def _read(
    self, place: Place, boxes: Sequence[Box], arrays: Sequence[np.ndarray]
  ) -> None:
    """Fills arrays with parts of a layer of a parameter.

    Args:
      place: the tensor.
      boxes: disjoint parts, in the axes of the parameter.
      arrays: one for each, of its shape.
    """
    wanted = [place.to_view(box) for box in boxes]
    targets = [place.viewed(array) for array in arrays]
    hull = tuple(
      slice(min(s.start for s in axis), max(s.stop for s in axis))
      for axis in zip(*wanted, strict=True)
    )
    if math.prod(_sizes(hull)) == sum(array.size for array in arrays):
      # The parts fill their hull: whole rows are read, and dealt out.
      regions = [(hull, range(len(boxes)))]
    else:
      regions = [(box, range(i, i + 1)) for i, box in enumerate(wanted)]
    for region, members in regions:
      for first, block in self._blocks(place, region):
        for i in members:
          _deal(block, first, region, wanted[i], targets[i])

  def _blocks(
    self, place: Place, region: Box
  ) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the first row of each block of a region, and its elements."""

    def blocks(name: str) -> Iterator[tuple[int, np.ndarray]]:
      tensor = self._tensors[name]
      file = self._files[tensor.path]
      return safetensors_format.read_blocks(file, tensor, place.view, region)

    head = hf_tensors.HEAD
    if not (
      self._tied
      and place.name == hf_tensors.EMBEDDING
      and head in self._tensors
    ):
      yield from blocks(place.name)
      return
    for (first, block), (_, other) in zip(
      blocks(place.name), blocks(head), strict=True
    ):
      if not np.array_equal(block, other):
        raise ValueError(
          f'{self._tensors[head].path}: {head} differs from '
          f'{hf_tensors.EMBEDDING}, though config.json ties them; set '
          'tie_word_embeddings to false there to use both.'
        )
      yield first, block


def _put(array: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_index_in_dim(array, layer, index, axis=0)


def _of_a_layer(sharding: Sharding) -> Sharding:
  """Returns the sharding of one layer of a stacked parameter."""
  if isinstance(sharding, NamedSharding):
    return NamedSharding(
      sharding.mesh,
      PartitionSpec(*sharding.spec[1:]),
      memory_kind=sharding.memory_kind,
    )
  return sharding  # Of a single device, which suits any shape.


def _deal(
  block: np.ndarray, first: int, region: Box, box: Box, target: np.ndarray
) -> None:
  """Writes what a block holds of a box, all in the axes of the file.

  Args:
    block: some rows of a region, all of their elements.
    first: place of its first row in the tensor.
    region: what is being read.
    box: what the target is to hold, within the region.
    target: of the shape of the box.
  """
  rows, *columns = box
  low = max(rows.start, first)
  high = min(rows.stop, first + len(block))
  if low >= high:
    return
  part = [
    slice(inner.start - outer.start, inner.stop - outer.start)
    for inner, outer in zip(columns, region[1:], strict=True)
  ]
  target[low - rows.start : high - rows.start] = block[
    (slice(low - first, high - first), *part)
  ]


def _shape(place: Place) -> tuple[int, ...]:
  """Returns the shape of one layer of the parameter."""
  return tuple(place.view[axis] for axis in place.order)


def _sizes(box: Box) -> tuple[int, ...]:
  return tuple(part.stop - part.start for part in box)

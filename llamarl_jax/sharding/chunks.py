"""A slice plan cut into chunks: what travels, and is held, at a time.

The receiver of a model never holds more of it twice than the chunks that are
under way, whatever the size of its largest leaf.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import itertools
import math

from llamarl_jax.sharding import reshard

# Parts of one chunk: each is an array of its own in the transfer library.
_MAX_PARTS = 64


@dataclasses.dataclass(frozen=True)
class Chunk:
  """Slices that one process gives to one device at a time.

  Attributes:
    owner: process of the source devices.
    destination: ordinal of the device that needs the slices.
    parts: the slices.
    num_bytes: of all parts.
  """

  owner: int
  destination: int
  parts: tuple[reshard.Slice, ...]
  num_bytes: int


def cut(
  plan: reshard.SlicePlan, owners: Sequence[int], *, max_bytes: int
) -> list[Chunk]:
  """Returns the chunks that make up a plan.

  Slices above `max_bytes` are cut up; smaller ones travel together. Owners
  take turns, so that all of them send at the same time.

  Args:
    plan: of the slices.
    owners: process of each source device, by ordinal.
    max_bytes: of one chunk; at least one element.
  """
  parts: dict[tuple[int, int], list[tuple[reshard.Slice, int]]] = {}
  for leaf in plan.leaves:
    for piece in leaf:
      key = owners[piece.source], piece.destination
      for box in split_box(piece.box, max_bytes // leaf.itemsize):
        part = dataclasses.replace(piece, box=box)
        num_bytes = math.prod(part.shape) * leaf.itemsize
        parts.setdefault(key, []).append((part, num_bytes))
  queues = [
    _pack(owner, destination, sized, max_bytes)
    for (owner, destination), sized in sorted(parts.items())
  ]
  turns = itertools.zip_longest(*queues)
  return [chunk for turn in turns for chunk in turn if chunk is not None]


def split_box(box: reshard.Box, max_elements: int) -> Iterator[reshard.Box]:
  """Yields parts of a box of at most so many elements, in row-major order.

  All but the last along each dimension are equal, since each new size is a
  program to compile.

  Raises:
    ValueError: max_elements is below 1.
  """
  if max_elements < 1:
    raise ValueError(
      f'A chunk of {max_elements} elements holds nothing; raise chunk_bytes.'
    )
  sizes = [stop - start for start, stop in box]
  volume = math.prod(sizes)
  if volume <= max_elements:
    yield box
    return
  dim = next(i for i, size in enumerate(sizes) if size > 1)
  rows = max(1, max_elements // (volume // sizes[dim]))
  rows = math.ceil(sizes[dim] / math.ceil(sizes[dim] / rows))
  start, stop = box[dim]
  for first in range(start, stop, rows):
    row = (first, min(first + rows, stop))
    yield from split_box((*box[:dim], row, *box[dim + 1 :]), max_elements)


def _pack(
  owner: int,
  destination: int,
  sized: Sequence[tuple[reshard.Slice, int]],
  max_bytes: int,
) -> list[Chunk]:
  """Returns chunks of neighboring parts, each with its bytes."""
  chunks: list[Chunk] = []
  for part, num_bytes in sized:
    last = chunks[-1] if chunks else None
    if (
      last is not None
      and last.num_bytes + num_bytes <= max_bytes
      and len(last.parts) < _MAX_PARTS
    ):
      chunks[-1] = dataclasses.replace(
        last, parts=(*last.parts, part), num_bytes=last.num_bytes + num_bytes
      )
    else:
      chunks.append(Chunk(owner, destination, (part,), num_bytes))
  return chunks

"""A slice plan as rounds, in each of which a device sends and receives once.

That is what one permutation between devices can carry: all its buffers have one
size and one type. Every process computes the same rounds from the same plan.
"""

from collections.abc import Mapping
import dataclasses
import math

from llamarl_jax.sharding import chunks
from llamarl_jax.sharding import reshard

# Smaller parts are padded: a new size is a program to compile.
_LEAST_ELEMENTS = 256


@dataclasses.dataclass(frozen=True)
class Round:
  """Slices that move at the same time.

  Attributes:
    dtype: of all of them.
    size: elements of a buffer; slices are at most as large.
    parts: the slices, no two from one source or to one destination.
  """

  dtype: str
  size: int
  parts: tuple[reshard.Slice, ...]


def schedule(
  plan: reshard.SlicePlan, dtypes: Mapping[str, str], *, max_bytes: int
) -> list[Round]:
  """Returns the rounds that carry a plan.

  Each slice goes into the first round of its type and size in which both its
  devices are free: at most twice as many rounds as the busiest device has
  slices, less one.

  Args:
    plan: of the slices.
    dtypes: name of the element type, by leaf path.
    max_bytes: of a buffer; slices above it are cut up.
  """
  busy: dict[tuple[str, int, str, int], int] = {}  # Bit r: busy in round r.
  rounds: dict[tuple[str, int, int], list[reshard.Slice]] = {}
  for leaf in plan.leaves:
    dtype = dtypes[leaf.leaf]
    for piece in leaf:
      for box in chunks.split_box(piece.box, max_bytes // leaf.itemsize):
        part = dataclasses.replace(piece, box=box)
        size = _buffer_size(math.prod(part.shape), max_bytes // leaf.itemsize)
        sends = dtype, size, 'sends', part.source
        receives = dtype, size, 'receives', part.destination
        taken = busy.get(sends, 0) | busy.get(receives, 0)
        free = ~taken & (taken + 1)  # The lowest bit that is not set.
        busy[sends] = busy.get(sends, 0) | free
        busy[receives] = busy.get(receives, 0) | free
        rounds.setdefault((dtype, size, free.bit_length()), []).append(part)
  return [
    Round(dtype, size, tuple(parts))
    for (dtype, size, _), parts in rounds.items()
  ]


def _buffer_size(num_elements: int, limit: int) -> int:
  """Returns the elements of the buffer for a slice: a power of two, mostly."""
  size = max(_LEAST_ELEMENTS, 1 << (num_elements - 1).bit_length())
  return max(num_elements, min(size, limit))

"""The safetensors format: headers, ranges of bytes, and a writer that streams.

A file is the length of its header (u64, little endian), the header (JSON: per
tensor dtype, shape and byte offsets), and the bytes of the tensors. Read and
written here by ranges: the safetensors package maps whole files, whose pages
then count as resident memory, and writes only what is in memory all at once.
Format: https://github.com/huggingface/safetensors#format
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import struct
from typing import Any

import jax
import ml_dtypes
import numpy as np

# The dtypes that weights come in, by their name in a header.
DTYPES: Mapping[str, np.dtype] = {
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F16': np.dtype(np.float16),
  'F32': np.dtype(np.float32),
}
# A header is text; a longer one is not one (the limit of the reference).
_MAX_HEADER_BYTES = 100_000_000
# Memory that reading takes beside its result.
_BLOCK_BYTES = 16 * 2**20

Box = tuple[slice, ...]  # A start and a stop for each axis.


def dtype_name(dtype: jax.typing.DTypeLike) -> str:
  """Returns what the format calls a dtype, a key of DTYPES.

  Raises:
    ValueError: if it is not one that weights are written in.
  """
  kind = np.dtype(dtype)
  for name, known in DTYPES.items():
    if known == kind:
      return name
  raise ValueError(
    f'dtype {kind.name!r} is not one weights are exported in; those that are: '
    f'{[str(known) for known in DTYPES.values()]}.'
  )


@dataclasses.dataclass(frozen=True)
class Tensor:
  """Where a tensor lies.

  Attributes:
    path: of the file.
    dtype: its name in the header, such as 'BF16'.
    shape: as the header has it.
    start: place of its first byte in the file.
  """

  path: pathlib.Path
  dtype: str
  shape: tuple[int, ...]
  start: int


def read_header(path: pathlib.Path) -> dict[str, Tensor]:
  """Returns what a file says of its tensors; their bytes are not read.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it is not safetensors, or cut short.
  """
  size = path.stat().st_size
  with path.open('rb') as file:
    first = file.read(8)
    length = struct.unpack('<Q', first)[0] if len(first) == 8 else 0
    if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
      raise ValueError(
        f'{path} is not a safetensors file, or is cut short ({size} bytes): '
        'fetch it again.'
      )
    text = file.read(length)
  start = 8 + length
  try:
    entries = json.loads(text)
    entries.pop('__metadata__', None)
    ends = {name: entry['data_offsets'][1] for name, entry in entries.items()}
    tensors = {
      name: Tensor(
        path,
        entry['dtype'],
        tuple(entry['shape']),
        start + entry['data_offsets'][0],
      )
      for name, entry in entries.items()
    }
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(
      f'{path} has a damaged header ({error!r}): fetch it again.'
    ) from error
  if ends and start + max(ends.values()) != size:
    raise ValueError(
      f'{path} has {size} bytes, but its header speaks of '
      f'{start + max(ends.values())}: fetch it again.'
    )
  for name, tensor in tensors.items():
    if tensor.dtype in DTYPES:
      nbytes = math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
      if tensor.start + nbytes != start + ends[name]:
        raise ValueError(
          f'{path} has a damaged header (bytes of {name}): fetch it again.'
        )
  return tensors


def read_blocks(
  file: int, tensor: Tensor, shape: Sequence[int], box: Box
) -> Iterator[tuple[int, np.ndarray]]:
  """Yields a part of a tensor, some rows at a time.

  Only the bytes asked for are read; runs that follow each other in the file
  are read at once.

  Args:
    file: descriptor of the opened file.
    tensor: of the file, of a dtype in DTYPES.
    shape: to see it in, of as many elements, at least one axis.
    box: the part wanted, in that shape.

  Yields:
    The place of the first row in the tensor, and the rows (along the first
    axis), in the dtype of the file.

  Raises:
    OSError: if the file ends before the tensor does.
  """
  dtype = DTYPES[tensor.dtype]
  sizes = [part.stop - part.start for part in box]
  # Rows of the box that follow each other in the file.
  row_is_whole = all(
    size == full for size, full in zip(sizes[1:], shape[1:], strict=True)
  )
  row_bytes = math.prod(sizes[1:]) * dtype.itemsize
  rows_at_once = max(1, _BLOCK_BYTES // max(row_bytes, 1))
  stride = math.prod(shape[1:]) * dtype.itemsize
  for first in range(box[0].start, box[0].stop, rows_at_once):
    num_rows = min(rows_at_once, box[0].stop - first)
    block = np.empty((num_rows, *sizes[1:]), dtype)
    place = block.reshape(-1).view(np.uint8).data
    offset = tensor.start + first * stride
    if row_is_whole:
      _read_at(file, place, offset)
    else:
      _read_runs(file, place, offset, stride, num_rows, shape[1:], box[1:])
    yield first, block


def _read_runs(
  file: int,
  place: memoryview,
  offset: int,
  stride: int,
  num_rows: int,
  shape: Sequence[int],
  box: Box,
) -> None:
  """Fills `place` with the box of each of some rows, one read a run.

  Args:
    file: descriptor.
    place: bytes of num_rows boxes.
    offset: of the first row in the file.
    stride: bytes from one row to the next.
    num_rows: how many.
    shape: of a row.
    box: wanted of each row, not all of it.
  """
  # A run spans the innermost axis that is not whole and all axes after it.
  axis = max(
    i
    for i, (part, full) in enumerate(zip(box, shape, strict=True))
    if part.stop - part.start != full
  )
  itemsize = stride // math.prod(shape)
  strides = [math.prod(shape[i + 1 :]) * itemsize for i in range(len(shape))]
  run = (box[axis].stop - box[axis].start) * strides[axis]
  base = offset + box[axis].start * strides[axis]
  outer = [range(part.start, part.stop) for part in box[:axis]]
  starts = [
    sum(i * step for i, step in zip(index, strides, strict=False))
    for index in itertools.product(*outer)
  ]
  done = 0
  for row in range(num_rows):
    for start in starts:
      _read_at(file, place[done : done + run], base + row * stride + start)
      done += run


def _read_at(file: int, place: memoryview, offset: int) -> None:
  """Fills `place` from `offset` on; one system call seldom reads all."""
  while place:
    count = os.preadv(file, [place], offset)
    if not count:
      raise OSError(f'the file ends at byte {offset}, inside a tensor')
    place = place[count:]
    offset += count


def write(
  path: pathlib.Path,
  shapes: Mapping[str, tuple[int, ...]],
  dtype: str,
  make: Callable[[str], np.ndarray],
) -> None:
  """Writes a file, one tensor in memory at a time.

  Args:
    path: of the new file.
    shapes: by name, in the order of the file.
    dtype: of all tensors, a name in DTYPES.
    make: gives a tensor by its name, of that shape and dtype.
  """
  # What transformers looks for before it reads a file.
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  offset = 0
  for name, shape in shapes.items():
    end = offset + math.prod(shape) * DTYPES[dtype].itemsize
    header[name] = {
      'dtype': dtype,
      'shape': list(shape),
      'data_offsets': [offset, end],
    }
    offset = end
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)  # So that the tensors are aligned.
  with path.open('xb') as file:
    file.write(struct.pack('<Q', len(text)) + text)
    for name, shape in shapes.items():
      array = make(name)
      if array.shape != shape or array.dtype != DTYPES[dtype]:
        raise ValueError(
          f'{name} is {array.dtype}{array.shape}, announced as {dtype}{shape}'
        )
      file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


@contextlib.contextmanager
def opened(paths: Iterable[pathlib.Path]) -> Iterator[dict[pathlib.Path, int]]:
  """Opens files for reading; yields their descriptors, closes them at the end.

  Args:
    paths: one may be given many times.
  """
  with contextlib.ExitStack() as stack:
    yield {
      path: stack.enter_context(path.open('rb', buffering=0)).fileno()
      for path in dict.fromkeys(paths)
    }

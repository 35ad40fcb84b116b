"""The layout of a GGUF file: metadata by key, tensors by name.

The reader of the gguf package makes an array of every string in a vocabulary,
seconds in each process; this one reads the same in a fraction of one. Source:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Mapping
import dataclasses
import math
import struct
from typing import Any

import gguf
from gguf import quants
import numpy as np

_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
# Value types of the metadata that are plain numbers, by their code.
_NUMBERS = {
  0: '<u1',
  1: '<i1',
  2: '<u2',
  3: '<i2',
  4: '<u4',
  5: '<i4',
  6: '<f4',
  7: '?',
  10: '<u8',
  11: '<i8',
  12: '<f8',
}


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor as it lies in the file.

  Attributes:
    shape: slowest axis first, as numpy has it.
    kind: how it is quantized.
    data: u1[n], its bytes, mapped and not read.
  """

  shape: tuple[int, ...]
  kind: gguf.GGMLQuantizationType
  data: np.ndarray

  def dequantized(self) -> np.ndarray:
    """Returns the values, f32[shape]."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
    row_bytes = self.shape[-1] // block * block_bytes
    rows = self.data.reshape(*self.shape[:-1], row_bytes)
    return quants.dequantize(rows, self.kind).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class GGUFFile:
  """A parsed file.

  Attributes:
    path: where it is.
    metadata: values by key: numbers, texts, and lists of them.
    tensors: by name.
  """

  path: str
  metadata: Mapping[str, Any]
  tensors: Mapping[str, Tensor]

  def need(self, key: str) -> Any:
    """Returns the value of a key.

    Raises:
      ValueError: if it is not there.
    """
    if key not in self.metadata:
      raise ValueError(
        f'{self.path}: the metadata has no {key!r}; the file is not a complete '
        'Llama model.'
      )
    return self.metadata[key]


def read(path: str) -> GGUFFile:
  """Returns the parsed file, its tensors mapped into memory.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it is not GGUF, or cut short.
  """
  try:
    data = np.memmap(path, np.uint8, 'r')
  except FileNotFoundError as error:
    raise FileNotFoundError(
      f'{path}: no such model file; for SmolLM2 run `make smollm2`.'
    ) from error
  magic = bytes(data[:4])
  if magic != b'GGUF':
    raise ValueError(
      f'{path} is not a GGUF file (it begins with {magic!r}); give the path of '
      'one, or run `make smollm2`.'
    )
  try:
    return _parse(path, data)
  except (struct.error, IndexError) as error:
    raise ValueError(
      f'{path} is cut short ({data.size} bytes): fetch it again.'
    ) from error


def _parse(path: str, data: np.ndarray) -> GGUFFile:
  cursor = _Cursor(data)
  version = cursor.number('<u4')
  if version not in _VERSIONS:
    raise ValueError(
      f'{path}: GGUF version {version} is not supported; those that are: '
      f'{_VERSIONS}.'
    )
  num_tensors, num_values = cursor.number('<u8'), cursor.number('<u8')
  metadata = {}
  for _ in range(num_values):
    key = cursor.text()
    metadata[key] = cursor.value(cursor.number('<u4'))
  heads = []
  for _ in range(num_tensors):
    name = cursor.text()
    shape = [cursor.number('<u8') for _ in range(cursor.number('<u4'))]
    heads.append(
      (name, shape[::-1], cursor.number('<u4'), cursor.number('<u8'))
    )
  alignment = metadata.get('general.alignment', 32)
  start = -(-cursor.offset // alignment) * alignment
  tensors = {}
  for name, shape, code, offset in heads:
    kind = gguf.GGMLQuantizationType(code)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    size = math.prod(shape) // block * block_bytes
    first = start + offset
    if first + size > data.size:
      raise IndexError(name)
    tensors[name] = Tensor(tuple(shape), kind, data[first : first + size])
  return GGUFFile(path, metadata, tensors)


class _Cursor:
  """Reads values one after another, from after the magic on."""

  def __init__(self, data: np.ndarray):
    self._data = memoryview(data)
    self.offset = 4

  def _take(self, size: int) -> memoryview:
    if self.offset + size > len(self._data):
      raise IndexError(size)
    self.offset += size
    return self._data[self.offset - size : self.offset]

  def number(self, dtype: str) -> Any:
    """Returns one number as a Python value."""
    return self.numbers(dtype, 1)[0]

  def numbers(self, dtype: str, count: int) -> list[Any]:
    """Returns `count` numbers."""
    size = np.dtype(dtype).itemsize
    return np.frombuffer(self._take(count * size), dtype).tolist()

  def text(self) -> str:
    """Returns one string."""
    # struct, not numpy: a vocabulary has 100,000 of them.
    (size,) = struct.unpack('<Q', self._take(8))
    return str(self._take(size), 'utf-8')

  def value(self, code: int) -> Any:
    """Returns a value of the type with that code."""
    if code == _STRING:
      return self.text()
    if code == _ARRAY:
      code = self.number('<u4')
      count = self.number('<u8')
      if code in _NUMBERS:
        return self.numbers(_NUMBERS[code], count)
      return [self.value(code) for _ in range(count)]
    if code not in _NUMBERS:
      raise IndexError(f'value type {code}')
    return self.number(_NUMBERS[code])

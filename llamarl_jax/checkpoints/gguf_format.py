"""What lies in a GGUF file: metadata by key, tensors by name.

Read with the gguf package; the errors are those of this project.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import gguf
from gguf import quants
import numpy as np


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor as it lies in the file.

  Attributes:
    shape: slowest axis first, as numpy has it.
    kind: how it is quantized.
    data: as the gguf package maps it.
  """

  shape: tuple[int, ...]
  kind: gguf.GGMLQuantizationType
  data: np.ndarray

  def dequantized(self) -> np.ndarray:
    """Returns the values, f32[shape]."""
    return quants.dequantize(self.data, self.kind).reshape(self.shape)


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
    with open(path, 'rb') as file:
      magic = file.read(4)
  except FileNotFoundError as error:
    raise FileNotFoundError(
      f'{path}: no such model file; for SmolLM2 run `make smollm2`.'
    ) from error
  if magic != b'GGUF':
    raise ValueError(
      f'{path} is not a GGUF file (it begins with {magic!r}); give the path of '
      'one, or run `make smollm2`.'
    )
  try:
    reader = gguf.GGUFReader(path)
  except (ValueError, IndexError, OverflowError) as error:
    # What the reader says of a truncated file is about array shapes.
    raise ValueError(
      f'{path} is cut short or damaged ({error}): fetch it again.'
    ) from error
  metadata = {key: field.contents() for key, field in reader.fields.items()}
  tensors = {
    tensor.name: Tensor(
      tuple(int(size) for size in reversed(tensor.shape)),
      tensor.tensor_type,
      tensor.data,
    )
    for tensor in reader.tensors
  }
  return GGUFFile(path, metadata, tensors)

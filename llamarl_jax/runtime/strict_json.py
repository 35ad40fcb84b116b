"""JSON that every parser reads, written so that no reader sees half a file.

Python's encoder emits the bare words NaN and Infinity, which browsers and
most other parsers reject; here they become strings that `float` reads back.
"""

from collections.abc import Mapping
import json
import math
import os
import pathlib
import tempfile
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
  """Returns `value` as what JSON can hold.

  Args:
    value: nested mappings, sequences, scalars and arrays. Non-finite numbers
      become 'NaN', 'Infinity' and '-Infinity'; keys become text; anything
      unknown becomes its `str`.
  """
  if value is None or isinstance(value, bool):
    return value
  if isinstance(value, str):
    return str(value)  # An enumeration of texts becomes its text.
  if isinstance(value, Mapping):
    return {str(key): plain(item) for key, item in value.items()}
  if isinstance(value, (list, tuple, set, frozenset)):
    return [plain(item) for item in value]
  if isinstance(value, int):
    return int(value)
  if isinstance(value, float):
    if math.isfinite(value):
      return float(value)
    return 'NaN' if math.isnan(value) else f'{"-" * (value < 0)}Infinity'
  if isinstance(value, np.generic) or hasattr(value, '__array__'):
    array = np.asarray(value)
    # Types such as bfloat16 are not known to JSON, nor to Python's float.
    is_number = array.dtype.kind in 'biufUS'
    return plain((array if is_number else array.astype(np.float32)).tolist())
  return str(value)


def dumps(value: Any, *, indent: int | None = None) -> str:
  """Returns `value` as strict JSON, UTF-8 text unescaped."""
  return json.dumps(
    plain(value), allow_nan=False, ensure_ascii=False, indent=indent
  )


def encode(text: str) -> bytes:
  """Returns text as UTF-8; half of a surrogate pair, as JSON escapes it."""
  return text.encode('utf-8', errors='backslashreplace')


def number(value: Any) -> float | None:
  """Returns what `plain` wrote for a number as a float; None for others."""
  if isinstance(value, str):
    if value in ('NaN', 'Infinity', '-Infinity'):
      return float(value)
    return None
  if isinstance(value, (bool, int, float, np.number)):
    return float(value)
  return None


def write_text(path: str | os.PathLike[str], text: str) -> None:
  """Writes a whole file, or leaves the old one: never half of it.

  Args:
    path: of the file; its folder is made where it is missing.
    text: its new content, written as UTF-8.
  """
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  # In the same folder, since a rename is atomic only within a file system.
  descriptor, temporary = tempfile.mkstemp(
    dir=path.parent, prefix=f'.{path.name}.'
  )
  try:
    with os.fdopen(descriptor, 'wb') as file:
      file.write(encode(text))
      file.flush()
      os.fsync(file.fileno())
    # mkstemp makes files private; a result is for whoever may read the folder.
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
  finally:
    pathlib.Path(temporary).unlink(missing_ok=True)

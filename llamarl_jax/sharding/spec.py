"""The abstract description of one parameter, and of a tree of them.

One tree of `ParamSpec` serves initialization, sharding, restoring and
publication alike.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class ParamSpec:
  """What is known of a parameter before it exists; a leaf of a pytree.

  Attributes:
    shape: of the whole array, over all devices.
    dtype: of its elements.
    logical_axes: the name of each dimension, or None where it has none; a key
      of the tables in `rules`.
  """

  shape: tuple[int, ...]
  dtype: Any
  logical_axes: tuple[str | None, ...]

  def __post_init__(self) -> None:
    if len(self.shape) != len(self.logical_axes):
      raise ValueError(
        f'A parameter of shape {self.shape} needs {len(self.shape)} logical '
        f'axes, one a dimension, not {self.logical_axes}.'
      )

  @property
  def nbytes(self) -> int:
    """Bytes of the whole array."""
    return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def named_leaves(tree: Any) -> dict[str, Any]:
  """Returns the leaves of a pytree by path, such as 'layers/mlp/up'."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in leaves
  }

"""Device meshes, by axis name.

The axes of this project: 'data' replicates parameters, 'fsdp' shards
parameters and batch, 'sequence' parameters and the tokens of a row, 'tensor'
heads, hidden units and vocabulary.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import math

import jax
import numpy as np


def make_mesh(
  axes: Mapping[str, int], devices: Sequence[jax.Device]
) -> jax.sharding.Mesh:
  """Returns a mesh that lays `devices` out in row-major order.

  Args:
    axes: size of each named axis, such as {'data': 1, 'fsdp': 2, 'tensor': 1}.
    devices: as many devices as the product of the sizes.

  Raises:
    ValueError: a size is below 1, or the product is not the device count.
  """
  for name, size in axes.items():
    if size < 1:
      raise ValueError(f'Mesh axis {name!r} has size {size}; give at least 1.')
  product = math.prod(axes.values())
  if product != len(devices):
    sizes = ' x '.join(f'{name}={size}' for name, size in axes.items())
    raise ValueError(
      f'The mesh {sizes} needs {product} devices but {len(devices)} are given; '
      'change the axis sizes or the number of devices.'
    )
  # Devices are kept in the order given: `jax.make_mesh` may permute them,
  # and shard numbering would then depend on the platform.
  grid = np.array(devices, dtype=object).reshape(tuple(axes.values()))
  auto = (jax.sharding.AxisType.Auto,) * len(axes)
  return jax.sharding.Mesh(grid, tuple(axes), axis_types=auto)


def abstract_mesh(axes: Mapping[str, int]) -> jax.sharding.AbstractMesh:
  """Returns a mesh to plan with, of devices that are not there.

  Args:
    axes: size of each named axis.
  """
  auto = (jax.sharding.AxisType.Auto,) * len(axes)
  return jax.sharding.AbstractMesh(
    tuple(axes.values()), tuple(axes), axis_types=auto
  )

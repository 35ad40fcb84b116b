"""Arrays that rest in the memory of the host, near their devices.

What is read once a step, such as the moments of an optimizer, need not take
device memory in between. JAX names the memories of a device by kind
(https://docs.jax.dev/en/latest/notebooks/host-offloading.html); page-locked
host memory is what accelerators copy from and to at the full rate of the bus.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding

HOST = 'pinned_host'
DEVICE = 'device'


def on_host(sharding: NamedSharding) -> NamedSharding:
  """Returns the same layout in the memory of the host.

  Args:
    sharding: of an array; that of an abstract mesh is not checked.

  Raises:
    ValueError: the devices have no such memory.
  """
  mesh = sharding.mesh
  if isinstance(mesh, jax.sharding.Mesh):
    device = mesh.devices.flat[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if HOST not in kinds:
      raise ValueError(
        f'device {device} has the memories {kinds} and no {HOST!r}, where'
        ' trainer.offload_optimizer=True keeps optimizer state; set it to False'
      )
  return sharding.with_memory_kind(HOST)


def on_devices(tree: Any, shardings: Any) -> Any:
  """Returns a tree whose offloaded leaves are copied to their devices.

  To be called in a jitted function: the compiler copies a leaf when it is
  needed.

  Args:
    tree: of arrays.
    shardings: the sharding each of them has.
  """

  def fetch(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    if sharding.memory_kind != HOST:
      return x
    return jax.device_put(x, sharding.with_memory_kind(DEVICE))

  return jax.tree.map(fetch, tree, shardings)

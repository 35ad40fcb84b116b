"""The launchers by name."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

from llamarl_jax.controller import program
from llamarl_jax.controller.launchers import base


def _make_local(
  nodes: Sequence[program.Node], address: str, platform: str
) -> base.Launcher:
  del address
  from llamarl_jax.controller.launchers import local

  return local.LocalLauncher(nodes, platform)


def _make_ray(
  nodes: Sequence[program.Node], address: str, platform: str
) -> base.Launcher:
  del nodes
  # Ray takes a second to import, which the local launcher need not wait for.
  from llamarl_jax.controller.launchers import ray_processes

  return ray_processes.RayLauncher(address=address, platform=platform)


LAUNCHERS: Mapping[
  str, Callable[[Sequence[program.Node], str, str], base.Launcher]
] = {'local': _make_local, 'ray': _make_ray}


def make_launcher(
  name: str, nodes: Sequence[program.Node], *, address: str, platform: str
) -> base.Launcher:
  """Returns the launcher of that name.

  Args:
    name: a key of LAUNCHERS.
    nodes: what it will start.
    address: of a Ray cluster, or 'local'.
    platform: 'cpu', 'gpu' or 'tpu'.

  Raises:
    ValueError: devices or cluster are not there.
  """
  return LAUNCHERS[name](nodes, address, platform)

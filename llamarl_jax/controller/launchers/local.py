"""All executors as plain objects of this process, run in a fixed order.

Deterministic and debuggable: the notebook path, the synchronous baseline, and
the oracle the distributed launcher is tested against.
"""

from collections.abc import Sequence
from typing import Any

import jax

from llamarl_jax import types
from llamarl_jax.controller import program
from llamarl_jax.controller.launchers import base


class _Done:
  """A future that was done when it was made."""

  def __init__(self, answer: Any):
    self._answer = answer

  def result(self) -> Any:
    """Returns the answer."""
    return self._answer


class LocalHandle:
  """Runs each command at once, in this thread."""

  def __init__(self, name: str, executor: types.Executor):
    self.name = name
    self.executor = executor

  def call(self, method: str, *args: Any) -> _Done:
    """Runs the command; an exception goes straight to the caller."""
    return _Done(getattr(self.executor, method)(*args))


class LocalLauncher:
  """Places executors on disjoint devices while they last, else on shared."""

  def __init__(self, nodes: Sequence[program.Node]):
    available = jax.devices()
    wanted = sum(node.num_devices for node in nodes)
    self._devices: dict[str, list[jax.Device]] = {}
    start = 0
    for node in nodes:
      if node.num_devices > len(available):
        raise ValueError(
          f'{node.name} asks for {node.num_devices} devices; this process has'
          f' {len(available)}. Ask for fewer, or start Python with XLA_FLAGS='
          f'--xla_force_host_platform_device_count={node.num_devices}'
        )
      self._devices[node.name] = available[start : start + node.num_devices]
      if wanted <= len(available):
        start += node.num_devices
    self._handles: list[LocalHandle] = []

  def start(self, node: program.Node) -> LocalHandle:
    """Builds the executor in this process."""
    executor = node.factory(devices=self._devices[node.name], **node.arguments)
    handle = LocalHandle(node.name, executor)
    self._handles.append(handle)
    return handle

  def wait(
    self, futures: Sequence[base.Future], timeout: float
  ) -> list[base.Future]:
    """Returns all of them: every command ran when it was sent."""
    del timeout
    return list(futures)

  def close(self) -> None:
    """Closes the executors."""
    for handle in self._handles:
      handle.executor.close()
    self._handles = []

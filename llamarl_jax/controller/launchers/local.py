"""All executors as plain objects of this process, run in a fixed order.

Deterministic and debuggable: the notebook path, the synchronous baseline, and
the oracle the distributed launcher is tested against.
"""

from collections.abc import Sequence
import logging
import os
from typing import Any

import jax

from llamarl_jax import types
from llamarl_jax.controller import program
from llamarl_jax.controller.launchers import base

_LOGGER = logging.getLogger(__name__)
_DEVICE_FLAG = '--xla_force_host_platform_device_count'


class _Done:
  """A future that was done when it was made."""

  def __init__(self, answer: Any):
    self._answer = answer

  def result(self) -> Any:
    """Returns the answer."""
    return self._answer


class LocalHandle:
  """Runs each command at once, in this thread."""

  def __init__(self, name: str, executor: types.Executor, num_devices: int):
    self.name = name
    self.executor = executor
    self._num_devices = num_devices

  def call(self, method: str, *args: Any) -> _Done:
    """Runs the command; an exception goes straight to the caller."""
    return _Done(getattr(self.executor, method)(*args))

  def describe(self) -> _Done:
    """Returns the id of this process and the devices it may use."""
    return _Done({'pid': os.getpid(), 'num_devices': self._num_devices})


class LocalLauncher:
  """Places executors on disjoint devices while they last, else on shared."""

  def __init__(self, nodes: Sequence[program.Node], platform: str):
    """Takes the devices of this process.

    Args:
      nodes: what will be started.
      platform: 'cpu' simulates as many devices as the nodes ask for, unless
        JAX was used in this process before.

    Raises:
      ValueError: a node asks for more devices than there are.
    """
    wanted = sum(node.num_devices for node in nodes)
    if platform == 'cpu':
      simulate_devices(wanted)
    available = jax.devices()
    self._devices: dict[str, list[jax.Device]] = {}
    start = 0
    for node in nodes:
      if node.num_devices > len(available):
        raise ValueError(
          f'{node.name} asks for {node.num_devices} devices; this process has'
          f' {len(available)}. Ask for fewer, or start Python with XLA_FLAGS='
          f'{_DEVICE_FLAG}={node.num_devices}'
        )
      self._devices[node.name] = available[start : start + node.num_devices]
      if wanted <= len(available):
        start += node.num_devices
    self._handles: list[LocalHandle] = []

  def start(self, node: program.Node) -> LocalHandle:
    """Builds the executor in this process."""
    executor = node.factory(devices=self._devices[node.name], **node.arguments)
    handle = LocalHandle(node.name, executor, node.num_devices)
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


def simulate_devices(count: int) -> None:
  """Gives this process CPU devices, where it has not used JAX yet."""
  if _DEVICE_FLAG in os.environ.get('XLA_FLAGS', ''):
    return  # Whoever set it knows how many there should be.
  try:
    jax.config.update('jax_num_cpu_devices', count)
    jax.config.update('jax_platforms', 'cpu')
  except RuntimeError:
    # Backends exist already, as in a notebook: take the devices there are.
    _LOGGER.info('JAX is running; its devices are used as they are')

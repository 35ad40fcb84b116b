"""Executors as separate JAX processes, started and supervised by Ray.

Ray carries commands, prompts, completions and rewards; parameters never pass
through it. Each process is told its devices by its environment, before JAX is
imported there.
"""

from collections.abc import Sequence
import os
import pickle
import threading
from typing import Any

import ray
import ray.exceptions

from llamarl_jax.controller import program
from llamarl_jax.controller.launchers import base
from llamarl_jax.runtime import host_memory

_DEVICE_FLAG = '--xla_force_host_platform_device_count'


class _Process:
  """Lives in the executor's process; commands reach the executor by name."""

  def __init__(self, node: program.Node):
    # Imported here: only executor processes may initialize a JAX backend.
    import jax

    devices = jax.devices()[: node.num_devices] if node.num_devices else []
    if len(devices) < node.num_devices:
      raise ValueError(
        f'{node.name} asks for {node.num_devices} devices; its process sees'
        f' {len(devices)}'
      )
    if devices and devices[0].platform == 'cpu':
      host_memory.keep_freed_memory()
    self._executor = node.factory(devices=devices, **node.arguments)
    self._num_devices = len(devices)
    self._closed = threading.Event()

  # In a thread of its own, so that it can wait while commands run.
  @ray.method(concurrency_group='watch')
  def watch(self) -> None:
    """Returns when the executor is closed: it fails if the process dies."""
    self._closed.wait()

  def call(self, method: str, packed: bytes) -> bytes:
    """Runs one command; arguments and answer are pickled."""
    args = pickle.loads(packed)
    return pickle.dumps(getattr(self._executor, method)(*args))

  def describe(self) -> dict[str, int]:
    """Returns process id and device count."""
    return {'pid': os.getpid(), 'num_devices': self._num_devices}

  def close(self) -> None:
    """Closes the executor."""
    self._executor.close()
    self._closed.set()


class _RayFuture:
  """The answer of a command sent to another process."""

  def __init__(self, name: str, reference: ray.ObjectRef):
    self.name = name
    self.reference = reference

  def result(self) -> Any:
    """Returns the answer, or raises ExecutorError with the traceback."""
    try:
      answer = ray.get(self.reference)
    except ray.exceptions.RayTaskError as error:
      # str() of the error is the traceback of the remote process.
      raise base.ExecutorError(self.name, str(error)) from error
    except ray.exceptions.RayActorError as error:
      raise base.ExecutorError(
        self.name, f'its process died: {error}'
      ) from error
    return pickle.loads(answer) if isinstance(answer, bytes) else answer


class RayHandle:
  """A started executor process."""

  def __init__(self, name: str, actor: Any):
    self.name = name
    self.actor = actor
    self.watched = _RayFuture(name, actor.watch.remote())

  def call(self, method: str, *args: Any) -> _RayFuture:
    """Sends the command."""
    # One block of bytes: Ray would store each small array of a batch apart,
    # which takes it longer than a train step of a small model.
    packed = pickle.dumps(args)
    return _RayFuture(self.name, self.actor.call.remote(method, packed))

  def describe(self) -> _RayFuture:
    """Asks for process id and device count."""
    return _RayFuture(self.name, self.actor.describe.remote())


class RayLauncher:
  """Starts one actor a node, on an embedded Ray or an existing cluster."""

  def __init__(self, *, address: str, platform: str):
    """Connects to Ray.

    Args:
      address: 'local' starts Ray inside this program; else the address of a
        running cluster, such as '10.0.0.1:6379' or 'auto'.
      platform: 'cpu', 'gpu' or 'tpu'.

    Raises:
      ValueError: no cluster answers at `address`.
    """
    self._platform = platform
    self._handles: list[RayHandle] = []
    # Ray warns of a default that will change; the new one is what we want.
    os.environ.setdefault('RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO', '0')
    options: dict[str, Any] = {'log_to_driver': False, 'logging_level': 'error'}
    if address == 'local':
      # Executors claim no CPUs: they share the cores of the machine.
      options.update(num_cpus=1, include_dashboard=False)
    try:
      ray.init(address=address, **options)
    except (ConnectionError, ray.exceptions.RaySystemError) as error:
      raise ValueError(
        f'no Ray cluster answers at {address!r} ({error}); start one with'
        " `ray start --head`, or use launcher.address='local'"
      ) from error

  def start(self, node: program.Node) -> RayHandle:
    """Starts the process; failures of its factory show in the first wait."""
    environment = {'RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO': '0'}
    num_gpus = 0
    if self._platform == 'cpu' or not node.num_devices:
      count = max(node.num_devices, 1)
      environment['JAX_PLATFORMS'] = 'cpu'
      # Programs are to be compiled as in this process, for as many devices as
      # the executor has.
      flags = [
        flag
        for flag in os.environ.get('XLA_FLAGS', '').split()
        if not flag.startswith(_DEVICE_FLAG)
      ]
      environment['XLA_FLAGS'] = ' '.join([*flags, f'{_DEVICE_FLAG}={count}'])
    elif self._platform == 'gpu':
      num_gpus = node.num_devices
    # Typed for fewer options than it takes.
    remote: Any = ray.remote
    actor_class = remote(concurrency_groups={'watch': 1})(_Process)
    actor = actor_class.options(
      num_cpus=0,
      num_gpus=num_gpus,
      runtime_env={'env_vars': environment},
    ).remote(node)
    handle = RayHandle(node.name, actor)
    self._handles.append(handle)
    return handle

  def wait(
    self, futures: Sequence[base.Future], timeout: float
  ) -> list[base.Future]:
    """See base.Launcher."""
    ours = [future for future in futures if isinstance(future, _RayFuture)]
    by_reference = {future.reference: future for future in ours}
    watched = {handle.watched.reference: handle for handle in self._handles}
    ready, _ = ray.wait(
      [*by_reference, *watched], num_returns=1, timeout=timeout
    )
    for reference in ready:
      if reference in watched:
        watched[reference].watched.result()
    if not ready:
      names = sorted({future.name for future in ours})
      raise base.ExecutorError(
        ', '.join(names), f'no answer within {timeout:.0f} s'
      )
    # All that are done by now, in the order sent.
    done, _ = ray.wait(
      list(by_reference), num_returns=len(by_reference), timeout=0
    )
    finished = set(done)
    return [future for future in ours if future.reference in finished]

  def close(self) -> None:
    """Closes the executors, kills their processes and leaves Ray."""
    closing = [handle.actor.close.remote() for handle in self._handles]
    if closing:
      ray.wait(closing, num_returns=len(closing), timeout=5)
    for handle in self._handles:
      ray.kill(handle.actor)
    self._handles = []
    ray.shutdown()

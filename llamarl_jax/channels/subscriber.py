"""The subscriber to weights that every transport shares.

It keeps the order of versions, the deadline and the retries, and verifies; a
transport's `Receiver` moves the bytes. All of that happens in a thread, so that
decoding goes on, unless the transport needs the processes in step.
"""

from collections.abc import Collection
from collections.abc import Mapping
from concurrent import futures
import dataclasses
import logging
import time
from typing import Any
from typing import Protocol

import jax
import numpy as np

from llamarl_jax import types
from llamarl_jax.channels import watch as watch_lib
from llamarl_jax.channels import weights
from llamarl_jax.sharding import digest
from llamarl_jax.sharding import reshard
from llamarl_jax.sharding import spec

_LOGGER = logging.getLogger(__name__)
# More than one: a fetch that was given up must not hold up the next.
_NUM_THREADS = 4


class SupersededError(weights.WeightTransferError):
  """The publisher has gone on to another version: trying again is vain."""


@dataclasses.dataclass
class Cost:
  """What a fetch costs beside its parameters; a receiver writes it."""

  staging_bytes: int = 0


class Receiver(Protocol):
  """What a transport does at the subscriber."""

  # Whether `fetch` may run in a thread beside the work of its process.
  background: bool

  def fetch(
    self,
    manifest: weights.Manifest,
    leaves: Collection[str],
    watch: watch_lib.Watch,
    cost: Cost,
  ) -> dict[str, jax.Array]:
    """Returns arrays by leaf path, in the subscriber's shardings.

    Args:
      manifest: what is offered, found acceptable.
      leaves: paths of those to fetch.
      watch: to be asked in every wait.
      cost: to be told of memory held.

    Raises:
      WeightTransferError: they did not arrive.
    """

  def close(self) -> None:
    """Releases what the receiver holds."""


@dataclasses.dataclass(frozen=True)
class _Fetched:
  leaves: dict[str, jax.Array]
  report: weights.TransferReport


@dataclasses.dataclass(frozen=True)
class _Pending:
  manifest: weights.Manifest
  started: float
  watch: watch_lib.Watch
  future: futures.Future[_Fetched]


class VerifyingSubscriber:
  """Fetches versions in order, and lets out only what the manifest promised."""

  def __init__(
    self,
    name: str,
    transport: str,
    receiver: Receiver,
    specs: Any,
    shardings: Any,
    *,
    settings: weights.TransportSettings,
  ) -> None:
    """Subscribes through `receiver`.

    Args:
      name: of the subscriber, for people.
      transport: name of the transport that manifests must be of.
      receiver: moves the bytes.
      specs: tree of `ParamSpec`, the parameters expected.
      shardings: tree of shardings they must arrive in.
      settings: deadline and retries.
    """
    self._name = name
    self._transport = transport
    self._receiver = receiver
    self._treedef = jax.tree.structure(specs)
    self._specs: dict[str, spec.ParamSpec] = spec.named_leaves(specs)
    self._destination = destination_of(name, specs, shardings)
    self._settings = settings
    # Where several processes share the arrays, digests are a computation that
    # all of them must enter together, in the order of their commands.
    self._background = receiver.background and all(
      sharding.is_fully_addressable for sharding in jax.tree.leaves(shardings)
    )
    self._pending: _Pending | None = None
    self._pool = futures.ThreadPoolExecutor(_NUM_THREADS, f'fetch-{name}')
    self._taken: types.Version | None = None
    self._report: weights.TransferReport | None = None

  @property
  def report(self) -> weights.TransferReport | None:
    """What the last `take` cost; None before the first."""
    return self._report

  def request(self) -> weights.Destination:
    """Returns where this subscriber needs its parameters."""
    return self._destination

  def begin(self, manifest: weights.Manifest) -> None:
    """Starts a fetch; see `weights.WeightSubscriber`."""
    if self._pending is not None:
      raise RuntimeError(
        f'{self._name}: {self._pending.manifest.version} is still under way; '
        f'take or abort it before {manifest.version}.'
      )
    self._check(manifest)
    started = time.monotonic()
    watch = watch_lib.Watch(self._settings.deadline_seconds)
    future = self._pool.submit(self._fetch, manifest, watch, started)
    if not self._background:
      futures.wait([future])
    self._pending = _Pending(manifest, started, watch, future)

  def ready(self, now: float | None = None) -> bool:
    """Returns whether `take` will not wait; see `weights.WeightSubscriber`."""
    pending = self._under_way()
    if pending.future.done():
      return True
    now = time.monotonic() if now is None else now
    waited = now - pending.started
    if waited > self._settings.deadline_seconds:
      self.abort()
      raise weights.WeightTransferError(
        f'{self._name}: {pending.manifest.version} did not arrive within '
        f'{self._settings.deadline_seconds:g} s (waited {waited:.1f} s); given'
        ' up.'
      )
    return False

  def take(self) -> types.VersionedParams:
    """Returns the verified parameters; see `weights.WeightSubscriber`."""
    pending = self._under_way()
    if not pending.future.done():
      raise RuntimeError(
        f'{self._name}: {pending.manifest.version} is not ready; poll first.'
      )
    # Whatever comes of it, this fetch is over, and another may begin.
    self._pending = None
    fetched = pending.future.result()
    self._taken = pending.manifest.version
    self._report = fetched.report
    ordered = [fetched.leaves[path] for path in self._specs]
    return types.VersionedParams(
      self._taken, jax.tree.unflatten(self._treedef, ordered)
    )

  def abort(self) -> None:
    """Gives up the fetch under way, if there is one."""
    if self._pending is not None:
      self._pending.watch.cancel()
      self._pending = None

  def close(self) -> None:
    """Gives up what is under way; may be called twice."""
    self.abort()
    self._pool.shutdown(wait=False, cancel_futures=True)
    self._receiver.close()

  def _under_way(self) -> _Pending:
    """Returns the fetch under way."""
    if self._pending is None:
      raise RuntimeError(f'{self._name}: no fetch is under way; begin one.')
    return self._pending

  def _check(self, manifest: weights.Manifest) -> None:
    """Raises WeightTransferError where the manifest is not acceptable."""
    if manifest.transport != self._transport:
      raise weights.WeightTransferError(
        f'{self._name} receives by {self._transport!r}; {manifest.version} is '
        f'offered by {manifest.transport!r}.'
      )
    if self._taken is not None and manifest.version <= self._taken:
      raise weights.WeightTransferError(
        f'{self._name}: {manifest.version} is not newer than {self._taken}, '
        'taken last.'
      )
    expected = {
      path: (tuple(leaf.shape), np.dtype(leaf.dtype).name)
      for path, leaf in self._specs.items()
    }
    offered = {
      leaf.path: (tuple(leaf.shape), leaf.dtype) for leaf in manifest.leaves
    }
    for path in sorted(expected.keys() | offered.keys()):
      if expected.get(path) != offered.get(path):
        raise weights.WeightTransferError(
          f'{self._name}: leaf {path} of {manifest.version} is offered as '
          f'{offered.get(path)} but expected as {expected.get(path)}.'
        )

  def _fetch(
    self, manifest: weights.Manifest, watch: watch_lib.Watch, started: float
  ) -> _Fetched:
    """Returns verified leaves, trying again for those that failed."""
    cost = Cost()
    verified: dict[str, jax.Array] = {}
    attempt = 0
    while True:
      attempt += 1
      missing = [path for path in self._specs if path not in verified]
      try:
        leaves = self._receiver.fetch(manifest, missing, watch, cost)
        faults = self._faults(manifest, leaves)
        verified |= {p: leaf for p, leaf in leaves.items() if p not in faults}
        if faults:
          raise weights.WeightTransferError('; '.join(faults.values()))
      except weights.WeightTransferError as error:
        final = isinstance(error, SupersededError) or not self._background
        if final or attempt >= self._settings.max_attempts or watch.over:
          raise weights.WeightTransferError(
            f'{self._name}: {manifest.version}: {error} (attempt {attempt};'
            ' given up)'
          ) from error
        pause = self._settings.backoff_seconds * 2 ** (attempt - 1)
        _LOGGER.warning(
          '%s: %s: %s; trying again in %.1f s',
          self._name,
          manifest.version,
          error,
          pause,
        )
        watch.sleep(pause)
      else:
        itemsizes = {
          path: np.dtype(leaf.dtype).itemsize
          for path, leaf in self._specs.items()
        }
        return _Fetched(
          verified,
          weights.TransferReport(
            bytes=reshard.destination_bytes(
              self._destination.leaves, itemsizes
            ),
            seconds=time.monotonic() - started,
            version=manifest.version,
            staging_bytes=cost.staging_bytes,
            attempts=attempt,
          ),
        )

  def _faults(
    self, manifest: weights.Manifest, leaves: Mapping[str, jax.Array]
  ) -> dict[str, str]:
    """Returns by leaf path what is not as promised."""
    faults = {}
    digests = digest.tree_digests(dict(leaves))
    for leaf in manifest.leaves:
      if leaf.path not in leaves:
        continue
      array = leaves[leaf.path]
      arrived = (tuple(array.shape), str(array.dtype), digests[leaf.path])
      promised = (tuple(leaf.shape), leaf.dtype, leaf.digest)
      if arrived != promised:
        faults[leaf.path] = (
          f'leaf {leaf.path} arrived as shape {arrived[0]}, {arrived[1]}, '
          f'digest {arrived[2]:016x}; promised were {promised[0]}, '
          f'{promised[1]}, {promised[2]:016x}'
        )
    return faults


def destination_of(
  name: str, specs: Any, shardings: Any
) -> weights.Destination:
  """Returns the picklable description of where parameters are needed.

  Args:
    name: of the subscriber, for people.
    specs: tree of `ParamSpec`.
    shardings: tree of shardings, of the same structure.
  """
  by_path = spec.named_leaves(shardings)
  leaves = {
    path: reshard.shard_map_of(by_path[path], tuple(leaf.shape))
    for path, leaf in spec.named_leaves(specs).items()
  }
  devices = reshard.devices_of(next(iter(by_path.values()))) if by_path else ()
  return weights.Destination(
    name=name,
    leaves=leaves,
    device_ids=tuple(device.id for device in devices),
    world=weights.world_name(),
  )

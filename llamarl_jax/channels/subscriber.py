"""The subscriber to weights that every transport shares.

It keeps the order of versions and the deadline, and verifies; a transport's
`Receiver` moves the bytes.
"""

from collections.abc import Mapping
import dataclasses
import time
from typing import Any
from typing import Protocol

import jax
import numpy as np

from llamarl_jax import types
from llamarl_jax.channels import weights
from llamarl_jax.sharding import digest
from llamarl_jax.sharding import reshard
from llamarl_jax.sharding import spec


class Fetch(Protocol):
  """Parameters on their way."""

  def is_ready(self) -> bool:
    """Returns whether `result` will not wait; never waits itself."""

  def result(self) -> dict[str, jax.Array]:
    """Returns the arrays by leaf path, in the subscriber's shardings.

    Raises:
      WeightTransferError: they did not arrive.
    """


class Receiver(Protocol):
  """What a transport does at the subscriber."""

  def start(self, manifest: weights.Manifest) -> Fetch:
    """Starts to fetch what the manifest offers; returns at once.

    Raises:
      WeightTransferError: it cannot be started.
    """

  def close(self) -> None:
    """Releases what the receiver holds."""


@dataclasses.dataclass(frozen=True)
class _Pending:
  manifest: weights.Manifest
  fetch: Fetch
  started: float


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
    deadline_seconds: float,
  ) -> None:
    """Subscribes through `receiver`.

    Args:
      name: of the subscriber, for people.
      transport: name of the transport that manifests must be of.
      receiver: moves the bytes.
      specs: tree of `ParamSpec`, the parameters expected.
      shardings: tree of shardings they must arrive in.
      deadline_seconds: a fetch not ready by then is given up.
    """
    self._name = name
    self._transport = transport
    self._receiver = receiver
    self._treedef = jax.tree.structure(specs)
    self._specs: dict[str, spec.ParamSpec] = spec.named_leaves(specs)
    self._destination = destination_of(name, specs, shardings)
    self._deadline_seconds = deadline_seconds
    self._pending: _Pending | None = None
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
    fetch = self._receiver.start(manifest)
    self._pending = _Pending(manifest, fetch, started)

  def ready(self, now: float | None = None) -> bool:
    """Returns whether `take` will not wait; see `weights.WeightSubscriber`."""
    pending = self._under_way()
    if pending.fetch.is_ready():
      return True
    now = time.monotonic() if now is None else now
    waited = now - pending.started
    if waited > self._deadline_seconds:
      self._pending = None
      raise weights.WeightTransferError(
        f'{self._name}: {pending.manifest.version} did not arrive within '
        f'{self._deadline_seconds:g} s (waited {waited:.1f} s); given up.'
      )
    return False

  def take(self) -> types.VersionedParams:
    """Returns the verified parameters; see `weights.WeightSubscriber`."""
    pending = self._under_way()
    if not pending.fetch.is_ready():
      raise RuntimeError(
        f'{self._name}: {pending.manifest.version} is not ready; poll first.'
      )
    # Whatever comes of it, this fetch is over, and another may begin.
    self._pending = None
    leaves = pending.fetch.result()
    self._verify(pending.manifest, leaves)
    version = pending.manifest.version
    self._taken = version
    itemsizes = {
      path: np.dtype(leaf.dtype).itemsize for path, leaf in self._specs.items()
    }
    self._report = weights.TransferReport(
      bytes=reshard.destination_bytes(self._destination.leaves, itemsizes),
      seconds=time.monotonic() - pending.started,
      version=version,
    )
    ordered = [leaves[path] for path in self._specs]
    return types.VersionedParams(
      version, jax.tree.unflatten(self._treedef, ordered)
    )

  def abort(self) -> None:
    """Gives up the fetch under way, if there is one."""
    self._pending = None

  def close(self) -> None:
    """Gives up what is under way; may be called twice."""
    self.abort()
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

  def _verify(
    self, manifest: weights.Manifest, leaves: Mapping[str, jax.Array]
  ) -> None:
    """Raises WeightTransferError where a leaf is not what was promised."""
    digests = digest.tree_digests(dict(leaves))
    for leaf in manifest.leaves:
      array = leaves[leaf.path]
      arrived = (tuple(array.shape), str(array.dtype), digests[leaf.path])
      promised = (tuple(leaf.shape), leaf.dtype, leaf.digest)
      if arrived != promised:
        raise weights.WeightTransferError(
          f'{self._name}: leaf {leaf.path} of {manifest.version} arrived as '
          f'shape {arrived[0]}, {arrived[1]}, digest {arrived[2]:016x}; '
          f'promised were {promised[0]}, {promised[1]}, {promised[2]:016x}.'
        )


def has_arrived(array: Any) -> bool:
  """Returns whether a `jax.Array` is there, or has failed; never waits."""
  return array.is_ready()


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
  return weights.Destination(name=name, leaves=leaves)

"""The channel that weights travel on: its protocol and what is agreed by it.

  subscriber.request() -> Destination       once, at the start
  publisher.publish(params)                 pins a copy, takes digests
  publisher.offer(Destination) -> Manifest  on request only
  subscriber.begin(Manifest)                bytes move while work goes on
  publisher.serve(Destination)              only where both ends must move them
  subscriber.ready() -> bool                polled, with a deadline
  subscriber.take() -> VersionedParams      assembled and verified

This is the weight update of LlamaRL (Wu et al., 2025). All but the parameters
is small and picklable: it travels through the controller, which touches no
device. `registry.TRANSPORTS` names the ways in which the bytes move.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import os
import socket
from typing import Any
from typing import Protocol

import jax

from llamarl_jax import types
from llamarl_jax.sharding import reshard


class WeightTransferError(Exception):
  """A publication did not arrive; the old version goes on being served."""


@dataclasses.dataclass(frozen=True)
class Destination:
  """What a publisher needs to know of a subscriber.

  Attributes:
    name: of the subscriber, for people.
    leaves: by leaf path, which device needs what.
    device_ids: of its devices, by ordinal.
    world: name of the JAX world in which those ids have a meaning.
  """

  name: str
  leaves: Mapping[str, reshard.ShardMap]
  device_ids: tuple[int, ...] = ()
  world: str = ''

  @property
  def num_devices(self) -> int:
    """Devices of the subscriber."""
    return max((len(leaf.boxes) for leaf in self.leaves.values()), default=0)


@dataclasses.dataclass(frozen=True)
class LeafManifest:
  """What must arrive of one leaf.

  Attributes:
    path: of the leaf, such as 'layers/mlp/up'.
    shape: of the whole array.
    dtype: name of the element type, such as 'float32'.
    digest: 64 bits, see `sharding.digest`.
  """

  path: str
  shape: tuple[int, ...]
  dtype: str
  digest: int


@dataclasses.dataclass(frozen=True)
class Manifest:
  """What a publisher offers to one subscriber.

  Attributes:
    version: of the parameters offered.
    leaves: what must arrive, in the order of the tree.
    transport: name of the transport that made the offer.
    offer: how to fetch it, as that transport reads it.
  """

  version: types.Version
  leaves: tuple[LeafManifest, ...]
  transport: str
  offer: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class TransferReport:
  """What a publication or a fetch cost.

  Attributes:
    bytes: pinned by a publisher, or moved to a subscriber's devices.
    seconds: from the call to the verified end.
    version: of the parameters.
    staging_bytes: most that a fetch held beside the parameters themselves, the
      staging memory of a library not counted.
    attempts: tries that a fetch took.
  """

  bytes: int
  seconds: float
  version: types.Version
  staging_bytes: int = 0
  attempts: int = 1


@dataclasses.dataclass(frozen=True)
class TransportSettings:
  """Settings of all transports; each reads those that concern it.

  Attributes:
    deadline_seconds: a fetch not ready by then is given up, and so is a
      subscriber that a publisher has not heard of for so long.
    max_attempts: tries of one fetch within the deadline.
    backoff_seconds: pause before the second try; doubles with each.
    directory: where the filesystem transport keeps versions.
    host: address that the servers of the transfer transport bind to.
    num_addresses: sockets of one server; two or more nearly double its rate.
    num_parallel_copies: copies of a server under way at once.
    copy_bytes: size of one. The library keeps num_parallel_copies of them as
      staging memory in each process, whatever the size of the model.
    chunk_bytes: most that a subscriber asks for at a time.
    window_bytes: of the chunks that a subscriber has asked for and not yet
      put in their place: what it holds beside the parameters.
  """

  deadline_seconds: float = 120.0
  max_attempts: int = 3
  backoff_seconds: float = 0.2
  directory: str = ''
  host: str = '127.0.0.1'
  num_addresses: int = 2
  num_parallel_copies: int = 4
  copy_bytes: int = 32 * 1024 * 1024
  chunk_bytes: int = 32 * 1024 * 1024
  window_bytes: int = 128 * 1024 * 1024


def world_name() -> str:
  """Returns what tells this JAX world from others: its process, if it is one.

  Distributed worlds all have the same name: a run has one of them at most.
  """
  if jax.process_count() > 1:
    return 'distributed'
  return f'{socket.gethostname()}:{os.getpid()}'


class WeightPublisher(Protocol):
  """The trainer's end."""

  def publish(self, versioned: types.VersionedParams) -> TransferReport:
    """Pins a private copy of the parameters and frees the previous one.

    The caller may donate its own buffers as soon as this returns.

    Raises:
      ValueError: the version is not newer than the one pinned.
    """

  def offer(self, destination: Destination) -> Manifest:
    """Makes the pinned version available to one subscriber.

    Called in every process of the publisher, see `merge_offers`.

    Raises:
      WeightTransferError: nothing is published, or leaves or shapes differ.
    """

  def serve(self, destination: Destination) -> None:
    """Does this end's part of a fetch, where the transport asks for it.

    Commanded together with `begin` at the subscriber, after `offer`. Returns at
    once where subscribers fetch on their own.

    Raises:
      WeightTransferError: nothing is published.
    """

  def close(self) -> None:
    """Frees what is pinned; may be called twice."""


class WeightSubscriber(Protocol):
  """The generator's end. A fetch that failed leaves it able to begin again."""

  @property
  def report(self) -> TransferReport | None:
    """What the last `take` cost; None before the first."""

  def request(self) -> Destination:
    """Returns where this subscriber needs its parameters."""

  def begin(self, manifest: Manifest) -> None:
    """Starts a fetch and returns at once.

    Raises:
      WeightTransferError: the version is not newer than the last one taken,
        or the manifest does not fit the parameters expected here.
      RuntimeError: another fetch is under way; take or abort it first.
    """

  def ready(self, now: float | None = None) -> bool:
    """Returns whether `take` will not wait.

    Args:
      now: seconds of `time.monotonic`; read from that clock if None.

    Raises:
      WeightTransferError: the deadline has passed; the fetch is given up.
      RuntimeError: no fetch is under way.
    """

  def take(self) -> types.VersionedParams:
    """Returns the parameters fetched, each leaf equal to the manifest.

    Raises:
      WeightTransferError: bytes were lost or differ; the fetch is given up.
      RuntimeError: no fetch is under way, or it is not ready.
    """

  def abort(self) -> None:
    """Gives up the fetch under way, if there is one."""

  def close(self) -> None:
    """Gives up what is under way; may be called twice."""


def merge_offers(manifests: Sequence[Manifest]) -> Manifest:
  """Returns one manifest of those that the processes of a publisher made.

  Args:
    manifests: of the same version, at least one.

  Raises:
    WeightTransferError: they disagree on what is published.
  """
  first = manifests[0]
  offer: dict[str, Any] = dict(first.offer)
  for other in manifests[1:]:
    if (other.version, other.leaves) != (first.version, first.leaves):
      raise WeightTransferError(
        f'The processes of the publisher disagree: one offers {first.version},'
        f' one {other.version}, with different digests or versions.'
      )
    for key, value in other.offer.items():
      held = offer.get(key)
      if isinstance(held, Mapping) and isinstance(value, Mapping):
        offer[key] = {**held, **value}
  return dataclasses.replace(first, offer=offer)

"""The channel that weights travel on: its protocol and what is agreed by it.

  subscriber.request() -> Destination       once, at the start
  publisher.publish(params)                 pins a copy, takes digests
  publisher.offer(Destination) -> Manifest  on request only
  subscriber.begin(Manifest)                bytes move while work goes on
  subscriber.ready() -> bool                polled, with a deadline
  subscriber.take() -> VersionedParams      assembled and verified

This is the weight update of LlamaRL (Wu et al., 2025). All but the parameters
is small and picklable: it travels through the controller, which touches no
device. `registry.TRANSPORTS` names the ways in which the bytes move.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any
from typing import Protocol

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
  """

  name: str
  leaves: Mapping[str, reshard.ShardMap]

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
  """

  bytes: int
  seconds: float
  version: types.Version


@dataclasses.dataclass(frozen=True)
class TransportSettings:
  """Settings of all transports; each reads those that concern it.

  Attributes:
    deadline_seconds: a fetch not ready by then is given up.
    directory: where the filesystem transport keeps versions.
    host: address that the servers of the transfer transport bind to.
    num_addresses: sockets of one server; two or more nearly double its rate.
    num_parallel_copies: chunks of a server under way at once.
    chunk_bytes: size of a chunk. A server keeps num_parallel_copies chunks of
      memory, whatever the size of the model.
  """

  deadline_seconds: float = 120.0
  directory: str = ''
  host: str = '127.0.0.1'
  num_addresses: int = 2
  num_parallel_copies: int = 4
  chunk_bytes: int = 32 * 1024 * 1024


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

    Called once for each fetch that will follow: an offer that nobody pulls
    may keep its memory as long as the process lives.

    Raises:
      WeightTransferError: nothing is published, or leaves or shapes differ.
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

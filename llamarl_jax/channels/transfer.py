"""Transport between processes: `jax.experimental.transfer`.

Trainer and generators are separate JAX worlds, each with a transfer server;
bytes go from the process that owns a slice to the process that needs it,
through host memory and sockets. The library moves shard i to shard i and
never reshards, so everything here travels in single-device slices of a plan.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax import types
from llamarl_jax.channels import publisher as publisher_lib
from llamarl_jax.channels import subscriber as subscriber_lib
from llamarl_jax.channels import weights
from llamarl_jax.sharding import reshard
from llamarl_jax.sharding import spec

NAME = 'transfer'


@dataclasses.dataclass(frozen=True)
class Pull:
  """What one destination device pulls of one leaf.

  Attributes:
    uuid: under which the source's server holds the slices.
    slices: of one leaf and one destination device, in the order offered.
  """

  uuid: int
  slices: tuple[reshard.Slice, ...]


def unavailable_reason() -> str:
  """Returns why this transport cannot be used here; '' if it can."""
  try:
    _library()
  except (ImportError, AttributeError) as error:
    return f'{type(error).__name__}: {error}'
  return ''


def publisher(settings: weights.TransportSettings) -> weights.WeightPublisher:
  """Returns the trainer's end, with this process' transfer server."""
  return publisher_lib.PinningPublisher(NAME, _Sender(settings))


def subscriber(
  name: str,
  specs: Any,
  shardings: Any,
  settings: weights.TransportSettings,
) -> weights.WeightSubscriber:
  """Returns the generator's end, with this process' transfer server.

  Args:
    name: of the subscriber, for people.
    specs: tree of `ParamSpec`, the parameters expected.
    shardings: tree of shardings they are to arrive in.
    settings: of the transports.
  """
  receiver = _Receiver(
    _server(settings),
    spec.named_leaves(shardings),
    subscriber_lib.destination_of(name, specs, shardings).leaves,
  )
  return subscriber_lib.VerifyingSubscriber(
    name,
    NAME,
    receiver,
    specs,
    shardings,
    deadline_seconds=settings.deadline_seconds,
  )


class _Server:
  """The transfer server of this process, and the numbers of its offers."""

  def __init__(self, settings: weights.TransportSettings) -> None:
    address = f'{settings.host}:0'
    self._uuids = itertools.count(1)
    self._server = _library().start_transfer_server(
      jax.local_devices()[0].client,
      address,
      [address] * settings.num_addresses,
      max_num_parallel_copies=settings.num_parallel_copies,
      transfer_size=settings.chunk_bytes,
    )

  @property
  def address(self) -> str:
    """Where other processes connect."""
    return self._server.address()

  def offer(self, arrays: Sequence[jax.Array]) -> int:
    """Holds arrays until they are pulled; returns the number to ask for."""
    uuid = next(self._uuids)
    self._server.await_pull(uuid, list(arrays))
    return uuid

  def connect(self, address: str) -> Any:
    """Returns a new connection; the old one may wait for ever."""
    return self._server.connect(address)


# At most one: JAX supports one transfer server a process.
_SERVERS: dict[tuple[Any, ...], _Server] = {}


def _server(settings: weights.TransportSettings) -> _Server:
  """Returns the server of this process, started when first asked for."""
  asked = (
    settings.host,
    settings.num_addresses,
    settings.num_parallel_copies,
    settings.chunk_bytes,
  )
  if asked not in _SERVERS:
    if _SERVERS:
      raise ValueError(
        f'The transfer server of this process runs with {next(iter(_SERVERS))}'
        f', not {asked} (host, addresses, copies, chunk bytes); a process has '
        'one, so give both ends the same settings.'
      )
    _SERVERS[asked] = _Server(settings)
  return _SERVERS[asked]


def _library() -> Any:
  """Returns the transfer library; not every jaxlib is built with it."""
  from jax.experimental import transfer

  return transfer


class _Sender:
  """Cuts the pinned arrays into the slices of a plan and offers them."""

  def __init__(self, settings: weights.TransportSettings) -> None:
    self._server = _server(settings)

  def offer(
    self,
    version: types.Version,
    leaves: Mapping[str, jax.Array],
    destination: weights.Destination,
  ) -> Mapping[str, Any]:
    for path, leaf in leaves.items():
      if not leaf.is_fully_addressable:
        raise weights.WeightTransferError(
          f'{version}: leaf {path} spans several processes; the transfer '
          'transport publishes from one.'
        )
    source = {
      path: reshard.shard_map_of(leaf.sharding, leaf.shape)
      for path, leaf in leaves.items()
    }
    itemsizes = {path: leaf.dtype.itemsize for path, leaf in leaves.items()}
    plan = reshard.plan_slices(source, destination.leaves, itemsizes)
    shards = {path: _shards_of(leaf) for path, leaf in leaves.items()}
    pulls = []
    # The plan is in order of leaf and destination: neighbors belong together.
    for _, group in itertools.groupby(plan, lambda s: (s.leaf, s.destination)):
      slices = tuple(group)
      pieces = [
        _piece(shards[s.leaf][s.source], source[s.leaf].boxes[s.source], s)
        for s in slices
      ]
      pulls.append(Pull(self._server.offer(pieces), slices))
    return {'address': self._server.address, 'pulls': tuple(pulls)}

  def close(self) -> None:
    """The server lives as long as its process."""


class _Fetch:
  """Slices on their way to this process' devices."""

  def __init__(
    self,
    version: types.Version,
    pulled: list[tuple[Pull, list[jax.Array]]],
    shardings: Mapping[str, jax.sharding.Sharding],
    wanted: Mapping[str, reshard.ShardMap],
    connection: Any,
  ) -> None:
    self._version = version
    self._pulled = pulled
    self._shardings = shardings
    self._wanted = wanted
    self._connection = connection  # Pulls end when it is gone.

  def is_ready(self) -> bool:
    # An array that failed counts as ready; the error shows in `result`.
    return all(
      subscriber_lib.has_arrived(piece)
      for _, pieces in self._pulled
      for piece in pieces
    )

  def result(self) -> dict[str, jax.Array]:
    shards: dict[str, dict[int, jax.Array]] = {}
    while self._pulled:
      # Pieces are let go of one by one: no second copy of the whole tree.
      pull, pieces = self._pulled.pop(0)
      leaf, ordinal = pull.slices[0].leaf, pull.slices[0].destination
      box = self._wanted[leaf].boxes[ordinal]
      try:
        jax.block_until_ready(pieces)
      except jax.errors.JaxRuntimeError as error:
        raise weights.WeightTransferError(
          f'{self._version}: leaf {leaf} for device {ordinal} was lost: {error}'
        ) from error
      offsets = tuple(s.offset_in(box) for s in pull.slices)
      shape = tuple(stop - start for start, stop in box)
      shards.setdefault(leaf, {})[ordinal] = (
        pieces[0]
        if pieces[0].shape == shape
        else _assemble(tuple(pieces), offsets, shape)
      )
    return {
      leaf: jax.make_array_from_single_device_arrays(
        self._wanted[leaf].shape,
        self._shardings[leaf],
        [by_ordinal[ordinal] for ordinal in sorted(by_ordinal)],
      )
      for leaf, by_ordinal in shards.items()
    }


class _Receiver:
  """Pulls slices and puts the shards together."""

  def __init__(
    self,
    server: _Server,
    shardings: Mapping[str, jax.sharding.Sharding],
    wanted: Mapping[str, reshard.ShardMap],
  ) -> None:
    self._server = server
    self._shardings = shardings
    self._wanted = wanted

  def start(self, manifest: weights.Manifest) -> _Fetch:
    # A connection of its own for each fetch: one that was given up, or whose
    # peer has died, must not be used again.
    connection = self._server.connect(manifest.offer['address'])
    dtypes = {leaf.path: np.dtype(leaf.dtype) for leaf in manifest.leaves}
    pulled = []
    for pull in manifest.offer['pulls']:
      first = pull.slices[0]
      device = reshard.devices_of(self._shardings[first.leaf])[
        first.destination
      ]
      abstract = [
        jax.ShapeDtypeStruct(
          s.shape,
          dtypes[s.leaf],
          sharding=jax.sharding.SingleDeviceSharding(device),
        )
        for s in pull.slices
      ]
      pulled.append((pull, connection.pull(pull.uuid, abstract)))
    return _Fetch(
      manifest.version, pulled, self._shardings, self._wanted, connection
    )

  def close(self) -> None:
    """The server lives as long as its process."""


def _shards_of(array: jax.Array) -> list[jax.Array]:
  """Returns the single-device arrays of a sharded one, by device ordinal."""
  by_device = {shard.device: shard.data for shard in array.addressable_shards}
  return [by_device[device] for device in reshard.devices_of(array.sharding)]


def _piece(
  shard: jax.Array, box: reshard.Box, wanted: reshard.Slice
) -> jax.Array:
  """Returns the part of a shard that a slice asks for, on the same device."""
  if wanted.box == box:
    return shard
  starts = tuple(np.int32(start) for start in wanted.offset_in(box))
  return _cut(shard, starts, wanted.shape)


@functools.partial(jax.jit, static_argnums=2)
def _cut(
  shard: jax.Array, starts: tuple[Any, ...], sizes: tuple[int, ...]
) -> jax.Array:
  """Returns a box of `shard`; starts are not static, to compile once a size."""
  return jax.lax.dynamic_slice(shard, starts, sizes)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _assemble(
  pieces: tuple[jax.Array, ...],
  offsets: tuple[tuple[int, ...], ...],
  shape: tuple[int, ...],
) -> jax.Array:
  """Returns the shard of `shape` that the pieces make up at their offsets."""
  shard = jnp.zeros(shape, pieces[0].dtype)
  for piece, offset in zip(pieces, offsets, strict=True):
    shard = jax.lax.dynamic_update_slice(shard, piece, offset)
  return shard

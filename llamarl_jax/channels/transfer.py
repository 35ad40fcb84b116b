"""Transport between processes: `jax.experimental.transfer`.

Trainer and generators are separate JAX worlds, each with a transfer server;
bytes go from the process that owns a slice to the process that needs it,
through host memory and sockets. The library moves shard i to shard i and
never reshards, so everything here travels in single-device slices of a plan,
which the receiver asks for chunk by chunk. A process that dies, stops or lags
costs the others nothing but one window of chunks.
"""

import collections
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
import contextlib
import dataclasses
import logging
from typing import Any

import jax
import numpy as np

from llamarl_jax import types
from llamarl_jax.channels import desk
from llamarl_jax.channels import shards
from llamarl_jax.channels import subscriber as subscriber_lib
from llamarl_jax.channels import transfer_server
from llamarl_jax.channels import watch as watch_lib
from llamarl_jax.channels import weights
from llamarl_jax.sharding import chunks
from llamarl_jax.sharding import reshard
from llamarl_jax.sharding import spec

NAME = 'transfer'
_LOGGER = logging.getLogger(__name__)


def unavailable_reason() -> str:
  """Returns why this transport cannot be used here; '' if it can."""
  try:
    transfer_server.library()
  except (ImportError, AttributeError) as error:
    return f'{type(error).__name__}: {error}'
  return ''


@dataclasses.dataclass(frozen=True)
class _Held:
  """What is on offer."""

  version: types.Version
  leaves: Mapping[str, jax.Array]
  source: Mapping[str, reshard.ShardMap]


class Sender:
  """Gives out slices of the pinned arrays, to those who ask for them."""

  def __init__(self, settings: weights.TransportSettings) -> None:
    """Opens this process' transfer server and the desk beside it."""
    self._server = transfer_server.server(settings)
    self._held: _Held | None = None
    self._desk = desk.Desk(
      settings.host,
      lambda: _Session(self._server, lambda: self._held),
      settings.deadline_seconds,
    )

  def offer(
    self,
    version: types.Version,
    leaves: Mapping[str, jax.Array],
    destination: weights.Destination,
  ) -> Mapping[str, Any]:
    """Returns who holds what, and where each holder is to be asked."""
    del destination  # Receivers make the plan, and ask for its slices.
    source = {
      path: reshard.shard_map_of(leaf.sharding, leaf.shape)
      for path, leaf in leaves.items()
    }
    self._held = _Held(version, leaves, source)
    first = next(iter(leaves.values()))
    return {
      'source': source,
      'owners': tuple(
        device.process_index for device in reshard.devices_of(first.sharding)
      ),
      'peers': {
        jax.process_index(): (self._desk.address, self._server.address)
      },
    }

  def serve(
    self, leaves: Mapping[str, jax.Array], destination: weights.Destination
  ) -> None:
    """Does nothing: receivers fetch on their own."""

  def release(self) -> None:
    """Refuses to give out more of the version on offer."""
    self._held = None

  def close(self) -> None:
    """Stops to answer; the server lives as long as its process."""
    self._desk.close()


class _Session:
  """What one subscriber was given and has not yet said it has."""

  def __init__(
    self,
    server: transfer_server.Server,
    held: Callable[[], _Held | None],
  ) -> None:
    self._server = server
    self._held = held
    self._given: dict[int, list[jax.ShapeDtypeStruct]] = {}

  def answer(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
    """Offers the parts asked for; see `desk.Session`."""
    for uuid in question['received']:
      self._given.pop(uuid, None)
    if not question['parts']:
      return {}
    # Another thread may publish meanwhile; what is held here stays alive.
    held = self._held()
    version = types.Version(*question['version'])
    if held is None or held.version != version:
      now = held.version if held else 'none'
      return {'error': f'{version} is no longer on offer; {now} is'}
    pieces = []
    for leaf, source, box in question['parts']:
      wanted = reshard.Slice(leaf, 0, source, tuple(map(tuple, box)))
      pieces.append(_give(held, wanted))
    uuid = self._server.offer(pieces)
    self._given[uuid] = [
      jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding)
      for p in pieces
    ]
    return {'uuid': uuid}

  def close(self) -> None:
    """Takes back what was not received; see `desk.Session`."""
    for uuid, abstract in self._given.items():
      freed = self._server.take_back(uuid, abstract)
      _LOGGER.warning(
        'a subscriber left %d slices without a word; %s',
        len(abstract),
        'taken back' if freed else 'it had begun to pull them',
      )
    self._given = {}


def _give(held: _Held, wanted: reshard.Slice) -> jax.Array:
  """Returns a slice of the arrays on offer."""
  own = shards.by_ordinal(held.leaves[wanted.leaf])
  box = held.source[wanted.leaf].boxes[wanted.source]
  return shards.piece(own[wanted.source], box, wanted)


@dataclasses.dataclass(frozen=True)
class _Flight:
  """A chunk on its way."""

  chunk: chunks.Chunk
  uuid: int
  arrays: list[jax.Array]


class Receiver:
  """Asks for the slices of its plan and puts the shards together."""

  background = True

  def __init__(
    self, specs: Any, shardings: Any, settings: weights.TransportSettings
  ) -> None:
    """Opens this process' transfer server.

    Args:
      specs: tree of `ParamSpec`, the parameters expected.
      shardings: tree of shardings they are to arrive in.
      settings: of the transports.
    """
    self._server = transfer_server.server(settings)
    self._settings = settings
    self._shardings = spec.named_leaves(shardings)
    self._dtypes = {
      path: np.dtype(leaf.dtype)
      for path, leaf in spec.named_leaves(specs).items()
    }
    self._wanted = subscriber_lib.destination_of('', specs, shardings).leaves

  def fetch(
    self,
    manifest: weights.Manifest,
    leaves: Collection[str],
    watch: watch_lib.Watch,
    cost: subscriber_lib.Cost,
  ) -> dict[str, jax.Array]:
    """Returns the arrays; see `subscriber.Receiver`."""
    assembly = shards.Assembly(
      self._wanted,
      {path: self._shardings[path] for path in leaves},
      self._dtypes,
    )
    waiting = collections.deque(self._chunks(manifest, leaves))
    under_way: collections.deque[_Flight] = collections.deque()
    with contextlib.ExitStack() as stack:
      peers = _Peers(self._server, manifest, watch, stack)
      while waiting or under_way:
        held = sum(flight.chunk.num_bytes for flight in under_way)
        room = self._settings.window_bytes - held
        if waiting and (not under_way or waiting[0].num_bytes <= room):
          chunk = waiting.popleft()
          under_way.append(peers.pull(chunk, self._abstract(chunk)))
          cost.staging_bytes = max(cost.staging_bytes, held + chunk.num_bytes)
        else:
          peers.land(under_way.popleft(), assembly)
      peers.finish()
    return assembly.arrays()

  def close(self) -> None:
    """The server lives as long as its process."""

  def _chunks(
    self, manifest: weights.Manifest, leaves: Collection[str]
  ) -> list[chunks.Chunk]:
    """Returns what this process is to ask for, in order."""
    itemsizes = {path: dtype.itemsize for path, dtype in self._dtypes.items()}
    plan = reshard.plan_slices(
      manifest.offer['source'], self._wanted, itemsizes
    )
    local = shards.local_ordinals(next(iter(self._shardings.values())))
    return chunks.cut(
      plan.restrict(leaves, local),
      manifest.offer['owners'],
      max_bytes=self._settings.chunk_bytes,
    )

  def _abstract(self, chunk: chunks.Chunk) -> list[jax.ShapeDtypeStruct]:
    """Returns shapes, dtypes and places of a chunk's parts."""
    devices = reshard.devices_of(self._shardings[chunk.parts[0].leaf])
    sharding = jax.sharding.SingleDeviceSharding(devices[chunk.destination])
    return [
      jax.ShapeDtypeStruct(
        part.shape, self._dtypes[part.leaf], sharding=sharding
      )
      for part in chunk.parts
    ]


class _Peers:
  """The processes that hold a version, as one fetch sees them."""

  def __init__(
    self,
    server: transfer_server.Server,
    manifest: weights.Manifest,
    watch: watch_lib.Watch,
    stack: contextlib.ExitStack,
  ) -> None:
    self._server = server
    self._manifest = manifest
    self._watch = watch
    self._stack = stack  # Closes the lines, however the fetch ends.
    # A connection of its own for each fetch: one that was given up, or whose
    # peer has died, must not be used again.
    self._open: dict[int, tuple[desk.Line, Any]] = {}
    self._received: dict[int, list[int]] = collections.defaultdict(list)

  def pull(
    self, chunk: chunks.Chunk, abstract: list[jax.ShapeDtypeStruct]
  ) -> _Flight:
    """Asks for a chunk and starts to pull it."""
    answer = self._ask(
      chunk.owner, [(part.leaf, part.source, part.box) for part in chunk.parts]
    )
    if 'error' in answer:
      raise subscriber_lib.SupersededError(answer['error'])
    _, connection = self._open[chunk.owner]
    uuid = answer['uuid']
    return _Flight(chunk, uuid, connection.pull(uuid, abstract))

  def land(self, flight: _Flight, assembly: shards.Assembly) -> None:
    """Waits for a chunk and puts it in its place."""
    chunk = flight.chunk
    names = ', '.join(sorted({part.leaf for part in chunk.parts}))
    address, _ = self._manifest.offer['peers'][chunk.owner]
    what = (
      f'leaf {names} for device {chunk.destination} from'
      f' {address.split("/")[0]}'
    )
    self._watch.await_arrays(flight.arrays, what)
    try:
      jax.block_until_ready(flight.arrays)
    except jax.errors.JaxRuntimeError as error:
      raise weights.WeightTransferError(f'{what} was lost: {error}') from error
    for part, array in zip(chunk.parts, flight.arrays, strict=True):
      assembly.write(part, array)
    assembly.settle()
    self._received[chunk.owner].append(flight.uuid)

  def finish(self) -> None:
    """Tells every peer that all has arrived."""
    for owner in self._open:
      self._ask(owner, [])

  def _ask(self, owner: int, parts: list[Any]) -> Mapping[str, Any]:
    desk_address, server_address = self._manifest.offer['peers'][owner]
    if owner not in self._open:
      line = self._stack.enter_context(
        contextlib.closing(desk.Line(desk_address, self._watch))
      )
      self._open[owner] = (line, self._server.connect(server_address))
    line, _ = self._open[owner]
    return line.ask(
      {
        'version': list(self._manifest.version),
        'parts': parts,
        'received': self._received.pop(owner, []),
      }
    )

"""The transfer server of a process: `jax.experimental.transfer`.

JAX supports one a process. Its offers have no end: what nobody pulls keeps its
memory. So whoever offers here also takes back.
"""

from collections.abc import Sequence
import secrets
import time
from typing import Any

import jax

from llamarl_jax.channels import weights

# How long an offer that is taken back may take: it goes over this machine only.
_TAKE_BACK_SECONDS = 5.0
_POLL_SECONDS = 0.005


def library() -> Any:
  """Returns the transfer library; not every jaxlib is built with it."""
  from jax.experimental import transfer

  return transfer


class Server:
  """Offers arrays to other processes, and pulls theirs."""

  def __init__(self, settings: weights.TransportSettings) -> None:
    address = f'{settings.host}:0'
    self._server = library().start_transfer_server(
      jax.local_devices()[0].client,
      address,
      [address] * settings.num_addresses,
      max_num_parallel_copies=settings.num_parallel_copies,
      transfer_size=settings.copy_bytes,
    )

  @property
  def address(self) -> str:
    """Where other processes connect."""
    return self._server.address()

  def offer(self, arrays: Sequence[jax.Array]) -> int:
    """Holds arrays until they are pulled; returns the number to ask for."""
    # Not to be guessed: whoever knows the number gets the arrays.
    uuid = secrets.randbits(63)
    self._server.await_pull(uuid, list(arrays))
    return uuid

  def take_back(
    self, uuid: int, abstract: Sequence[jax.ShapeDtypeStruct]
  ) -> bool:
    """Frees an offer that nobody will pull, by pulling it.

    Args:
      uuid: of the offer.
      abstract: shapes, dtypes and shardings of its arrays.

    Returns:
      Whether it is freed; False where it had been pulled already.
    """
    # No public call withdraws an offer.
    connection = self._server.connect(self.address)
    arrays = connection.pull(uuid, list(abstract))
    limit = time.monotonic() + _TAKE_BACK_SECONDS
    while not all(array.is_ready() for array in arrays):
      if time.monotonic() > limit:
        return False
      time.sleep(_POLL_SECONDS)
    return True

  def connect(self, address: str) -> Any:
    """Returns a new connection; an old one may wait for ever."""
    return self._server.connect(address)


_SERVERS: dict[tuple[Any, ...], Server] = {}


def server(settings: weights.TransportSettings) -> Server:
  """Returns the server of this process, started when first asked for.

  Raises:
    ValueError: it runs with other settings.
  """
  asked = (
    settings.host,
    settings.num_addresses,
    settings.num_parallel_copies,
    settings.copy_bytes,
  )
  if asked not in _SERVERS:
    if _SERVERS:
      raise ValueError(
        f'The transfer server of this process runs with {next(iter(_SERVERS))}'
        f', not {asked} (host, addresses, copies, copy bytes); a process has '
        'one, so give both ends the same settings.'
      )
    _SERVERS[asked] = Server(settings)
  return _SERVERS[asked]

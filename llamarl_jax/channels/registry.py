"""The channels and transports by name: one visible table each."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import logging
from typing import Any

from llamarl_jax.channels import broadcast
from llamarl_jax.channels import device_put
from llamarl_jax.channels import filesystem
from llamarl_jax.channels import gather
from llamarl_jax.channels import scatter
from llamarl_jax.channels import transfer
from llamarl_jax.channels import weights

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Transport:
  """One way for weights to move.

  Attributes:
    name: as in TRANSPORTS.
    publisher: (settings) -> the trainer's end.
    subscriber: (name, specs, shardings, settings) -> the generator's end.
    across_processes: whether manifests may leave the process.
  """

  name: str
  publisher: Callable[[weights.TransportSettings], weights.WeightPublisher]
  subscriber: Callable[
    [str, Any, Any, weights.TransportSettings], weights.WeightSubscriber
  ]
  across_processes: bool


CHANNELS: Mapping[str, type] = {
  'broadcast': broadcast.Broadcast,
  'scatter': scatter.Scatter,
  'gather': gather.Gather,
}

TRANSPORTS: Mapping[str, Transport] = {
  'device_put': Transport(
    device_put.NAME,
    device_put.publisher,
    device_put.subscriber,
    across_processes=False,
  ),
  'transfer': Transport(
    transfer.NAME,
    transfer.publisher,
    transfer.subscriber,
    across_processes=True,
  ),
  'filesystem': Transport(
    filesystem.NAME,
    filesystem.publisher,
    filesystem.subscriber,
    across_processes=True,
  ),
}


def select_transport(name: str) -> Transport:
  """Returns the transport called `name`, or the one that stands in for it.

  Where jaxlib is built without the transfer library (macOS), 'transfer' gives
  way to 'filesystem', with a warning. Touches no device.

  Raises:
    ValueError: there is no transport of that name.
  """
  if name not in TRANSPORTS:
    raise ValueError(f'No transport {name!r}; choose from {list(TRANSPORTS)}.')
  if name == transfer.NAME:
    reason = transfer.unavailable_reason()
    if reason:
      _LOGGER.warning(
        'The transfer transport is not available here (%s); weights go '
        'through files instead, which is slower.',
        reason,
      )
      return TRANSPORTS[filesystem.NAME]
  return TRANSPORTS[name]

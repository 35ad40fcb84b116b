"""The channels and transports by name: one visible table each."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import logging
from typing import Any

from llamarl_jax.channels import broadcast
from llamarl_jax.channels import collective
from llamarl_jax.channels import device_put
from llamarl_jax.channels import filesystem
from llamarl_jax.channels import gather
from llamarl_jax.channels import publisher as publisher_lib
from llamarl_jax.channels import scatter
from llamarl_jax.channels import subscriber as subscriber_lib
from llamarl_jax.channels import transfer
from llamarl_jax.channels import weights

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Transport:
  """One way for weights to move.

  Attributes:
    name: as in TRANSPORTS.
    make_sender: (settings) -> what it does at the trainer.
    make_receiver: (specs, shardings, settings) -> what it does at a generator.
    across_processes: whether manifests may leave the process.
  """

  name: str
  make_sender: Callable[[weights.TransportSettings], publisher_lib.Sender]
  make_receiver: Callable[
    [Any, Any, weights.TransportSettings], subscriber_lib.Receiver
  ]
  across_processes: bool

  def publisher(
    self, settings: weights.TransportSettings
  ) -> weights.WeightPublisher:
    """Returns the trainer's end.

    Raises:
      ValueError: the settings do not suit the transport.
    """
    return publisher_lib.PinningPublisher(self.name, self.make_sender(settings))

  def subscriber(
    self,
    name: str,
    specs: Any,
    shardings: Any,
    settings: weights.TransportSettings,
  ) -> weights.WeightSubscriber:
    """Returns the generator's end.

    Args:
      name: of the subscriber, for people.
      specs: tree of `ParamSpec`, the parameters expected.
      shardings: tree of shardings they are to arrive in.
      settings: of the transports.
    """
    return subscriber_lib.VerifyingSubscriber(
      name,
      self.name,
      self.make_receiver(specs, shardings, settings),
      specs,
      shardings,
      settings=settings,
    )


CHANNELS: Mapping[str, type] = {
  'broadcast': broadcast.Broadcast,
  'scatter': scatter.Scatter,
  'gather': gather.Gather,
}

TRANSPORTS: Mapping[str, Transport] = {
  'device_put': Transport(
    device_put.NAME,
    device_put.Sender,
    device_put.Receiver,
    across_processes=False,
  ),
  'transfer': Transport(
    transfer.NAME,
    transfer.Sender,
    transfer.Receiver,
    across_processes=True,
  ),
  'collective': Transport(
    collective.NAME,
    collective.Sender,
    collective.Receiver,
    across_processes=True,
  ),
  'filesystem': Transport(
    filesystem.NAME,
    filesystem.Sender,
    filesystem.Receiver,
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

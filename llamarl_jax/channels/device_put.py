"""Transport inside one process: `jax.device_put` between its meshes.

The offer holds the pinned arrays themselves, so its manifest stays in the
process. Where both ends share a device the arrays may be shared too: they are
the publisher's private copy, which nobody donates.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax

from llamarl_jax import types
from llamarl_jax.channels import publisher as publisher_lib
from llamarl_jax.channels import subscriber as subscriber_lib
from llamarl_jax.channels import weights
from llamarl_jax.sharding import spec

NAME = 'device_put'


def publisher(settings: weights.TransportSettings) -> weights.WeightPublisher:
  """Returns the trainer's end."""
  del settings  # Nothing to set inside one process.
  return publisher_lib.PinningPublisher(NAME, _Sender())


def subscriber(
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
    NAME,
    _Receiver(spec.named_leaves(shardings)),
    specs,
    shardings,
    deadline_seconds=settings.deadline_seconds,
  )


class _Sender:
  """Hands out references to the pinned arrays."""

  def offer(
    self,
    version: types.Version,
    leaves: Mapping[str, jax.Array],
    destination: weights.Destination,
  ) -> Mapping[str, Any]:
    del version, destination
    return {'leaves': dict(leaves)}

  def close(self) -> None:
    """Holds nothing."""


@dataclasses.dataclass(frozen=True)
class _Fetch:
  """Copies that the devices are making."""

  leaves: dict[str, jax.Array]

  def is_ready(self) -> bool:
    return all(map(subscriber_lib.has_arrived, self.leaves.values()))

  def result(self) -> dict[str, jax.Array]:
    return self.leaves


class _Receiver:
  """Copies to the devices of its shardings."""

  def __init__(self, shardings: Mapping[str, jax.sharding.Sharding]) -> None:
    self._shardings = shardings

  def start(self, manifest: weights.Manifest) -> _Fetch:
    leaves = manifest.offer['leaves']
    return _Fetch(
      {
        path: jax.device_put(leaf, self._shardings[path])
        for path, leaf in leaves.items()
      }
    )

  def close(self) -> None:
    """Holds nothing."""

"""Transport inside one process: `jax.device_put` between its meshes.

The offer holds the pinned arrays themselves, so its manifest stays in the
process. Where both ends share a device the arrays may be shared too: they are
the publisher's private copy, which nobody donates.
"""

from collections.abc import Collection
from collections.abc import Mapping
from typing import Any

import jax

from llamarl_jax import types
from llamarl_jax.channels import subscriber as subscriber_lib
from llamarl_jax.channels import watch as watch_lib
from llamarl_jax.channels import weights
from llamarl_jax.sharding import spec

NAME = 'device_put'


class Sender:
  """Hands out references to the pinned arrays."""

  def __init__(self, settings: weights.TransportSettings) -> None:
    """Has nothing to set inside one process."""

  def offer(
    self,
    version: types.Version,
    leaves: Mapping[str, jax.Array],
    destination: weights.Destination,
  ) -> Mapping[str, Any]:
    """Returns the arrays."""
    del version, destination
    return {'leaves': dict(leaves)}

  def serve(
    self, leaves: Mapping[str, jax.Array], destination: weights.Destination
  ) -> None:
    """Does nothing: receivers copy on their own."""

  def release(self) -> None:
    """Holds nothing."""

  def close(self) -> None:
    """Holds nothing."""


class Receiver:
  """Copies to the devices of its shardings."""

  # In its turn: the order of work inside one process is to be reproducible.
  background = False

  def __init__(
    self, specs: Any, shardings: Any, settings: weights.TransportSettings
  ) -> None:
    """Receives into `shardings`."""
    self._shardings = spec.named_leaves(shardings)

  def fetch(
    self,
    manifest: weights.Manifest,
    leaves: Collection[str],
    watch: watch_lib.Watch,
    cost: subscriber_lib.Cost,
  ) -> dict[str, jax.Array]:
    """Returns the copies; see `subscriber.Receiver`."""
    offered = manifest.offer['leaves']
    copies = {
      path: jax.device_put(offered[path], self._shardings[path])
      for path in leaves
    }
    watch.await_arrays(list(copies.values()), 'the copies')
    return copies

  def close(self) -> None:
    """Holds nothing."""

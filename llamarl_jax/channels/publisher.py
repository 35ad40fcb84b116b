"""The publisher of weights that every transport shares.

It pins and describes; a transport's `Sender` makes the offers.
"""

from collections.abc import Mapping
import time
from typing import Any
from typing import Protocol

import jax
import jax.numpy as jnp

from llamarl_jax import types
from llamarl_jax.channels import weights
from llamarl_jax.sharding import digest
from llamarl_jax.sharding import spec


class Sender(Protocol):
  """What a transport does at the publisher."""

  def offer(
    self,
    version: types.Version,
    leaves: Mapping[str, jax.Array],
    destination: weights.Destination,
  ) -> Mapping[str, Any]:
    """Makes `leaves` available; returns what the receiver must know."""

  def serve(
    self, leaves: Mapping[str, jax.Array], destination: weights.Destination
  ) -> None:
    """Does its part of a fetch, where receivers cannot fetch on their own."""

  def release(self) -> None:
    """Forgets what was offered, so that its memory can be freed."""

  def close(self) -> None:
    """Releases what the sender holds."""


class PinningPublisher:
  """Keeps a private copy of one version and offers it on request."""

  def __init__(self, transport: str, sender: Sender) -> None:
    """Publishes through `sender`.

    Args:
      transport: name of the transport, checked by the subscriber.
      sender: makes the offers.
    """
    self._transport = transport
    self._sender = sender
    self._version: types.Version | None = None
    self._leaves: dict[str, jax.Array] = {}
    self._manifest: tuple[weights.LeafManifest, ...] = ()

  def publish(self, versioned: types.VersionedParams) -> weights.TransferReport:
    """Pins a private copy; see `weights.WeightPublisher`."""
    if self._version is not None and versioned.version <= self._version:
      raise ValueError(
        f'{versioned.version} is not newer than the published {self._version}.'
      )
    started = time.monotonic()
    # The old copy goes first, so that two are never held; and the new one is a
    # copy, because the next update donates the buffers of `versioned`.
    self._sender.release()
    self._leaves = {}
    leaves = {
      path: jnp.copy(leaf)
      for path, leaf in spec.named_leaves(versioned.params).items()
    }
    digests = digest.tree_digests(leaves)
    self._manifest = tuple(
      weights.LeafManifest(path, leaf.shape, str(leaf.dtype), digests[path])
      for path, leaf in leaves.items()
    )
    self._leaves = leaves
    self._version = versioned.version
    return weights.TransferReport(
      bytes=sum(leaf.nbytes for leaf in leaves.values()),
      seconds=time.monotonic() - started,
      version=versioned.version,
    )

  def offer(self, destination: weights.Destination) -> weights.Manifest:
    """Offers the pinned version; see `weights.WeightPublisher`."""
    version = self._pinned(destination)
    held = {path: tuple(leaf.shape) for path, leaf in self._leaves.items()}
    wanted = {path: leaf.shape for path, leaf in destination.leaves.items()}
    for path in sorted(held.keys() | wanted.keys()):
      if held.get(path) != wanted.get(path):
        raise weights.WeightTransferError(
          f'{version}: leaf {path} has shape {held.get(path)} here and '
          f'{wanted.get(path)} at {destination.name}.'
        )
    offer = self._sender.offer(version, self._leaves, destination)
    return weights.Manifest(
      version=version,
      leaves=self._manifest,
      transport=self._transport,
      offer=offer,
    )

  def serve(self, destination: weights.Destination) -> None:
    """Does its part of a fetch; see `weights.WeightPublisher`."""
    self._pinned(destination)
    self._sender.serve(self._leaves, destination)

  def close(self) -> None:
    """Frees the pinned copy; may be called twice."""
    self._sender.release()
    self._leaves = {}
    self._sender.close()

  def _pinned(self, destination: weights.Destination) -> types.Version:
    """Returns the version that is pinned."""
    if self._version is None or not self._leaves:
      raise weights.WeightTransferError(
        f'{destination.name} asked for weights before any were published.'
      )
    return self._version

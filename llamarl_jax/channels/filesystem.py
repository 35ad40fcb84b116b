"""Transport through files: orbax writes a version, subscribers restore it.

The slow baseline, and the way where the transfer library is missing. Each
version is written once, when first asked for, and read straight into the
shardings of each subscriber.
"""

from collections.abc import Collection
from collections.abc import Mapping
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from llamarl_jax import types
from llamarl_jax.channels import subscriber as subscriber_lib
from llamarl_jax.channels import watch as watch_lib
from llamarl_jax.channels import weights
from llamarl_jax.sharding import spec

NAME = 'filesystem'

# The version before the newest may still be being read by a subscriber.
_NUM_VERSIONS_KEPT = 2


class Sender:
  """Writes versions and deletes old ones."""

  def __init__(self, settings: weights.TransportSettings) -> None:
    """Writes below `settings.directory`.

    Raises:
      ValueError: the settings name no directory.
    """
    if not settings.directory:
      raise ValueError(
        'The filesystem transport needs a directory that trainer and generators'
        ' share; set TransportSettings.directory.'
      )
    self._directory = pathlib.Path(settings.directory).absolute() / 'weights'
    self._written: list[types.Version] = []

  def offer(
    self,
    version: types.Version,
    leaves: Mapping[str, jax.Array],
    destination: weights.Destination,
  ) -> Mapping[str, Any]:
    """Returns where the version lies, which it writes when first asked for."""
    del destination  # Files serve every sharding.
    path = self._path(version)
    if version not in self._written:
      with ocp.StandardCheckpointer() as checkpointer:
        # A directory of an earlier run may be here; it is not this version.
        checkpointer.save(path, dict(leaves), force=True)
      self._written.append(version)
      for old in self._written[:-_NUM_VERSIONS_KEPT]:
        shutil.rmtree(self._path(old), ignore_errors=True)
      self._written = self._written[-_NUM_VERSIONS_KEPT:]
    return {'path': str(path)}

  def serve(
    self, leaves: Mapping[str, jax.Array], destination: weights.Destination
  ) -> None:
    """Does nothing: receivers read on their own."""

  def release(self) -> None:
    """Leaves the files: a subscriber may still be reading."""

  def close(self) -> None:
    """Leaves the files: a subscriber may still be reading."""

  def _path(self, version: types.Version) -> pathlib.Path:
    return self._directory / f'{version.incarnation}-{version.batches}'


class Receiver:
  """Reads versions."""

  background = True

  def __init__(
    self, specs: Any, shardings: Any, settings: weights.TransportSettings
  ) -> None:
    """Receives into `shardings`."""
    by_path = spec.named_leaves(shardings)
    self._abstract = {
      path: jax.ShapeDtypeStruct(
        leaf.shape, np.dtype(leaf.dtype), sharding=by_path[path]
      )
      for path, leaf in spec.named_leaves(specs).items()
    }

  def fetch(
    self,
    manifest: weights.Manifest,
    leaves: Collection[str],
    watch: watch_lib.Watch,
    cost: subscriber_lib.Cost,
  ) -> dict[str, jax.Array]:
    """Returns what the files hold; see `subscriber.Receiver`."""
    path = manifest.offer['path']
    watch.check(f'files in {path}')
    try:
      with ocp.StandardCheckpointer() as checkpointer:
        # All leaves: what is on disk is one tree.
        return checkpointer.restore(path, self._abstract)
    except (OSError, ValueError) as error:
      raise weights.WeightTransferError(
        f'{path} could not be read: {error}'
      ) from error

  def close(self) -> None:
    """Holds nothing."""

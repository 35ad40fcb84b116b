"""Transport through files: orbax writes a version, subscribers restore it.

The slow baseline, and the way where the transfer library is missing. Each
version is written once, when first asked for, and read straight into the
shardings of each subscriber.
"""

from collections.abc import Mapping
from concurrent import futures
import dataclasses
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from llamarl_jax import types
from llamarl_jax.channels import publisher as publisher_lib
from llamarl_jax.channels import subscriber as subscriber_lib
from llamarl_jax.channels import weights
from llamarl_jax.sharding import spec

NAME = 'filesystem'

# The version before the newest may still be being read by a subscriber.
_NUM_VERSIONS_KEPT = 2


def publisher(settings: weights.TransportSettings) -> weights.WeightPublisher:
  """Returns the trainer's end.

  Raises:
    ValueError: the settings name no directory.
  """
  if not settings.directory:
    raise ValueError(
      'The filesystem transport needs a directory that trainer and generators '
      'share; set TransportSettings.directory.'
    )
  directory = pathlib.Path(settings.directory).absolute() / 'weights'
  return publisher_lib.PinningPublisher(NAME, _Sender(directory))


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
  by_path = spec.named_leaves(shardings)
  abstract = {
    path: jax.ShapeDtypeStruct(
      leaf.shape, np.dtype(leaf.dtype), sharding=by_path[path]
    )
    for path, leaf in spec.named_leaves(specs).items()
  }
  return subscriber_lib.VerifyingSubscriber(
    name,
    NAME,
    _Receiver(abstract),
    specs,
    shardings,
    deadline_seconds=settings.deadline_seconds,
  )


class _Sender:
  """Writes versions and deletes old ones."""

  def __init__(self, directory: pathlib.Path) -> None:
    self._directory = directory
    self._written: list[types.Version] = []

  def offer(
    self,
    version: types.Version,
    leaves: Mapping[str, jax.Array],
    destination: weights.Destination,
  ) -> Mapping[str, Any]:
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

  def close(self) -> None:
    """Leaves the files: a subscriber may still be reading."""

  def _path(self, version: types.Version) -> pathlib.Path:
    return self._directory / f'{version.incarnation}-{version.batches}'


@dataclasses.dataclass(frozen=True)
class _Fetch:
  """A restore under way in a thread."""

  version: types.Version
  future: futures.Future

  def is_ready(self) -> bool:
    return self.future.done()

  def result(self) -> dict[str, jax.Array]:
    error = self.future.exception()
    if error is not None:
      raise weights.WeightTransferError(
        f'{self.version} could not be read: {error}'
      ) from error
    return self.future.result()


class _Receiver:
  """Reads versions in a thread, so that decoding goes on."""

  def __init__(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    self._abstract = dict(abstract)
    # Two threads: a read that was given up must not hold up the next one.
    self._executor = futures.ThreadPoolExecutor(max_workers=2)

  def start(self, manifest: weights.Manifest) -> _Fetch:
    future = self._executor.submit(_restore, manifest, self._abstract)
    return _Fetch(manifest.version, future)

  def close(self) -> None:
    self._executor.shutdown(wait=False, cancel_futures=True)


def _restore(
  manifest: weights.Manifest, abstract: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
  """Returns the arrays of one version, in the shardings of `abstract`."""
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(manifest.offer['path'], abstract)

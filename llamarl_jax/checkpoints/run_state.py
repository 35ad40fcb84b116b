"""Checkpoints of a run: the train state and what the host must remember.

Orbax writes each one under a temporary name and renames it when complete, so
a run killed in the middle of saving goes on from the one before. Leaves are
stored in one flat dictionary of dotted names, which does not depend on the
classes an optimizer keeps its state in.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import dataclasses
import logging
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from llamarl_jax.types import Params
from llamarl_jax.types import TrainState

# Parameters are an item of their own: evaluation reads nothing else.
_PARAMS = 'params'
_TRAINER = 'trainer'
_METADATA = 'metadata'


class RunStateCheckpointer:
  """Saves and restores the state of a run in one folder.

  Saving returns when all is on disk: the arrays may be donated right after.
  """

  def __init__(self, directory: str | pathlib.Path, *, keep: int = 2):
    """Opens the folder, creating it where it does not exist.

    Args:
      directory: where checkpoints lie, one folder a step.
      keep: how many of the newest ones to keep, at least 1.
    """
    if keep < 1:
      raise ValueError(f'keep must be at least 1, got {keep}')
    _silence_orbax()
    self._directory = pathlib.Path(directory).absolute()
    self._manager = ocp.CheckpointManager(
      self._directory,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=False
      ),
      item_handlers={
        # Float noise does not compress; trying takes four times as long.
        _PARAMS: ocp.PyTreeCheckpointHandler(use_compression=False),
        _TRAINER: ocp.PyTreeCheckpointHandler(use_compression=False),
        _METADATA: ocp.JsonCheckpointHandler(),
      },
    )

  def save(
    self, step: int, state: TrainState, metadata: Mapping[str, Any]
  ) -> None:
    """Writes a checkpoint, and deletes the oldest beyond `keep`.

    Args:
      step: batches consumed; a step is saved once.
      state: the train state.
      metadata: small host facts, what JSON can hold.

    Raises:
      ValueError: if there already is a checkpoint of this step.
    """
    if step in self._manager.all_steps():
      raise ValueError(
        f'{self._directory} already has a checkpoint of step {step}: use a new '
        'workdir'
      )
    self._manager.save(
      step,
      args=ocp.args.Composite(
        params=ocp.args.PyTreeSave(_flatten(state.params)),
        trainer=ocp.args.PyTreeSave(_flatten(_without_params(state))),
        metadata=ocp.args.JsonSave(dict(metadata)),
      ),
    )

  def save_params(
    self, step: int, params: Params, metadata: Mapping[str, Any]
  ) -> None:
    """Writes a checkpoint of parameters alone: to be read, not to go on from.

    Args:
      step: as for `save`.
      params: arrays, on devices or in host memory.
      metadata: as for `save`.
    """
    self._manager.save(
      step,
      args=ocp.args.Composite(
        params=ocp.args.PyTreeSave(_flatten(params)),
        metadata=ocp.args.JsonSave(dict(metadata)),
      ),
    )

  def latest_step(self) -> int | None:
    """Returns the step of the newest checkpoint, None where there is none."""
    return self._manager.latest_step()

  def restore(
    self, abstract_state: TrainState, step: int | None = None
  ) -> tuple[TrainState, dict[str, Any]]:
    """Returns the train state and the metadata saved with it.

    Args:
      abstract_state: `jax.ShapeDtypeStruct`s with the shardings wanted, which
        need not be those it was saved with; or arrays to take them from.
      step: which checkpoint, None = the newest.

    Raises:
      FileNotFoundError: if there is no such checkpoint.
      ValueError: if names or shapes of leaves differ.
    """
    step = self._existing_step(step)
    params = self.restore_params(abstract_state.params, step)
    rest = self._restore_item(step, _TRAINER, _without_params(abstract_state))
    return dataclasses.replace(rest, params=params), self.metadata(step)

  def restore_params(
    self, abstract_params: Params, step: int | None = None
  ) -> Params:
    """Returns the parameters alone; see `restore`."""
    step = self._existing_step(step)
    return self._restore_item(step, _PARAMS, abstract_params)

  def metadata(self, step: int | None = None) -> dict[str, Any]:
    """Returns the metadata alone; see `restore`."""
    step = self._existing_step(step)
    args = ocp.args.Composite(metadata=ocp.args.JsonRestore())
    return dict(self._manager.restore(step, args=args)[_METADATA])

  def close(self) -> None:
    """Releases what orbax holds; may be called twice."""
    self._manager.close()

  def _existing_step(self, step: int | None) -> int:
    steps = sorted(self._manager.all_steps())
    if not steps:
      raise FileNotFoundError(
        f'no checkpoint in {self._directory}: give the checkpoints folder of '
        'a run that has saved one'
      )
    if step is None:
      return steps[-1]
    if step not in steps:
      raise FileNotFoundError(
        f'no checkpoint of step {step} in {self._directory}: there are {steps}'
      )
    return step

  def _restore_item(self, step: int, item: str, abstract: Any) -> Any:
    wanted = {name: _struct(x) for name, x in _flatten(abstract).items()}
    stored = self._manager.item_metadata(step)[item].tree
    _check_same(f'{self._directory}/{step}/{item}', stored, wanted)
    args = ocp.args.PyTreeRestore(
      item=wanted,
      restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
    )
    flat = self._manager.restore(step, args=ocp.args.Composite(**{item: args}))[
      item
    ]
    treedef = jax.tree.structure(abstract)
    return jax.tree.unflatten(treedef, [flat[name] for name in wanted])


def load_params(
  directory: str | pathlib.Path,
  abstract_params: Params,
  step: int | None = None,
) -> Params:
  """Returns the parameters in a checkpoint folder, as they were trained.

  `run_policy` returns them as evaluation needs them.

  Args:
    directory: the checkpoints folder of a run; it is not created.
    abstract_params: `jax.ShapeDtypeStruct`s with the shardings wanted.
    step: which checkpoint, None = the newest.

  Raises:
    FileNotFoundError: if the folder or the checkpoint does not exist.
    ValueError: if names or shapes of leaves differ.
  """
  with _opened(directory) as checkpointer:
    return checkpointer.restore_params(abstract_params, step)


def load_metadata(
  directory: str | pathlib.Path, step: int | None = None
) -> dict[str, Any]:
  """Returns the metadata in a checkpoint folder; see `load_params`."""
  with _opened(directory) as checkpointer:
    return checkpointer.metadata(step)


@contextlib.contextmanager
def _opened(
  directory: str | pathlib.Path,
) -> Iterator[RunStateCheckpointer]:
  """Yields the checkpoints of a folder that must exist."""
  if not pathlib.Path(directory).is_dir():
    raise FileNotFoundError(
      f'no folder {directory}: give the checkpoints folder of a run'
    )
  checkpointer = RunStateCheckpointer(directory)
  try:
    yield checkpointer
  finally:
    checkpointer.close()


def _flatten(tree: Any) -> dict[str, Any]:
  """Returns the leaves under dotted names, in the order of the tree."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): leaf
    for path, leaf in leaves
  }


def _without_params(state: TrainState) -> TrainState:
  return dataclasses.replace(state, params=None)


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
  sharding = leaf.sharding
  if sharding is None:
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _check_same(
  place: str, stored: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
  """Raises a ValueError that names every leaf that does not fit."""
  faults = [f'{name} is not in it' for name in wanted if name not in stored]
  faults += [f'{name} is not wanted' for name in stored if name not in wanted]
  faults += [
    f'{name} has shape {stored[name].shape}, wanted {wanted[name].shape}'
    for name in wanted
    if name in stored and tuple(stored[name].shape) != wanted[name].shape
  ]
  if faults:
    raise ValueError(
      f'checkpoint {place} does not fit this model and optimizer: '
      + '; '.join(faults)
    )


class _OrbaxFilter(logging.Filter):
  """Drops what orbax logs of its normal work through the absl logger."""

  def filter(self, record: logging.LogRecord) -> bool:
    from_orbax = 'orbax' in pathlib.PurePath(record.pathname).parts
    return not from_orbax or record.levelno >= logging.ERROR


def _silence_orbax() -> None:
  logger = logging.getLogger('absl')
  if not any(isinstance(f, _OrbaxFilter) for f in logger.filters):
    logger.addFilter(_OrbaxFilter())

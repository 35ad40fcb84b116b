"""The policy in the checkpoint of a run, whichever way it was trained.

A run that trained adapters keeps them beside the weights they belong to; a
reader of its policy finds them merged.
"""

from collections.abc import Mapping
import dataclasses
import pathlib
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from llamarl_jax.checkpoints import run_state
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.models import lora
from llamarl_jax.types import Params

_LORA = 'lora'


def lora_metadata(model: config_lib.LlamaConfig) -> dict[str, Any]:
  """Returns what a checkpoint of a model notes of its adapters, for JSON."""
  if model.lora is None:
    return {}
  facts = dataclasses.asdict(model.lora)
  return {_LORA: {**facts, 'targets': list(model.lora.targets)}}


def check_lora(
  model: config_lib.LlamaConfig, metadata: Mapping[str, Any]
) -> None:
  """Checks that a checkpoint has the adapters of a model.

  Shapes tell rank and targets, but not alpha.

  Raises:
    ValueError: they differ.
  """
  ours, theirs = lora_metadata(model).get(_LORA), metadata.get(_LORA)
  if ours != theirs:
    raise ValueError(
      f'the checkpoint was trained with the adapters {theirs}, and the config '
      f'asks for {ours}: set trainer.lora_rank, lora_alpha and lora_targets as '
      'they were, or start in a new workdir'
    )


def load_adapted(
  directory: str | pathlib.Path,
  model: config_lib.LlamaConfig,
  abstract_params: Params,
  step: int | None = None,
) -> tuple[config_lib.LlamaConfig, Params]:
  """Returns the model as it was trained, and its parameters with adapters.

  Args:
    directory: the checkpoints folder of a run; it is not created.
    model: without adapters; the checkpoint tells whether there are any.
    abstract_params: `jax.ShapeDtypeStruct`s of `model` with the shardings
      wanted. Adapters are replicated beside them.
    step: which checkpoint, None = the newest.

  Raises:
    FileNotFoundError: if the folder or the checkpoint does not exist.
    ValueError: if names or shapes of leaves differ.
  """
  facts = run_state.load_metadata(directory, step).get(_LORA)
  if facts is not None:
    adapters = lora.LoRAConfig(**{**facts, 'targets': tuple(facts['targets'])})
    model = dataclasses.replace(model, lora=adapters)
    sharding = jax.tree.leaves(abstract_params)[0].sharding
    if isinstance(sharding, NamedSharding):
      sharding = NamedSharding(sharding.mesh, PartitionSpec())
    added, _ = lora.split_trainable(llama.abstract_params(model))
    added = jax.tree.map(
      lambda spec: jax.ShapeDtypeStruct(
        spec.shape, spec.dtype, sharding=sharding
      ),
      added,
    )
    abstract_params = lora.combine(added, abstract_params)
  return model, run_state.load_params(directory, abstract_params, step)


def load_merged(
  directory: str | pathlib.Path,
  model: config_lib.LlamaConfig,
  abstract_params: Params,
  step: int | None = None,
) -> Params:
  """Returns the parameters of a policy without adapters; see `load_adapted`."""
  model, params = load_adapted(directory, model, abstract_params, step)
  if model.lora is None:
    return params
  merge = jax.jit(
    lambda tree: lora.merge(model, tree)[1],
    out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract_params),
  )
  return merge(params)

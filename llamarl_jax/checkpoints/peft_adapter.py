"""Adapters as a folder that the peft package loads onto the base model.

Linear layers keep [out, in] there, so A is [r, in] and B [out, r]; one pair a
layer, named after the module it belongs to. Format:
https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from collections.abc import Mapping
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.checkpoints import hf_tensors
from llamarl_jax.checkpoints import new_folder
from llamarl_jax.checkpoints import safetensors_format
from llamarl_jax.models.config import LlamaConfig
from llamarl_jax.models.config import projections
from llamarl_jax.sharding import spec
from llamarl_jax.types import Params

CONFIG_FILE = 'adapter_config.json'
WEIGHTS_FILE = 'adapter_model.safetensors'


def export(
  folder: str | pathlib.Path,
  params: Params,
  config: LlamaConfig,
  *,
  base_model: str,
  dtype: jax.typing.DTypeLike = jnp.float32,
) -> None:
  """Writes the adapters of a model; the weights beside them are not written.

  The folder appears when all is written.

  Args:
    folder: new or empty.
    params: with adapters, all of them on this host's devices or in its memory.
    config: of the model, with adapters.
    base_model: name or folder of the model they belong to, noted for readers.
    dtype: of the tensors written.

  Raises:
    ValueError: if the model has no adapters, the parameters are not its own,
      the folder holds something, or the dtype is not one of safetensors.
  """
  kind = np.dtype(dtype)
  name_of_dtype = safetensors_format.dtype_name(kind)
  tensors = _tensors(params, config)
  with new_folder.making(folder) as partial:
    text = json.dumps(_facts(config, base_model), indent=2) + '\n'
    (partial / CONFIG_FILE).write_text(text)
    safetensors_format.write(
      partial / WEIGHTS_FILE,
      {name: tensor.shape for name, tensor in tensors.items()},
      name_of_dtype,
      lambda name: tensors[name].astype(kind),
    )


def _facts(config: LlamaConfig, base_model: str) -> dict[str, object]:
  """Returns what adapter_config.json says; peft has defaults for the rest."""
  assert config.lora is not None
  return {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': base_model,
    'r': config.lora.rank,
    'lora_alpha': config.lora.alpha,
    'target_modules': sorted(
      name.rpartition('.')[2] for name in _modules(config)[0].values()
    ),
    'lora_dropout': 0.0,
    'bias': 'none',
    'fan_in_fan_out': False,
    'use_rslora': False,
    'use_dora': False,
    'inference_mode': True,
  }


def _tensors(params: Params, config: LlamaConfig) -> dict[str, np.ndarray]:
  """Returns the adapters of each layer under the names peft has for them."""
  if config.lora is None:
    raise ValueError(
      'this model has no adapters to export; export its weights (`hf.export`).'
    )
  leaves = spec.named_leaves(params)
  shapes = projections(config)
  tensors = {}
  for i, modules in enumerate(_modules(config)):
    for leaf, module in modules.items():
      shape = shapes[leaf.rpartition('/')[2]]
      rank = config.lora.rank
      first = _layer(leaves, f'{leaf}_lora_a', i, (*shape.inner, rank))
      second = _layer(leaves, f'{leaf}_lora_b', i, (rank, *shape.outer))
      name = f'base_model.model.{module}'
      tensors[f'{name}.lora_A.weight'] = first.reshape(-1, rank).T
      tensors[f'{name}.lora_B.weight'] = second.reshape(rank, -1).T
  return tensors


def _layer(
  leaves: Mapping[str, jax.Array], leaf: str, i: int, shape: tuple[int, ...]
) -> np.ndarray:
  """Returns one layer of a leaf, checked to have the shape wanted."""
  found = leaves[leaf].shape[1:] if leaf in leaves else None
  if found != shape:
    raise ValueError(
      f'a layer of {leaf} is {found}, not {shape}: these are not the '
      'parameters of the model whose adapters are to be exported.'
    )
  return np.asarray(leaves[leaf][i])


def _modules(config: LlamaConfig) -> list[dict[str, str]]:
  """Returns for each layer the adapted parameters and their module's names."""
  assert config.lora is not None
  modules: list[dict[str, str]] = [{} for _ in range(config.num_layers)]
  for place in hf_tensors.places(config):
    if place.leaf.rpartition('/')[2] in config.lora.targets:
      assert place.layer is not None
      module = place.name.removesuffix('.weight')
      modules[place.layer][place.leaf] = module
  return modules

"""Weights out of a Hugging Face folder onto a mesh, and back into a folder.

Loading streams: each host reads the bytes that its devices need, one layer of
a parameter at a time. Beside the finished arrays it holds no more than that,
or the shards of one parameter without layers (the embedding).
"""

from collections.abc import Mapping
import dataclasses
import json
import math
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.checkpoints import hf_config
from llamarl_jax.checkpoints import hf_reader
from llamarl_jax.checkpoints import hf_tensors
from llamarl_jax.checkpoints import new_folder
from llamarl_jax.checkpoints import safetensors_format
from llamarl_jax.models import llama
from llamarl_jax.models.config import LlamaConfig
from llamarl_jax.sharding import spec
from llamarl_jax.types import Params

_GENERATION = 'generation_config.json'
# What a tokenizer is made of, and which of its tokens end a completion.
_TOKENIZER_FILES = (
  _GENERATION,
  'added_tokens.json',
  'chat_template.jinja',
  'chat_template.json',
  'merges.txt',
  'special_tokens_map.json',
  'tokenizer.json',
  'tokenizer.model',
  'tokenizer_config.json',
  'vocab.json',
)
_TOKEN_IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')


def check_tensors(folder: str | pathlib.Path, config: LlamaConfig) -> None:
  """Checks from headers alone that a folder holds the tensors of a model.

  Raises:
    FileNotFoundError: if there are no safetensors files.
    ValueError: as `hf_tensors.check`: one error for all tensors that are
      missing, unknown or of another shape or dtype.
  """
  hf_tensors.check(folder, config)


def load_params(
  folder: str | pathlib.Path,
  config: LlamaConfig,
  shardings: Params | None = None,
  dtype: jax.typing.DTypeLike = jnp.float32,
) -> Params:
  """Returns the weights of a folder, a nested dict as `llama` describes it.

  Args:
    folder: of the model.
    config: as `hf_config.read_config` gives it. Adapters are not in a folder:
      the tree is that of the model without them.
    shardings: tree of a `NamedSharding` (or `SingleDeviceSharding`) for each
      parameter; None = whole arrays in host memory, as numpy has them.
    dtype: of the result.

  Raises:
    FileNotFoundError: if there are no safetensors files.
    ValueError: if the tensors are not those of `config`, as `check_tensors`
      says before anything is allocated.
  """
  tensors = hf_tensors.check(folder, config)
  abstract = _abstract_params(config)
  places: dict[str, list[hf_tensors.Place]] = {}
  for place in hf_tensors.places(config):
    places.setdefault(place.leaf, []).append(place)
  leaves = list(spec.named_leaves(abstract))
  with safetensors_format.opened(t.path for t in tensors.values()) as files:
    reader = hf_reader.Reader(
      files, tensors, np.dtype(dtype), tied=config.tie_embeddings
    )
    arrays: list[Any]
    if shardings is None:
      arrays = [reader.on_host(places[leaf]) for leaf in leaves]
    else:
      named = spec.named_leaves(shardings)
      arrays = [reader.on_devices(places[leaf], named[leaf]) for leaf in leaves]
  return jax.tree.unflatten(jax.tree.structure(abstract), arrays)


def export(
  folder: str | pathlib.Path,
  params: Params,
  config: LlamaConfig,
  *,
  dtype: jax.typing.DTypeLike = jnp.bfloat16,
  tokenizer_files_from: str | pathlib.Path | None = None,
  token_ids: Mapping[str, Any] | None = None,
  max_file_bytes: int = 5 * 10**9,
) -> None:
  """Writes a folder that transformers loads: config, weights, tokenizer.

  The folder appears when all is written. Weights are written one tensor at a
  time, so the host holds one, not the model.

  Args:
    folder: new or empty.
    params: arrays, all of them on this host's devices or in its memory;
      adapters merged.
    config: of the model.
    dtype: of the weights written.
    tokenizer_files_from: model folder to copy tokenizer, chat template and
      generation_config.json from, as far as it has them.
    token_ids: 'bos_token_id', 'eos_token_id' and 'pad_token_id', as far as
      known; None = as in the config.json of `tokenizer_files_from`.
    max_file_bytes: weights beyond it go to further files, with an index.

  Raises:
    FileNotFoundError: if `tokenizer_files_from` is not a model folder.
    ValueError: if the folder holds something, the dtype is not one of
      safetensors, or the parameters are not those of the model.
  """
  kind = np.dtype(dtype)
  name_of_dtype = safetensors_format.dtype_name(kind)
  _check_params(params, config)
  if token_ids is None and tokenizer_files_from is not None:
    token_ids = read_token_ids(tokenizer_files_from)
  with new_folder.making(folder) as partial:
    hf_config.write_config(
      partial, config, dtype=kind.name, token_ids=token_ids
    )
    if tokenizer_files_from is not None:
      copy_tokenizer_files(tokenizer_files_from, partial)
    if token_ids and not (partial / _GENERATION).exists():
      text = json.dumps(dict(token_ids), indent=2) + '\n'
      (partial / _GENERATION).write_text(text)
    _write_weights(partial, params, config, name_of_dtype, max_file_bytes)


def copy_tokenizer_files(
  source: str | pathlib.Path, folder: str | pathlib.Path
) -> None:
  """Copies tokenizer files and generation_config.json, as far as there are."""
  for name in _TOKENIZER_FILES:
    path = pathlib.Path(source) / name
    if path.is_file():
      shutil.copyfile(path, pathlib.Path(folder) / name)


def read_token_ids(folder: str | pathlib.Path) -> dict[str, Any]:
  """Returns the ids of special tokens that the config.json of a folder has."""
  fields = hf_config.read_fields(folder)
  return {key: fields[key] for key in _TOKEN_IDS if key in fields}


def _abstract_params(config: LlamaConfig) -> Params:
  return llama.abstract_params(dataclasses.replace(config, lora=None))


def _check_params(params: Params, config: LlamaConfig) -> None:
  """Raises one error that names every leaf that is not one of the model."""
  wanted = spec.named_leaves(_abstract_params(config))
  given = spec.named_leaves(params)
  faults = [f'{leaf} is missing' for leaf in wanted if leaf not in given]
  for leaf, array in given.items():
    if leaf not in wanted:
      faults.append(f'{leaf} is not one (merge adapters first)')
    elif array.shape != wanted[leaf].shape:
      faults.append(f'{leaf} is {array.shape}, not {wanted[leaf].shape}')
    elif isinstance(array, jax.Array) and not array.is_fully_addressable:
      faults.append(f'{leaf} is partly on other hosts (save a checkpoint)')
  if faults:
    raise ValueError(
      'These are not the parameters of the model to export: '
      + '; '.join(faults)
    )


def _write_weights(
  folder: pathlib.Path,
  params: Params,
  config: LlamaConfig,
  dtype: str,
  max_file_bytes: int,
) -> None:
  """Writes one file of weights, or several with an index."""
  leaves = spec.named_leaves(params)
  places = {place.name: place for place in hf_tensors.places(config)}
  kind = safetensors_format.DTYPES[dtype]

  def make(name: str) -> np.ndarray:
    place = places[name]
    leaf = leaves[place.leaf]
    array = np.asarray(leaf if place.layer is None else leaf[place.layer])
    return place.viewed(array).astype(kind).reshape(place.shape)

  files: list[dict[str, tuple[int, ...]]] = [{}]
  filled = total = 0
  for name, place in places.items():
    nbytes = math.prod(place.shape) * kind.itemsize
    if filled and filled + nbytes > max_file_bytes:
      files.append({})
      filled = 0
    files[-1][name] = place.shape
    filled += nbytes
    total += nbytes
  if len(files) == 1:
    path = folder / hf_tensors.SINGLE_FILE
    safetensors_format.write(path, files[0], dtype, make)
    return
  weight_map = {}
  for i, shapes in enumerate(files):
    file = f'model-{i + 1:05}-of-{len(files):05}.safetensors'
    safetensors_format.write(folder / file, shapes, dtype, make)
    weight_map.update(dict.fromkeys(shapes, file))
  index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
  text = json.dumps(index, indent=2) + '\n'
  (folder / hf_tensors.INDEX_FILE).write_text(text)

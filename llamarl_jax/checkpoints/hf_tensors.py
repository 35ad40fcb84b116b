"""Which tensor of a Hugging Face folder is which parameter, and in what layout.

Linear layers are kept [out, in] there, with heads and their channels in one
axis; here [in, out], with an axis for each, and layers stacked.
"""

from collections.abc import Sequence
import dataclasses
import json
import math
import pathlib
import re

import numpy as np

from llamarl_jax.checkpoints import safetensors_format
from llamarl_jax.models import llama
from llamarl_jax.models.config import LlamaConfig
from llamarl_jax.sharding import spec

SINGLE_FILE = 'model.safetensors'
INDEX_FILE = 'model.safetensors.index.json'
EMBEDDING = 'model.embed_tokens.weight'
HEAD = 'lm_head.weight'

# Buffers of rotary embedding that old checkpoints carry: computed, not trained.
_HARMLESS = re.compile(
  r'model\.(layers\.\d+\.self_attn\.)?rotary_emb'
  r'\.(inv_freq|cos_cached|sin_cached)'
)


@dataclasses.dataclass(frozen=True)
class Place:
  """A tensor of a folder, and the part of a parameter it is.

  Attributes:
    name: of the tensor.
    leaf: path of the parameter, such as 'layers/mlp/up'.
    layer: place along its first axis, or None where it is not stacked.
    shape: of the tensor.
    view: the same elements, with heads and channels as axes of their own.
    order: axes of `view` in the order of the parameter (one layer of it).
  """

  name: str
  leaf: str
  layer: int | None
  shape: tuple[int, ...]
  view: tuple[int, ...]
  order: tuple[int, ...]

  def to_view(self, axes: Sequence[slice]) -> tuple[slice, ...]:
    """Returns slices of the parameter as slices of the view."""
    return tuple(axes[self.order.index(i)] for i in range(len(self.view)))

  def viewed(self, array: np.ndarray) -> np.ndarray:
    """Returns the parameter with its axes in the order of the view."""
    return array.transpose(np.argsort(self.order))


# Parameter: tensor, the order of its axes, and how many of the view's axes
# make the first axis of the tensor.
_LAYER = {
  'attention_norm/scale': ('input_layernorm.weight', (0,), 1),
  'attention/query': ('self_attn.q_proj.weight', (2, 0, 1), 2),
  'attention/key': ('self_attn.k_proj.weight', (2, 0, 1), 2),
  'attention/value': ('self_attn.v_proj.weight', (2, 0, 1), 2),
  'attention/output': ('self_attn.o_proj.weight', (1, 2, 0), 1),
  'attention/query_bias': ('self_attn.q_proj.bias', (0, 1), 2),
  'attention/key_bias': ('self_attn.k_proj.bias', (0, 1), 2),
  'attention/value_bias': ('self_attn.v_proj.bias', (0, 1), 2),
  'attention/query_norm/scale': ('self_attn.q_norm.weight', (0,), 1),
  'attention/key_norm/scale': ('self_attn.k_norm.weight', (0,), 1),
  'mlp_norm/scale': ('post_attention_layernorm.weight', (0,), 1),
  'mlp/gate': ('mlp.gate_proj.weight', (1, 0), 1),
  'mlp/up': ('mlp.up_proj.weight', (1, 0), 1),
  'mlp/down': ('mlp.down_proj.weight', (1, 0), 1),
}
_WHOLE = {
  'embedding': (EMBEDDING, (0, 1), 1),
  'final_norm/scale': ('model.norm.weight', (0,), 1),
  'head': (HEAD, (1, 0), 1),
}


def places(config: LlamaConfig) -> list[Place]:
  """Returns the tensors of a model, in the order of its layers.

  Args:
    config: of the model; its adapters are not in such a folder.
  """
  base = dataclasses.replace(config, lora=None)
  found = []
  for leaf, param in spec.named_leaves(llama.abstract_params(base)).items():
    inner = leaf.removeprefix('layers/')
    if inner == leaf:
      name, order, rows = _WHOLE[leaf]
      found.append(_place(name, leaf, None, param.shape, order, rows))
      continue
    name, order, rows = _LAYER[inner]
    for i in range(config.num_layers):
      full = f'model.layers.{i}.{name}'
      found.append(_place(full, leaf, i, param.shape[1:], order, rows))
  return sorted(found, key=lambda p: (p.layer is None, p.layer or 0, p.name))


def find(folder: str | pathlib.Path) -> dict[str, safetensors_format.Tensor]:
  """Returns by name the tensors in the files of a folder, from headers alone.

  As transformers does, one file `model.safetensors` goes before an index.

  Raises:
    FileNotFoundError: if there are no such files, or one that the index names
      is missing.
    ValueError: if a file is damaged.
  """
  folder = pathlib.Path(folder)
  if (folder / SINGLE_FILE).is_file():
    return safetensors_format.read_header(folder / SINGLE_FILE)
  path = folder / INDEX_FILE
  if not path.is_file():
    raise FileNotFoundError(
      f'{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; give the folder '
      'of a model, its weights in safetensors files.'
    )
  try:
    files = json.loads(path.read_text())['weight_map']
    names = sorted(set(files.values()))
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(
      f'{path} is damaged ({error!r}): fetch it again.'
    ) from error
  missing = [name for name in names if not (folder / name).is_file()]
  if missing:
    raise FileNotFoundError(
      f'{folder} lacks {missing}, which {INDEX_FILE} names: fetch them.'
    )
  found = {}
  for name in names:
    for tensor, where in safetensors_format.read_header(folder / name).items():
      # A name in two files would be read from either.
      if files.get(tensor) == name:
        found[tensor] = where
  return found


def check(
  folder: str | pathlib.Path, config: LlamaConfig
) -> dict[str, safetensors_format.Tensor]:
  """Returns the tensors of a folder, checked to be those of the model.

  Two kinds of extra tensors are let pass: buffers of rotary embedding, which
  are computed from the config, and the `lm_head.weight` of a model with tied
  embeddings, which must then equal the embedding (checked as it is loaded).

  Args:
    folder: of the model.
    config: of the model.

  Raises:
    FileNotFoundError: if there are no safetensors files.
    ValueError: if tensors are missing, unknown, or of another shape or dtype;
      one error that names them all.
  """
  found = find(folder)
  wanted = {place.name: place for place in places(config)}
  faults = [f'{name} is missing' for name in wanted if name not in found]
  for name, tensor in found.items():
    shape = wanted[name].shape if name in wanted else None
    if name == HEAD and config.tie_embeddings:
      shape = (config.vocab_size, config.width)
    if shape is None:
      if not _HARMLESS.fullmatch(name):
        faults.append(f'{name} {tensor.shape} is unknown')
      continue
    if tensor.shape != shape:
      faults.append(f'{name} is {tensor.shape}, not {shape}')
    if tensor.dtype not in safetensors_format.DTYPES:
      faults.append(
        f'{name} is {tensor.dtype}, not one of '
        f'{sorted(safetensors_format.DTYPES)}'
      )
  dtypes = {found[name].dtype for name in (EMBEDDING, HEAD) if name in found}
  if config.tie_embeddings and len(dtypes) > 1:
    faults.append(f'{HEAD} and {EMBEDDING}, which are tied, differ in dtype')
  if faults:
    raise ValueError(
      f'{folder} does not hold the tensors of its config.json: '
      f'{"; ".join(faults)}. Take weights and config.json from one model.'
    )
  return found


def _place(
  name: str,
  leaf: str,
  layer: int | None,
  sizes: tuple[int, ...],
  order: tuple[int, ...],
  rows: int,
) -> Place:
  view = tuple(sizes[order.index(i)] for i in range(len(order)))
  shape: tuple[int, ...] = (math.prod(view[:rows]),)
  if rows < len(view):
    shape += (math.prod(view[rows:]),)
  return Place(name, leaf, layer, shape, view, order)

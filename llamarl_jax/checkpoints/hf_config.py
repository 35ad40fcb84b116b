"""The config.json of a Hugging Face model folder, in and out.

Every key is known to be used, known not to touch the network, or an error: a
feature that is not supported never passes as one that is.
"""

from collections.abc import Mapping
import dataclasses
import json
import pathlib
from typing import Any

from llamarl_jax.models.config import LlamaConfig
from llamarl_jax.models.config import RopeScaling

_FILE = 'config.json'


@dataclasses.dataclass(frozen=True)
class _Family:
  """What a model type implies, and what its keys default to.

  Attributes:
    architecture: the class of its language models.
    defaults: of keys left out of the file, as transformers has them.
    qkv_bias: whether queries, keys and values have a bias.
    qk_norm: whether queries and keys are normed.
  """

  architecture: str
  defaults: Mapping[str, Any]
  qkv_bias: bool = False
  qk_norm: bool = False


FAMILIES: Mapping[str, _Family] = {
  'llama': _Family('LlamaForCausalLM', {'max_position_embeddings': 2048}),
  'mistral': _Family(
    'MistralForCausalLM',
    {
      'max_position_embeddings': 131072,
      'num_key_value_heads': 8,
      'sliding_window': 4096,
    },
  ),
  'qwen2': _Family(
    'Qwen2ForCausalLM',
    {'max_position_embeddings': 32768, 'num_key_value_heads': 32},
    qkv_bias=True,
  ),
  'qwen3': _Family(
    'Qwen3ForCausalLM',
    {
      'max_position_embeddings': 32768,
      'num_key_value_heads': 32,
      'head_dim': 128,
    },
    qk_norm=True,
  ),
}
_DEFAULTS: Mapping[str, Any] = {
  'rms_norm_eps': 1e-6,
  'rope_theta': 10000.0,
  'tie_word_embeddings': False,
  'hidden_act': 'silu',
}
_SIZES = (
  'vocab_size',
  'hidden_size',
  'intermediate_size',
  'num_hidden_layers',
  'num_attention_heads',
)
# Keys that are read below.
_READ = frozenset(
  [
    *_SIZES,
    *_DEFAULTS,
    'architectures',
    'head_dim',
    'layer_types',
    'max_position_embeddings',
    'model_type',
    'num_key_value_heads',
    'rope_parameters',
    'rope_scaling',
    'sliding_window',
    'use_sliding_window',
  ]
)
# Keys that say nothing of the network: token ids and defaults of generation,
# how it was initialized, which program wrote it, and how its weights were
# split for training.
_HARMLESS = frozenset(
  [
    '_attn_implementation_autoset',
    '_name_or_path',
    'bos_token_id',
    'do_sample',
    'dtype',
    'eos_token_id',
    'initializer_range',
    'is_llama_config',
    'max_length',
    'max_window_layers',
    'pad_token_id',
    'pretraining_tp',
    'temperature',
    'top_k',
    'top_p',
    'torch_dtype',
    'transformers.js_config',
    'transformers_version',
    'unk_token_id',
    'unsloth_fixed',
    'unsloth_version',
    'use_cache',
  ]
)
# Why a key that is set is refused, for those that people will meet.
_REFUSED = {
  'attention_bias': 'biases of the attention output are not supported',
  'attention_dropout': 'dropout is not supported',
  'auto_map': 'code that comes with a model is not run',
  'mlp_bias': 'biases of the MLP are not supported',
  'num_experts': 'mixtures of experts are not supported',
  'num_local_experts': 'mixtures of experts are not supported',
  'quantization_config': 'quantized weights are not supported; take the '
  'bfloat16 checkpoint',
}
_SCALING = {
  'factor': 'factor',
  'low_freq_factor': 'low_frequency_factor',
  'high_freq_factor': 'high_frequency_factor',
  'original_max_position_embeddings': 'original_max_position',
}


def read_config(folder: str | pathlib.Path) -> LlamaConfig:
  """Returns the model that the config.json of a folder describes.

  Both spellings of rotary scaling are read: `rope_scaling` beside
  `rope_theta`, and the `rope_parameters` of transformers 5.

  Args:
    folder: of the model.

  Raises:
    FileNotFoundError: if there is no such folder, or no config.json in it.
    ValueError: if the architecture or a feature is not supported, or a value
      is missing or makes no sense; names it, and what is supported.
  """
  path = pathlib.Path(folder) / _FILE
  fields = read_fields(folder)
  family = _family(path, fields)
  _check_fields(path, fields, family)
  values = {**_DEFAULTS, **family.defaults}
  values.update({k: v for k, v in fields.items() if v is not None})
  heads = values['num_attention_heads']
  # An explicit null says as many as query heads, in every family.
  kv_heads = {**family.defaults, **fields}.get('num_key_value_heads') or heads
  theta, scaling = _rope(path, fields, values['rope_theta'])
  try:
    return LlamaConfig(
      vocab_size=values['vocab_size'],
      width=values['hidden_size'],
      num_layers=values['num_hidden_layers'],
      num_heads=heads,
      num_kv_heads=kv_heads,
      head_dim=values.get('head_dim', values['hidden_size'] // heads),
      mlp_width=values['intermediate_size'],
      rope_theta=theta,
      norm_epsilon=float(values['rms_norm_eps']),
      tie_embeddings=values['tie_word_embeddings'],
      max_position=values['max_position_embeddings'],
      qkv_bias=family.qkv_bias,
      qk_norm=family.qk_norm,
      rope_scaling=scaling,
    )
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error


def read_fields(folder: str | pathlib.Path) -> dict[str, Any]:
  """Returns the keys of the config.json of a folder, as they stand there.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it is not a JSON object.
  """
  path = pathlib.Path(folder) / _FILE
  if not path.is_file():
    raise FileNotFoundError(
      f'{path}: no such file; give the folder of a Hugging Face model, with '
      'its config.json, safetensors and tokenizer files.'
    )
  try:
    fields = json.loads(path.read_text())
  except ValueError as error:
    raise ValueError(f'{path} is damaged ({error}): fetch it again.') from error
  if not isinstance(fields, dict):
    raise ValueError(f'{path} is not a JSON object: fetch it again.')
  return fields


def write_config(
  folder: str | pathlib.Path,
  config: LlamaConfig,
  *,
  dtype: str = 'bfloat16',
  token_ids: Mapping[str, Any] | None = None,
) -> None:
  """Writes a config.json that transformers 4 and 5 read as this model.

  Args:
    folder: of the model; must exist.
    config: of the model, without adapters.
    dtype: of the weights: 'bfloat16', 'float16' or 'float32'.
    token_ids: 'bos_token_id', 'eos_token_id' and 'pad_token_id', where known.

  Raises:
    ValueError: if transformers has no architecture for the model.
  """
  if config.qkv_bias and config.qk_norm:
    raise ValueError(
      'qkv_bias=True with qk_norm=True: no architecture of transformers has '
      'both; leave one out to export the model.'
    )
  model_type = 'llama'
  if config.qkv_bias:
    model_type = 'qwen2'
  elif config.qk_norm:
    model_type = 'qwen3'
  scaling = config.rope_scaling
  fields = {
    'architectures': [FAMILIES[model_type].architecture],
    'model_type': model_type,
    'vocab_size': config.vocab_size,
    'hidden_size': config.width,
    'intermediate_size': config.mlp_width,
    'num_hidden_layers': config.num_layers,
    'num_attention_heads': config.num_heads,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'hidden_act': 'silu',
    'max_position_embeddings': config.max_position,
    'rms_norm_eps': config.norm_epsilon,
    # The older spelling, which transformers 5 reads as well.
    'rope_theta': config.rope_theta,
    'rope_scaling': None
    if scaling is None
    else {
      'rope_type': 'llama3',
      **{key: getattr(scaling, name) for key, name in _SCALING.items()},
    },
    'attention_bias': False,
    'attention_dropout': 0.0,
    'tie_word_embeddings': config.tie_embeddings,
    'torch_dtype': dtype,
    **dict(token_ids or {}),
  }
  if model_type == 'qwen2':
    del fields['attention_bias']  # Its biases are part of the architecture.
  text = json.dumps(fields, indent=2) + '\n'
  (pathlib.Path(folder) / _FILE).write_text(text)


def _family(path: pathlib.Path, fields: Mapping[str, Any]) -> _Family:
  model_type = fields.get('model_type', '')
  if model_type not in FAMILIES:
    raise ValueError(
      f'{path}: model_type {model_type!r} is not supported; those that are: '
      f'{sorted(FAMILIES)} (Llama 2 to 3.3, SmolLM2, Mistral without sliding '
      'window, Qwen2 and 2.5, Qwen3 dense).'
    )
  family = FAMILIES[model_type]
  architectures = fields.get('architectures') or [family.architecture]
  if architectures != [family.architecture]:
    raise ValueError(
      f'{path}: architectures {architectures} are not supported; of '
      f'{model_type!r} only {family.architecture!r} is.'
    )
  return family


def _check_fields(
  path: pathlib.Path, fields: Mapping[str, Any], family: _Family
) -> None:
  """Raises one error that names all that is missing or not supported."""
  faults = [f'{key} is missing' for key in _SIZES if fields.get(key) is None]
  numbers = [*_SIZES, 'num_key_value_heads', 'head_dim']
  for key in [*numbers, 'max_position_embeddings']:
    value = fields.get(key)
    if value is not None and (type(value) is not int or value < 1):
      faults.append(f'{key}={value!r} is not a whole number above 0')
  for key in ('rms_norm_eps', 'rope_theta'):
    value = fields.get(key)
    if value is not None and not isinstance(value, int | float):
      faults.append(f'{key}={value!r} is not a number')
  if fields.get('hidden_act', 'silu') != 'silu':
    faults.append(f"hidden_act={fields['hidden_act']!r}: only 'silu' is")
  if fields.get('tie_word_embeddings') not in (None, True, False):
    faults.append('tie_word_embeddings is neither true nor false')
  window = fields.get('sliding_window', family.defaults.get('sliding_window'))
  # Qwen files name a window which only this switch puts to use.
  used = fields.get('use_sliding_window', 'sliding_window' in family.defaults)
  if used and window is not None:
    faults.append(
      f'sliding_window={window}: only attention over the whole sequence is '
      '(null, or use_sliding_window=false)'
    )
  other = set(fields.get('layer_types') or ()) - {'full_attention'}
  if other:
    faults.append(f"layer_types {sorted(other)}: only 'full_attention' is")
  for key in sorted(fields.keys() - _READ - _HARMLESS):
    # What is switched off is not there.
    if fields[key]:
      reason = _REFUSED.get(key, 'not known')
      faults.append(f'{key}={str(fields[key])[:60]}: {reason}')
  if faults:
    raise ValueError(
      f'{path} asks for what is not supported: {"; ".join(faults)}. Take a '
      'model without it; a key that does not change the network may be deleted '
      'from the file.'
    )


def _rope(
  path: pathlib.Path, fields: Mapping[str, Any], theta: float
) -> tuple[float, RopeScaling | None]:
  """Returns the base of the rotary wavelengths, and how they are scaled."""
  rope = dict(fields.get('rope_parameters') or fields.get('rope_scaling') or {})
  base = rope.pop('rope_theta', theta)
  # A file may have both spellings, for both versions of transformers.
  older = fields.get('rope_scaling') or rope
  if older != rope or (fields.get('rope_theta') or base) != base:
    raise ValueError(
      f'{path}: rope_parameters {fields["rope_parameters"]} differ from '
      f'rope_scaling {older} or rope_theta {theta}; delete what is wrong.'
    )
  old, new = rope.pop('type', None), rope.pop('rope_type', None)
  kind = new or old or 'default'
  if kind == 'default' and not any(rope.values()):
    return float(base), None
  unknown = sorted(key for key in rope.keys() - _SCALING.keys() if rope[key])
  if kind != 'llama3' or unknown:
    raise ValueError(
      f'{path}: rope scaling of type {kind!r}'
      + (f' with {unknown}' if unknown else '')
      + " is not supported; those that are: 'default' (none) and 'llama3', "
      f'with {list(_SCALING)}.'
    )
  missing = sorted(_SCALING.keys() - rope.keys())
  if missing:
    raise ValueError(
      f"{path}: rope scaling of type 'llama3' lacks {missing}: fetch the file "
      'again.'
    )
  try:
    scaling = RopeScaling(**{_SCALING[key]: rope[key] for key in _SCALING})
  except (TypeError, ValueError) as error:
    raise ValueError(f'{path}: {error}') from error
  return float(base), scaling

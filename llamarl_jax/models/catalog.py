"""Published architectures by name, for plans made without their files.

Sizes as in the config.json of each release; the text models of Llama 3.1 and
3.2 are described in Grattafiori et al. (2024), https://arxiv.org/abs/2407.21783
"""

from collections.abc import Mapping
import dataclasses

from llamarl_jax.models import config as config_lib


def _llama3(
  width: int,
  num_layers: int,
  num_heads: int,
  mlp_width: int,
  *,
  rope_factor: float = 8.0,
  tie_embeddings: bool = False,
) -> config_lib.LlamaConfig:
  """Returns a Llama 3.1 or 3.2; they differ in these numbers only."""
  return config_lib.LlamaConfig(
    vocab_size=128256,
    width=width,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=8,
    head_dim=width // num_heads,
    mlp_width=mlp_width,
    rope_theta=500000.0,
    norm_epsilon=1e-5,
    tie_embeddings=tie_embeddings,
    max_position=131072,
    rope_scaling=config_lib.RopeScaling(
      factor=rope_factor,
      low_frequency_factor=1.0,
      high_frequency_factor=4.0,
      original_max_position=8192,
    ),
  )


ARCHITECTURES: Mapping[str, config_lib.LlamaConfig] = {
  'llama-3.2-1b': _llama3(
    2048, 16, 32, 8192, rope_factor=32.0, tie_embeddings=True
  ),
  'llama-3.2-3b': _llama3(
    3072, 28, 24, 8192, rope_factor=32.0, tie_embeddings=True
  ),
  'llama-3.1-8b': _llama3(4096, 32, 32, 14336),
  'llama-3.1-70b': _llama3(8192, 80, 64, 28672),
  'llama-3.1-405b': _llama3(16384, 126, 128, 53248),
}

# What a user of the same network may choose: how long sequences get, how many
# tokens the tokenizer has, what is trained.
_FREE = ('max_position', 'num_tokens', 'lora')


def find(name: str) -> config_lib.LlamaConfig:
  """Returns the sizes of a published model.

  Args:
    name: a key of ARCHITECTURES.

  Raises:
    ValueError: there is no such model; lists those there are.
  """
  if name not in ARCHITECTURES:
    raise ValueError(
      f'model.architecture={name!r} is not known: choose one of'
      f" {sorted(ARCHITECTURES)}, or '' for whatever the file has"
    )
  return ARCHITECTURES[name]


def check(name: str, found: config_lib.LlamaConfig) -> None:
  """Checks that a model is the one it is said to be.

  Args:
    name: a key of ARCHITECTURES, or '' for any model.
    found: what its file says.

  Raises:
    ValueError: lists every number that differs.
  """
  if not name:
    return
  expected = find(name)
  faults = [
    f'{field.name} is {getattr(found, field.name)}, not'
    f' {getattr(expected, field.name)}'
    for field in dataclasses.fields(expected)
    if field.name not in _FREE
    and getattr(found, field.name) != getattr(expected, field.name)
  ]
  if faults:
    raise ValueError(
      f'the model of model.path is not model.architecture={name!r}: '
      + '; '.join(faults)
      + ". Give the folder of that model, or set model.architecture=''"
    )

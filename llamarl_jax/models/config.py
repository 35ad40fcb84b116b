"""The numbers that make a Llama this Llama."""

import dataclasses
import math
from typing import NamedTuple

_SIZES = (
  'vocab_size',
  'width',
  'num_layers',
  'num_heads',
  'num_kv_heads',
  'head_dim',
  'mlp_width',
  'max_position',
)


# What `LoRAConfig.targets` may name.
PROJECTIONS = ('query', 'key', 'value', 'output', 'gate', 'up', 'down')


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How Llama 3.1 and later stretch rotary wavelengths over longer contexts.

  Attributes:
    factor: long wavelengths are multiplied by it, at least 1.
    low_frequency_factor: a wavelength is long if fewer than this many of it
      fit into the original context.
    high_frequency_factor: and short, hence kept, if more than this many do.
    original_max_position: context of the first training, in tokens.
  """

  factor: float
  low_frequency_factor: float
  high_frequency_factor: float
  original_max_position: int

  def __post_init__(self) -> None:
    if self.factor < 1:
      raise ValueError(
        f'factor is {self.factor}; rope scaling stretches a context, so it '
        'must be at least 1.'
      )
    if not 0 < self.low_frequency_factor < self.high_frequency_factor:
      raise ValueError(
        f'low_frequency_factor is {self.low_frequency_factor}; it must be '
        f'above 0 and below high_frequency_factor {self.high_frequency_factor}.'
      )
    if self.original_max_position < 1:
      raise ValueError(
        f'original_max_position is {self.original_max_position}; it must be '
        'at least 1.'
      )


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
  """Low-rank adapters beside frozen projections. Hu et al. (2021).

  Attributes:
    rank: inner width of an adapter (r).
    alpha: an adapter is added times alpha / rank.
    targets: the projections that have one, among PROJECTIONS.
  """

  rank: int
  alpha: float
  targets: tuple[str, ...] = PROJECTIONS

  def __post_init__(self) -> None:
    if self.rank < 1:
      raise ValueError(f'LoRA rank is {self.rank}; it must be at least 1.')
    if not self.alpha > 0:
      raise ValueError(
        f'LoRA alpha is {self.alpha}; it must be above 0 (twice the rank is '
        'common).'
      )
    unknown = [name for name in self.targets if name not in PROJECTIONS]
    repeated = len(set(self.targets)) < len(self.targets)
    if unknown or repeated or not self.targets:
      raise ValueError(
        f'LoRA targets are {list(self.targets)}; name each of some of '
        f'{list(PROJECTIONS)} once.'
      )

  @property
  def scale(self) -> float:
    """What an adapter is multiplied by."""
    return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
  """Sizes and constants of a Llama.

  Attributes:
    vocab_size: tokens known (V).
    width: of the residual stream (D).
    num_layers: decoder blocks (L).
    num_heads: query heads (H).
    num_kv_heads: key/value heads (K), each shared by H / K query heads.
    head_dim: width of one head (A), even.
    mlp_width: of the gated hidden layer (F).
    rope_theta: base of the rotary wavelengths.
    norm_epsilon: added to the mean square in RMSNorm.
    tie_embeddings: whether the embedding is also the output projection.
    max_position: longest sequence the model is meant for, in tokens.
    qkv_bias: whether queries, keys and values have a bias (Qwen2).
    qk_norm: whether queries and keys are normed, each head by itself, before
      they are rotated (Qwen3).
    rope_scaling: of the rotary wavelengths, None = as `rope_theta` gives them.
    num_tokens: tokens the tokenizer has, where the vocabulary is padded beyond
      them: the rest can be neither sampled nor scored. None = all.
    lora: adapters to train in place of the weights, None = no adapters.
  """

  vocab_size: int
  width: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_width: int
  rope_theta: float
  norm_epsilon: float = 1e-5
  tie_embeddings: bool = True
  max_position: int = 2048
  qkv_bias: bool = False
  qk_norm: bool = False
  rope_scaling: RopeScaling | None = None
  num_tokens: int | None = None
  lora: LoRAConfig | None = None

  def __post_init__(self) -> None:
    for name in _SIZES:
      value = getattr(self, name)
      if value < 1:
        raise ValueError(f'{name} is {value}; it must be at least 1.')
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_heads {self.num_heads} is not a multiple of num_kv_heads '
        f'{self.num_kv_heads}; each key/value head serves as many query heads '
        'as the next.'
      )
    if self.head_dim % 2:
      raise ValueError(
        f'head_dim is {self.head_dim}; rotary embedding rotates pairs, so it '
        'must be even.'
      )
    if self.rope_theta <= 0:
      raise ValueError(
        f'rope_theta is {self.rope_theta}; it must be positive (Llama 2 uses '
        '10000, Llama 3 500000).'
      )
    if self.norm_epsilon <= 0:
      raise ValueError(
        f'norm_epsilon is {self.norm_epsilon}; it must be positive.'
      )
    if self.num_tokens is not None and not (
      1 <= self.num_tokens <= self.vocab_size
    ):
      raise ValueError(
        f'num_tokens is {self.num_tokens}; it must be between 1 and vocab_size '
        f'{self.vocab_size}, or None for all.'
      )


class Projection(NamedTuple):
  """The shape of one projection, and the logical axes of its dimensions.

  Attributes:
    inner: dimensions that are summed over.
    outer: dimensions of the result.
    inner_axes: names of `inner`.
    outer_axes: names of `outer`.
  """

  inner: tuple[int, ...]
  outer: tuple[int, ...]
  inner_axes: tuple[str, ...]
  outer_axes: tuple[str, ...]


# Sizes and logical axes of what a projection reads or gives.
_End = tuple[tuple[int, ...], tuple[str, ...]]


def projections(config: LlamaConfig) -> dict[str, Projection]:
  """Returns the projections of a layer by name: weights and adapters alike."""
  width: _End = (config.width,), ('embed',)
  queries: _End = (config.num_heads, config.head_dim), ('heads', 'head_dim')
  shared: _End = (
    (config.num_kv_heads, config.head_dim),
    ('kv_heads', 'head_dim'),
  )
  hidden: _End = (config.mlp_width,), ('mlp',)
  ends = {
    'query': (width, queries),
    'key': (width, shared),
    'value': (width, shared),
    'output': (queries, width),
    'gate': (width, hidden),
    'up': (width, hidden),
    'down': (hidden, width),
  }
  return {
    name: Projection(source[0], target[0], source[1], target[1])
    for name, (source, target) in ends.items()
  }


def num_parameters(config: LlamaConfig) -> int:
  """Returns the number of parameters, a tied embedding counted once.

  Adapters, where the config has any, are counted beside the weights.
  """
  shapes = projections(config)
  layer = 2 * config.width
  for shape in shapes.values():
    layer += math.prod(shape.inner) * math.prod(shape.outer)
  if config.qkv_bias:
    layer += (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
  if config.qk_norm:
    layer += 2 * config.head_dim
  if config.lora is not None:
    for name in config.lora.targets:
      ends = math.prod(shapes[name].inner) + math.prod(shapes[name].outer)
      layer += config.lora.rank * ends
  embedding = config.vocab_size * config.width
  head = 0 if config.tie_embeddings else embedding
  return embedding + config.num_layers * layer + config.width + head

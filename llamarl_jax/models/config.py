"""The numbers that make a Llama this Llama."""

import dataclasses

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


def num_parameters(config: LlamaConfig) -> int:
  """Returns the number of parameters, a tied embedding counted once."""
  attention = (
    2
    * config.width
    * config.head_dim
    * (config.num_heads + config.num_kv_heads)
  )
  mlp = 3 * config.width * config.mlp_width
  layer = attention + mlp + 2 * config.width
  embedding = config.vocab_size * config.width
  head = 0 if config.tie_embeddings else embedding
  return embedding + config.num_layers * layer + config.width + head

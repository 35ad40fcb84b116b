"""What a Llama computes and moves: FLOPs, bytes and elements, counted.

Exact counts of the shapes, no rates: the same for every device.
"""

from collections.abc import Mapping
import functools

from llamarl_jax.models import config as config_lib

# How often the layers' arithmetic is done in a train step, by what is kept
# for the backward pass: forward, twice that backward, and what is recomputed.
TRAIN_PASSES: Mapping[str, float] = {'none': 3.0, 'dots': 3.0, 'full': 4.0}


@functools.lru_cache
def num_parameters(config: config_lib.LlamaConfig) -> int:
  """Returns `config.num_parameters`, remembered: searches ask often."""
  return config_lib.num_parameters(config)


def layer_weights(config: config_lib.LlamaConfig) -> int:
  """Returns the elements of one layer's matrices."""
  heads = config.num_heads * config.head_dim
  shared = config.num_kv_heads * config.head_dim
  attention = config.width * (2 * heads + 2 * shared)
  return attention + 3 * config.width * config.mlp_width


def head_weights(config: config_lib.LlamaConfig) -> int:
  """Returns the elements of the output projection."""
  return config.vocab_size * config.width


def forward_flops(
  config: config_lib.LlamaConfig,
  *,
  num_tokens: float,
  num_pairs: float,
  num_scored: float,
) -> float:
  """Returns the FLOPs of products in a forward pass.

  flops = 2 L P tokens + 4 L H A pairs + 2 D V scored

  P weights a layer; a pair is a token and one that it attends to. Norms,
  rotations and softmax are not counted.

  Args:
    config: sizes of the model.
    num_tokens: tokens that go through the layers.
    num_pairs: of attention, in one head of one layer; T (T + 1) / 2 for a
      sequence of T.
    num_scored: tokens that get logits.
  """
  heads = config.num_heads * config.head_dim
  return (
    2.0 * config.num_layers * layer_weights(config) * num_tokens
    + 4.0 * config.num_layers * heads * num_pairs
    + 2.0 * head_weights(config) * num_scored
  )


def attention_flops(config: config_lib.LlamaConfig, num_pairs: float) -> float:
  """Returns the FLOPs of scores and their product with values, all layers."""
  heads = config.num_heads * config.head_dim
  return 4.0 * config.num_layers * heads * num_pairs


def cache_elements(config: config_lib.LlamaConfig) -> int:
  """Returns the elements of the key/value cache that one token takes."""
  return 2 * config.num_layers * config.num_kv_heads * config.head_dim


def saved_elements(
  config: config_lib.LlamaConfig, remat: str
) -> tuple[int, int]:
  """Returns what a layer keeps of a token for its backward pass.

  'full' keeps the layer's input; 'dots' also its products with weights; 'none'
  also normed inputs, rotated queries and keys, the result of attention and
  both factors of the gated layer. Scores are never kept: attention is
  computed block by block.

  Args:
    config: sizes of the model.
    remat: a key of TRAIN_PASSES.

  Returns:
    Elements of the residual's width, which devices of a tensor group all
    hold; and elements that the group shares out.

  Raises:
    ValueError: the policy is not known.
  """
  heads = config.num_heads * config.head_dim
  shared = config.num_kv_heads * config.head_dim
  if remat == 'full':
    return config.width, 0
  whole = 3 * config.width  # Input, and the products of output and down.
  split = heads + 2 * shared + 2 * config.mlp_width
  if remat == 'dots':
    return whole, split
  if remat != 'none':
    raise ValueError(f'remat {remat!r} is not one of {sorted(TRAIN_PASSES)}')
  whole += 3 * config.width  # Two normed inputs and the sum between.
  split += 2 * heads + shared + 2 * config.mlp_width
  return whole, split

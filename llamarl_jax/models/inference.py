"""A Llama over a cache: chunks of prompts, and one token a line.

What is read stays in the cache as keys and values; see `kv_cache`. The layers
are those of `llama`, which runs whole sequences.
"""

import functools
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp

from llamarl_jax import types
from llamarl_jax.models import cached_attention
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import kv_cache
from llamarl_jax.models import llama
from llamarl_jax.models import quantization


@flax.struct.dataclass
class PromptChunk:
  """Some of the tokens of R sequences, to be read into their cache lines.

  Attributes:
    tokens: i32[R, T], right-padded.
    starts: i32[R], place of the first token in its sequence.
    lengths: i32[R], tokens of the row that are to be read, at most T.
    lines: i32[R], cache line of each; one that does not exist is padding.
  """

  tokens: jax.Array
  starts: jax.Array
  lengths: jax.Array
  lines: jax.Array


def prefill_chunk(
  config: config_lib.LlamaConfig,
  params: types.Params,
  cache: kv_cache.KVCache,
  chunk: PromptChunk,
  *,
  read_length: int,
  compute_dtype: jax.typing.DTypeLike = jnp.float32,
) -> kv_cache.KVCache:
  """Returns the cache with the tokens of a chunk read.

  A token reads what its line holds before the chunk, and the chunk up to
  itself.

  Args:
    config: of the model.
    params: tree as `llama.abstract_params` describes it.
    cache: whose lines hold what precedes `starts`.
    chunk: the tokens.
    read_length: no row starts beyond it; only so much of the cache is read.
    compute_dtype: of the matrix products; norms and softmax are in float32.
  """
  chex.assert_rank([chunk.tokens, chunk.starts, chunk.lengths], [2, 1, 1])
  chex.assert_equal_shape([chunk.starts, chunk.lengths, chunk.lines])
  column = jnp.arange(chunk.tokens.shape[1], dtype=jnp.int32)[None, :]
  positions = chunk.starts[:, None] + column
  inside = column < chunk.lengths[:, None]
  turn = llama.rotation(config, positions)
  past = kv_cache.read_lines(cache, chunk.lines, length=read_length)

  def layer(
    x: jax.Array, inputs: tuple[types.Params, kv_cache.KVCache]
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    weights, past = inputs
    weights = quantization.dequantize(weights, compute_dtype)
    attend = functools.partial(
      cached_attention.attend_chunk,
      past=past,
      starts=chunk.starts,
      inside=inside,
    )
    return llama.block(config, weights)(x, turn, attend)

  x = llama.embed(params, chunk.tokens, compute_dtype)
  _, (keys, values) = jax.lax.scan(
    layer,
    x,
    (params['layers'], past),
    unroll=config.num_layers <= llama.MAX_UNROLLED,
  )
  # What is padding goes past the end.
  places = jnp.where(inside, positions, cache.capacity)
  return kv_cache.write_tokens(
    cache, keys.swapaxes(2, 3), values.swapaxes(2, 3), chunk.lines, places
  )


def decode_step(
  config: config_lib.LlamaConfig,
  params: types.Params,
  tokens: jax.Array,
  positions: jax.Array,
  cache: kv_cache.KVCache,
  *,
  compute_dtype: jax.typing.DTypeLike = jnp.float32,
) -> tuple[jax.Array, kv_cache.KVCache]:
  """Returns the scores of each line's next token, and the longer cache.

  Args:
    config: of the model.
    params: tree as `llama.abstract_params` describes it.
    tokens: i32[S], the newest token of each line.
    positions: i32[S], its place; the cache holds what precedes it.
    cache: of S lines; not written where the position is beyond its capacity.
    compute_dtype: as for `prefill_chunk`.

  Returns:
    f32[S, V] and the cache with the new tokens.
  """
  chex.assert_rank([tokens, positions], 1)
  turn = llama.rotation(config, positions)

  def layer(
    x: jax.Array, inputs: tuple[types.Params, kv_cache.KVCache]
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    weights, past = inputs
    weights = quantization.dequantize(weights, compute_dtype)
    attend = functools.partial(
      cached_attention.attend_cached, past=past, positions=positions
    )
    return llama.block(config, weights)(x, turn, attend)

  x = llama.embed(params, tokens, compute_dtype)
  x, (keys, values) = jax.lax.scan(layer, x, (params['layers'], cache))
  hidden = llama.final_norm(config, params, x)
  scores = llama.logits(config, params, hidden, compute_dtype=compute_dtype)
  lines = jnp.arange(cache.num_lines)
  cache = kv_cache.write_tokens(
    cache,
    keys[:, :, :, None],
    values[:, :, :, None],
    lines,
    positions[:, None],
  )
  return scores, cache


def cast_matrices(
  params: types.Params, dtype: jax.typing.DTypeLike
) -> types.Params:
  """Returns the factors of matrix products in `dtype`, once for many steps.

  Quantized weights stay as they are: each layer restores its own.

  Args:
    params: of the model, or quantized.
    dtype: of the factors.
  """

  def cast(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
    # Norms are computed in float32, with weights as the trainer has them.
    is_norm = 'norm' in jax.tree_util.keystr(path)
    if is_norm or quantization.is_quantized(leaf):
      return leaf
    return leaf.astype(dtype)

  return jax.tree_util.tree_map_with_path(
    cast, params, is_leaf=quantization.is_quantized
  )

"""Decoding with the layers taken apart: the fast way on CPUs.

In a loop over stacked layers XLA on CPU copies the weights and the cache of
each layer before it reads them. Here each layer has arrays of its own: weights
taken apart once a version, and a copy of the used part of the cache, once a
segment, to which all slots append at the same place.
"""

import dataclasses
import functools

import chex
import flax.struct
import jax
import jax.numpy as jnp

from llamarl_jax import types
from llamarl_jax.models import cached_attention
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import inference
from llamarl_jax.models import kv_cache
from llamarl_jax.models import llama
from llamarl_jax.models import quantization


@flax.struct.dataclass
class Window:
  """What one layer has read: the past, then the tokens of this segment.

  Attributes:
    k: f[S, K, A, W], positions last: scores are then sums of whole rows.
    v: f[S, K, W, A].
    k_scale: f32[S, K, W] of int8 entries, else None.
    v_scale: f32[S, K, W] of int8 entries, else None.
  """

  k: jax.Array
  v: jax.Array
  k_scale: jax.Array | None
  v_scale: jax.Array | None


@functools.partial(jax.jit, static_argnames=('config', 'compute_dtype'))
def take_apart(
  config: config_lib.LlamaConfig,
  params: types.Params,
  *,
  compute_dtype: jax.typing.DTypeLike = jnp.float32,
) -> types.Params:
  """Returns parameters for `decode_step`: a second copy, to be kept.

  The layers are a tuple. Quantized weights are restored, since converting them
  costs about as much as multiplying by them. The embedding has a transposed
  copy where it is the output projection, too: products by rows of a weight run
  at half the speed of those by columns.

  Args:
    config: of the model.
    params: tree as `llama.abstract_params` describes it, or quantized.
    compute_dtype: of the factors of matrix products.
  """
  whole = inference.cast_matrices(
    quantization.dequantize(params, compute_dtype), compute_dtype
  )
  apart = {name: leaf for name, leaf in whole.items() if name != 'layers'}
  apart['layers'] = tuple(
    jax.tree.map(lambda leaf, i=i: leaf[i], whole['layers'])
    for i in range(config.num_layers)
  )
  if config.tie_embeddings:
    apart['head'] = whole['embedding'].T
  return apart


def is_apart(params: types.Params) -> bool:
  """Returns whether `take_apart` made these parameters."""
  return isinstance(params['layers'], tuple)


def open_windows(
  cache: kv_cache.KVCache, *, length: int, num_new: int
) -> tuple[Window, ...]:
  """Returns for each layer what it has read, with room for new tokens.

  Args:
    cache: of S lines.
    length: positions of the past that are copied.
    num_new: tokens there is room for; W = length + num_new.
  """

  def room(x: jax.Array, axis: int) -> jax.Array:
    widths = [(0, num_new if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths)

  def window(i: int) -> Window:
    part = jax.tree.map(lambda x: x[i, :, :, :length], cache)
    scales = [
      None if scale is None else room(scale, 2)
      for scale in (part.k_scale, part.v_scale)
    ]
    return Window(room(part.k.swapaxes(2, 3), 3), room(part.v, 2), *scales)

  return tuple(window(i) for i in range(cache.k.shape[0]))


def close_windows(
  cache: kv_cache.KVCache,
  windows: tuple[Window, ...],
  starts: jax.Array,
  counts: jax.Array,
  *,
  length: int,
) -> kv_cache.KVCache:
  """Returns the cache with the new tokens of a segment written.

  Args:
    cache: the windows were opened on.
    windows: of all layers.
    starts: i32[S], place of the first new token of each line.
    counts: i32[S], new tokens of each line: the first of the window's.
    length: positions of the past in the windows.
  """
  entries = [
    kv_cache.KVCache(
      window.k[..., length:].swapaxes(2, 3),
      window.v[:, :, length:],
      None if window.k_scale is None else window.k_scale[..., length:],
      None if window.v_scale is None else window.v_scale[..., length:],
    )
    for window in windows
  ]
  new = jax.tree.map(lambda *layers: jnp.stack(layers), *entries)
  column = jnp.arange(new.capacity)[None, :]
  places = jnp.where(
    column < counts[:, None], starts[:, None] + column, cache.capacity
  )
  lines = jnp.arange(cache.num_lines)
  return kv_cache.write_entries(cache, new, lines, places)


def _append(
  window: Window, k: jax.Array, v: jax.Array, place: jax.Array
) -> Window:
  """Returns the window with a token a line, f[S, K, A], at one place of all."""
  new = kv_cache.as_entries(k, v, window.k.dtype)

  def put(into: jax.Array, token: jax.Array, axis: int) -> jax.Array:
    token = jnp.expand_dims(token, axis)
    return jax.lax.dynamic_update_slice_in_dim(into, token, place, axis)

  def put_scale(
    into: jax.Array | None, token: jax.Array | None
  ) -> jax.Array | None:
    return None if into is None or token is None else put(into, token, 2)

  return Window(
    put(window.k, new.k, 3),
    put(window.v, new.v, 2),
    put_scale(window.k_scale, new.k_scale),
    put_scale(window.v_scale, new.v_scale),
  )


def decode_step(
  config: config_lib.LlamaConfig,
  params: types.Params,
  tokens: jax.Array,
  positions: jax.Array,
  windows: tuple[Window, ...],
  *,
  starts: jax.Array,
  length: int,
  step: jax.Array,
  compute_dtype: jax.typing.DTypeLike = jnp.float32,
) -> tuple[jax.Array, tuple[Window, ...]]:
  """Returns the scores of each line's next token, and the longer windows.

  Args:
    config: of the model.
    params: from `take_apart`.
    tokens: i32[S], the newest token of each line.
    positions: i32[S], its place in the sequence.
    windows: of all layers.
    starts: i32[S], tokens of each line before the segment.
    length: positions of the past in the windows.
    step: i32[], which step of the segment this is.
    compute_dtype: of the matrix products.

  Returns:
    f32[S, V] and the windows with the tokens.
  """
  chex.assert_rank([tokens, positions, starts], 1)
  turn = llama.rotation(config, positions)
  column = jnp.arange(windows[0].k.shape[3])[None, :]
  recent = (column >= length) & (column <= length + step)
  seen = (column < jnp.minimum(starts, length)[:, None]) | recent
  x = llama.embed(params, tokens, compute_dtype)
  longer = []
  for window, weights in zip(windows, params['layers'], strict=True):

    def attend(
      queries: jax.Array, k: jax.Array, v: jax.Array, window: Window = window
    ) -> jax.Array:
      window = _append(window, k, v, length + step)
      longer.append(window)
      return cached_attention.attend_window(
        queries,
        window.k,
        window.v,
        seen,
        k_scale=window.k_scale,
        v_scale=window.v_scale,
      )

    x, _ = llama.block(config, weights)(x, turn, attend)
  hidden = llama.final_norm(config, params, x)
  untied = dataclasses.replace(config, tie_embeddings=False)
  scores = llama.logits(untied, params, hidden, compute_dtype=compute_dtype)
  return scores, tuple(longer)

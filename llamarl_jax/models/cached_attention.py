"""Grouped-query attention over a cache: of a chunk of tokens, or of one.

As `attention` over whole sequences, and rounded as there: scores and sums are
in float32. Entries of an int8 cache are multiplied by their scale after the
product, of which the scale is common to a whole column.
"""

import jax
import jax.numpy as jnp

from llamarl_jax.models import kv_cache

# Finite, so that a row with nothing to attend to gives no NaN.
_MASKED = -1e30


def attend_chunk(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  *,
  past: kv_cache.KVCache,
  starts: jax.Array,
  inside: jax.Array,
) -> jax.Array:
  """Returns the attention of a chunk of each of R sequences.

  A token reads what precedes the chunk, and the chunk up to itself.

  Args:
    queries: f[R, T, H, A].
    keys: f[R, T, K, A], of the chunk.
    values: f[R, T, K, A], of the chunk.
    past: of one layer, k and v f[R, K, P, A].
    starts: i32[R], place of the chunk: so much of `past` means something.
    inside: bool[R, T], False on padding, which no token reads.

  Returns:
    f[R, T, H, A].
  """
  rows, length, _, head_dim = queries.shape
  num_kv_heads = keys.shape[2]
  causal = jnp.tril(jnp.ones((length, length), bool))
  before = jnp.arange(past.k.shape[2])[None, :] < starts[:, None]
  before = jnp.broadcast_to(before[:, None], (rows, length, past.k.shape[2]))
  seen = jnp.concatenate([before, causal[None] & inside[:, None, :]], axis=-1)
  grouped = queries.reshape(rows, length, num_kv_heads, -1, head_dim)
  # One matrix a key/value head: [T * G, A] against [A, P + T].
  grouped = grouped.transpose(0, 2, 3, 1, 4)
  of_head = grouped.reshape(rows, num_kv_heads, -1, head_dim)
  keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
  scores = jnp.concatenate(
    [_scores(of_head, past.k, past.k_scale), _scores(of_head, keys, None)],
    axis=-1,
  )
  scores = scores.reshape(*grouped.shape[:4], -1) * head_dim**-0.5
  scores = jnp.where(seen[:, None, None], scores, _MASKED)
  weights = jax.nn.softmax(scores, axis=-1)
  weights = weights.reshape(*of_head.shape[:3], -1)
  size = past.k.shape[2]
  mixed = _mix(weights[..., :size], past.v, past.v_scale, queries.dtype)
  mixed += _mix(weights[..., size:], values, None, queries.dtype)
  mixed = mixed.astype(values.dtype).reshape(grouped.shape)
  return mixed.transpose(0, 3, 1, 2, 4).reshape(queries.shape)


def attend_cached(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  *,
  past: kv_cache.KVCache,
  positions: jax.Array,
) -> jax.Array:
  """Returns the attention of one new token a line.

  The new token's own key and value are given beside the cache, so that the
  cache may be written once for all layers, after they were computed.

  Args:
    queries: f[S, H, A].
    keys: f[S, K, A], of the new token.
    values: f[S, K, A], of the new token.
    past: of one layer, k and v f[S, K, C, A].
    positions: i32[S], of the new token: the cache is read below it.

  Returns:
    f[S, H, A].
  """
  slots, num_heads, head_dim = queries.shape
  num_kv_heads = keys.shape[1]
  grouped = queries.reshape(slots, num_kv_heads, -1, head_dim)
  scale = head_dim**-0.5
  own = jnp.sum(
    grouped.astype(jnp.float32) * keys[:, :, None].astype(jnp.float32),
    axis=-1,
    keepdims=True,
  )
  seen = jnp.arange(past.k.shape[2])[None, :] < positions[:, None]
  scores = _scores(grouped, past.k, past.k_scale) * scale
  scores = jnp.where(seen[:, None, None], scores, _MASKED)
  weights = jax.nn.softmax(
    jnp.concatenate([scores, own * scale], axis=-1), axis=-1
  )
  # Summed in float32 and rounded once, as over whole sequences.
  mixed = _mix(weights[..., :-1], past.v, past.v_scale, queries.dtype)
  own_weight = weights[..., -1:].astype(values.dtype).astype(jnp.float32)
  mixed += own_weight * values[:, :, None].astype(jnp.float32)
  return mixed.astype(values.dtype).reshape(slots, num_heads, head_dim)


def attend_window(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  seen: jax.Array,
  *,
  k_scale: jax.Array | None = None,
  v_scale: jax.Array | None = None,
) -> jax.Array:
  """Returns the attention of one new token a line over what it may read.

  Written as sums of products: XLA on CPU runs the many tiny matrix products of
  two or three queries one by one, at up to twice the cost.

  Args:
    queries: f[S, H, A].
    keys: f[S, K, A, W].
    values: f[S, K, W, A].
    seen: bool[S, W], which of them each line reads, at least one.
    k_scale: f32[S, K, W] of int8 keys, or None.
    v_scale: f32[S, K, W] of int8 values, or None.

  Returns:
    f[S, H, A].
  """
  slots, _, head_dim = queries.shape
  dtype = queries.dtype
  grouped = queries.reshape(slots, keys.shape[1], -1, head_dim)
  grouped = (grouped * head_dim**-0.5).astype(jnp.float32)
  keys = keys.astype(dtype).astype(jnp.float32)
  scores = jnp.sum(grouped[..., None] * keys[:, :, None], axis=-2)
  if k_scale is not None:
    scores = scores * k_scale[:, :, None]
  scores = jnp.where(seen[:, None, None], scores, _MASKED)
  weights = jax.nn.softmax(scores, axis=-1)
  if v_scale is not None:
    weights = weights * v_scale[:, :, None]
  # Rounded as the factors of products would be.
  weights = weights.astype(dtype).astype(jnp.float32)
  values = values.astype(dtype).astype(jnp.float32)
  mixed = jnp.sum(weights[..., None] * values[:, :, None], axis=-2)
  return mixed.astype(dtype).reshape(queries.shape)


def _scores(
  queries: jax.Array, keys: jax.Array, scale: jax.Array | None
) -> jax.Array:
  """Returns f32[R, K, N, P] of f[R, K, N, A] and entries [R, K, P, A].

  The scale of int8 keys is that of whole columns: it is applied after.
  """
  scores = jnp.einsum(
    'rkna,rkpa->rknp',
    queries,
    keys.astype(queries.dtype),
    preferred_element_type=jnp.float32,
  )
  return scores if scale is None else scores * scale[:, :, None]


def _mix(
  weights: jax.Array,
  values: jax.Array,
  scale: jax.Array | None,
  dtype: jax.typing.DTypeLike,
) -> jax.Array:
  """Returns f32[R, K, N, A], entries mixed by weights f32[R, K, N, P]."""
  if scale is not None:
    weights = weights * scale[:, :, None]
  return jnp.einsum(
    'rknp,rkpa->rkna',
    weights.astype(dtype),
    values.astype(dtype),
    preferred_element_type=jnp.float32,
  )

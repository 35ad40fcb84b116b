"""Grouped-query attention over whole sequences and over a cache.

Ainslie et al. (2023), GQA. Query head h reads key/value head h // (H / K);
the groups are an axis of the queries, so keys and values are never repeated.
"""

import chex
import jax
import jax.numpy as jnp

# Finite, so that a row with nothing to attend to gives no NaN.
_MASKED = -1e30


def causal_mask(
  segment_ids: jax.Array, prefix_ids: jax.Array | None = None
) -> jax.Array:
  """Returns which key each query may read, bool[B, T, T].

  A token reads itself and what precedes it in its own segment. Padding is a
  segment like another: it reads only padding, and only padding reads it.

  With `prefix_ids` it reads that segment too: several completions share one
  prompt that stands before them in the row.

  Args:
    segment_ids: i32[B, T], 0 = padding.
    prefix_ids: i32[B, T], 0 = no prefix; or None.
  """
  length = segment_ids.shape[-1]
  same = segment_ids[:, :, None] == segment_ids[:, None, :]
  if prefix_ids is not None:
    of_prefix = prefix_ids[:, :, None] == segment_ids[:, None, :]
    same |= of_prefix & (prefix_ids > 0)[:, :, None]
  causal = jnp.tril(jnp.ones((length, length), bool))
  return same & causal[None]


def attend(
  queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns softmax(q k' / sqrt(A)) v with the masked keys left out.

  Args:
    queries: f[B, T, H, A].
    keys: f[B, T, K, A].
    values: f[B, T, K, A].
    mask: bool[B, T, T], True where query (middle axis) may read key (last).

  Returns:
    f[B, T, H, A].
  """
  batch, length, num_heads, head_dim = queries.shape
  num_kv_heads = keys.shape[2]
  chex.assert_equal_shape([keys, values])
  chex.assert_shape(mask, (batch, length, length))
  grouped = queries.reshape(batch, length, num_kv_heads, -1, head_dim)
  scores = jnp.einsum(
    'btkga,bska->bkgts', grouped, keys, preferred_element_type=jnp.float32
  )
  scores = jnp.where(mask[:, None, None], scores * head_dim**-0.5, _MASKED)
  weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
  mixed = jnp.einsum('bkgts,bska->btkga', weights, values)
  return mixed.reshape(batch, length, num_heads, head_dim)


def attend_cached(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  cached_keys: jax.Array,
  cached_values: jax.Array,
  positions: jax.Array,
) -> jax.Array:
  """Returns the attention of one new token a slot.

  The new token's own key and value are given beside the cache, so that the
  cache may be written once for all layers, after they were computed.

  Args:
    queries: f[S, H, A].
    keys: f[S, K, A], of the new token.
    values: f[S, K, A], of the new token.
    cached_keys: f[S, C, K, A].
    cached_values: f[S, C, K, A].
    positions: i32[S], of the new token: the cache is read below it.

  Returns:
    f[S, H, A].
  """
  slots, num_heads, head_dim = queries.shape
  num_kv_heads = keys.shape[1]
  capacity = cached_keys.shape[1]
  grouped = queries.reshape(slots, num_kv_heads, -1, head_dim)
  past = jnp.einsum(
    'skga,scka->skgc', grouped, cached_keys, preferred_element_type=jnp.float32
  )
  own = jnp.einsum(
    'skga,ska->skg', grouped, keys, preferred_element_type=jnp.float32
  )
  seen = jnp.arange(capacity)[None, :] < positions[:, None]
  scale = head_dim**-0.5
  past = jnp.where(seen[:, None, None], past * scale, _MASKED)
  scores = jnp.concatenate([past, own[..., None] * scale], axis=-1)
  weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
  mixed = jnp.einsum('skgc,scka->skga', weights[..., :-1], cached_values)
  mixed += weights[..., -1:] * values[:, :, None]
  return mixed.reshape(slots, num_heads, head_dim)

"""Attention in blocks of queries, with a backward pass of its own; for CPUs.

What lies after a block of queries is not computed: causality halves the work.
Scores are the largest arrays of a short model's step, and passes over them,
not products, are what attention costs on a CPU. So the backward pass reads the
exponentials kept by the forward pass, and sums over the head's channels where
the derivative of the softmax, as written, sums over keys:
sum_s P_ts dP_ts = sum_a O_ta dO_ta (Dao et al. 2022, appendix B.4).
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

# Finite, so that a row with nothing to attend to gives no NaN.
_MASKED = -1e30
# Of queries. Shorter blocks skip more, but their products are less efficient.
_MIN_BLOCK = 64
# Blocks are unrolled: each adds to compile time.
_MAX_BLOCKS = 8

# Exponentials f[B, K, G, t, s] and the inverse of their sums f[B, K, G, t, 1].
_Block = tuple[jax.Array, jax.Array]
_Residuals = tuple[
  jax.Array, jax.Array, jax.Array, jax.Array, tuple[_Block, ...]
]


@jax.custom_vjp
def attend(
  queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns softmax(q k' / sqrt(A)) v over the keys of a causal mask.

  Args:
    queries: f[B, T, H, A].
    keys: f[B, T, K, A].
    values: f[B, T, K, A].
    mask: bool[B, T, T], False where the key (last axis) is after the query.

  Returns:
    f[B, T, H, A], in the dtype of the values.
  """
  return _forward(queries, keys, values, mask)[0]


def _blocks(length: int) -> Iterator[slice]:
  """Yields the queries of each block; its keys end where it ends."""
  num_blocks = max(1, min(length // _MIN_BLOCK, _MAX_BLOCKS))
  size = -(-length // num_blocks)
  for start in range(0, length, size):
    yield slice(start, min(start + size, length))


def _by_head(x: jax.Array, num_kv_heads: int) -> jax.Array:
  """Returns f[B, T, H, A] as f[B, K, G, T, A]."""
  batch, length, _, head_dim = x.shape
  x = x.reshape(batch, length, num_kv_heads, -1, head_dim)
  return x.transpose(0, 2, 3, 1, 4)


def _by_token(x: jax.Array) -> jax.Array:
  """Returns f[B, K, G, T, A] as f[B, T, H, A]."""
  batch, _, _, length, head_dim = x.shape
  return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, -1, head_dim)


def _product(
  left: jax.Array, right: jax.Array, left_axis: int, right_axis: int
) -> jax.Array:
  """Contracts an axis of f[B, K, M, .] with one of f[B, K, N, .]."""
  return jax.lax.dot_general(
    left,
    right,
    (((left_axis,), (right_axis,)), ((0, 1), (0, 1))),
    preferred_element_type=jnp.float32,
  )


def _rows(x: jax.Array) -> jax.Array:
  """Returns f[B, K, G, t, E] as f[B, K, G t, E]: one matrix for each key."""
  return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _forward(
  queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array
) -> tuple[jax.Array, _Residuals]:
  scale = queries.shape[-1] ** -0.5
  dtype = values.dtype
  queries = _by_head(queries, keys.shape[2])
  # Heads before tokens: a head is then one matrix.
  keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
  outputs, kept = [], []
  for block in _blocks(mask.shape[1]):
    read = slice(0, block.stop)
    some = queries[:, :, :, block]
    scores = _product(_rows(some), keys[:, :, read], 3, 3) * scale
    scores = scores.reshape(*some.shape[:4], -1)
    scores = jnp.where(mask[:, None, None, block, read], scores, _MASKED)
    # The softmax with its division after the product: of A columns, not of T.
    maxima = jnp.max(scores, axis=-1, keepdims=True)
    exponentials = jnp.exp(scores - maxima)
    inverse = 1.0 / jnp.sum(exponentials, axis=-1, keepdims=True)
    exponentials = exponentials.astype(dtype)
    mixed = _product(_rows(exponentials), values[:, :, read], 3, 2)
    outputs.append((mixed.reshape(some.shape) * inverse).astype(dtype))
    kept.append((exponentials, inverse))
  output = jnp.concatenate(outputs, axis=3)
  return _by_token(output), (queries, keys, values, output, tuple(kept))


def _backward(
  residuals: _Residuals, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
  queries, keys, values, output, kept = residuals
  length, head_dim = queries.shape[3:]
  scale = head_dim**-0.5
  gradient = _by_head(gradient, keys.shape[1])
  # Left to itself, XLA on CPU computes what follows inside the products, as
  # loops; see `linear`.
  gradient = jax.lax.optimization_barrier(gradient)
  overlap = jnp.sum(
    gradient.astype(jnp.float32) * output, axis=-1, keepdims=True
  )
  by_queries = []
  by_keys = jnp.zeros(keys.shape, jnp.float32)
  by_values = jnp.zeros(values.shape, jnp.float32)
  for block, (exponentials, inverse) in zip(_blocks(length), kept, strict=True):
    read = slice(0, block.stop)
    after = ((0, 0), (0, 0), (0, length - block.stop), (0, 0))
    some = _rows(queries[:, :, :, block])
    incoming = gradient[:, :, :, block] * inverse
    incoming = _rows(incoming.astype(values.dtype))
    by_values += jnp.pad(_product(_rows(exponentials), incoming, 2, 2), after)
    by_weights = _product(incoming, values[:, :, read], 3, 3)
    by_weights = by_weights.reshape(exponentials.shape)
    by_scores = exponentials * (by_weights - overlap[:, :, :, block] * inverse)
    by_scores = (by_scores * scale).astype(queries.dtype)
    by_scores = _rows(jax.lax.optimization_barrier(by_scores))
    by_query = _product(by_scores, keys[:, :, read], 3, 2)
    by_queries.append(by_query.reshape(*exponentials.shape[:4], head_dim))
    by_keys += jnp.pad(_product(by_scores, some, 2, 2), after)
  return (
    _by_token(jnp.concatenate(by_queries, axis=3)).astype(queries.dtype),
    by_keys.swapaxes(1, 2).astype(keys.dtype),
    by_values.swapaxes(1, 2).astype(values.dtype),
    None,
  )


attend.defvjp(_forward, _backward)

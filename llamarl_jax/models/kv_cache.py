"""Keys and values of the tokens already read, one line of cache a slot."""

import chex
import flax.struct
import jax
import jax.numpy as jnp

from llamarl_jax.models import config as config_lib

# Of the keys and of the values; what a sharding rule needs to know.
LOGICAL_AXES = ('layers', 'slots', None, 'kv_heads', 'head_dim')


@flax.struct.dataclass
class KVCache:
  """Keys and values, or a block of them.

  Attributes:
    k: f[L, S, C, K, A], rotated keys.
    v: f[L, S, C, K, A].
  """

  k: jax.Array
  v: jax.Array

  @property
  def capacity(self) -> int:
    """Positions a slot has room for (C)."""
    return self.k.shape[2]


def init_cache(
  config: config_lib.LlamaConfig,
  num_slots: int,
  capacity: int,
  dtype: jax.typing.DTypeLike = jnp.float32,
) -> KVCache:
  """Returns an empty cache.

  Args:
    config: of the model.
    num_slots: sequences held (S).
    capacity: positions a slot (C).
    dtype: of keys and values.
  """
  shape = (
    config.num_layers,
    num_slots,
    capacity,
    config.num_kv_heads,
    config.head_dim,
  )
  return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def insert(
  cache: KVCache, block: KVCache, source_rows: jax.Array, slots: jax.Array
) -> KVCache:
  """Returns the cache with prefilled rows copied into slots.

  Args:
    cache: of S slots.
    block: of P prefilled rows, no longer than the cache.
    source_rows: i32[M], the row of `block` each slot receives.
    slots: i32[M], the slots to fill; S or more leaves all slots alone.
  """
  chex.assert_equal_shape([source_rows, slots])
  length = block.k.shape[2]

  def copy(into: jax.Array, rows: jax.Array) -> jax.Array:
    chosen = rows[:, source_rows].astype(into.dtype)
    return into.at[:, slots, :length].set(chosen, mode='drop')

  return KVCache(copy(cache.k, block.k), copy(cache.v, block.v))


def write(
  cache: KVCache, keys: jax.Array, values: jax.Array, positions: jax.Array
) -> KVCache:
  """Returns the cache with one new token a slot written.

  Args:
    cache: of S slots.
    keys: f[L, S, K, A], of the new tokens.
    values: f[L, S, K, A].
    positions: i32[S]; C or more writes nothing.
  """
  rows = jnp.arange(cache.k.shape[1])

  def put(into: jax.Array, new: jax.Array) -> jax.Array:
    return into.at[:, rows, positions].set(new.astype(into.dtype), mode='drop')

  return KVCache(put(cache.k, keys), put(cache.v, values))

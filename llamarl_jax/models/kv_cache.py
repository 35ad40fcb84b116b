"""Keys and values of the tokens already read: lines of positions.

A line is what one sequence has read: a decode slot, or a prompt that is kept
for its completions. Heads stand before positions, so that what a head reads is
one matrix.
"""

from collections.abc import Callable
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp

from llamarl_jax.models import config as config_lib
from llamarl_jax.sharding import spec as spec_lib

# Of the keys and of the values; what a sharding rule needs to know.
LOGICAL_AXES = ('layers', 'slots', 'kv_heads', None, 'head_dim')


@flax.struct.dataclass
class KVCache:
  """Keys and values of all layers, or a block of them.

  Attributes:
    k: f[L, S, K, C, A], rotated keys.
    v: f[L, S, K, C, A].
    k_scale: f32[L, S, K, C], what int8 keys are multiplied by, else None.
    v_scale: f32[L, S, K, C], likewise of the values.
  """

  k: jax.Array
  v: jax.Array
  k_scale: jax.Array | None = None
  v_scale: jax.Array | None = None

  @property
  def num_lines(self) -> int:
    """Sequences there is room for (S)."""
    return self.k.shape[1]

  @property
  def capacity(self) -> int:
    """Positions a line has room for (C)."""
    return self.k.shape[3]


def cache_specs(
  config: config_lib.LlamaConfig,
  num_lines: int,
  capacity: int,
  dtype: jax.typing.DTypeLike = jnp.float32,
) -> KVCache:
  """Returns a ParamSpec for each array of a cache; see `init_cache`."""
  dtype = jnp.dtype(dtype)
  shape = (
    config.num_layers,
    num_lines,
    config.num_kv_heads,
    capacity,
    config.head_dim,
  )
  # Specs stand where a cache has arrays, hence Any.
  entries: Any = spec_lib.ParamSpec(shape, dtype, LOGICAL_AXES)
  if dtype != jnp.int8:
    return KVCache(entries, entries)
  scales: Any = spec_lib.ParamSpec(
    shape[:-1], jnp.dtype(jnp.float32), LOGICAL_AXES[:-1]
  )
  return KVCache(entries, entries, scales, scales)


def init_cache(
  config: config_lib.LlamaConfig,
  num_lines: int,
  capacity: int,
  dtype: jax.typing.DTypeLike = jnp.float32,
) -> KVCache:
  """Returns an empty cache.

  Args:
    config: of the model.
    num_lines: sequences held (S).
    capacity: positions a line (C).
    dtype: of keys and values; int8 for entries with a scale of their own.
  """
  specs = cache_specs(config, num_lines, capacity, dtype)
  return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)


def _each(fn: Callable[..., jax.Array], *caches: KVCache) -> KVCache:
  """Returns fn of each array of caches that are alike."""
  return jax.tree.map(fn, *caches)


def as_entries(
  k: jax.Array, v: jax.Array, dtype: jax.typing.DTypeLike
) -> KVCache:
  """Returns keys and values as a cache of `dtype` holds them.

  An int8 vector x of one head at one position is round(x / scale), with
  scale = max |x| / 127.

  Args:
    k: f[..., A].
    v: f[..., A].
    dtype: of the cache.
  """
  if jnp.dtype(dtype) != jnp.int8:
    return KVCache(k.astype(dtype), v.astype(dtype))
  (k, k_scale), (v, v_scale) = _quantize(k), _quantize(v)
  return KVCache(k, v, k_scale, v_scale)


def _quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  wide = x.astype(jnp.float32)
  scale = jnp.max(jnp.abs(wide), axis=-1) / 127
  # A vector of zeros has scale 0, and is restored whatever it is divided by.
  divisor = jnp.where(scale > 0, scale, 1.0)
  return jnp.round(wide / divisor[..., None]).astype(jnp.int8), scale


def copy_lines(
  cache: KVCache,
  source: KVCache,
  source_lines: jax.Array,
  lines: jax.Array,
  *,
  length: int,
) -> KVCache:
  """Returns the cache with the beginnings of lines of another copied into it.

  Args:
    cache: of S lines.
    source: of the same dtype.
    source_lines: i32[M], line of `source` that each line receives.
    lines: i32[M], the lines to fill; S or more leaves all lines alone.
    length: positions to copy, at most what either has.
  """
  chex.assert_equal_shape([source_lines, lines])

  def copy(into: jax.Array, rows: jax.Array) -> jax.Array:
    return into.at[:, lines, :, :length].set(
      rows[:, source_lines, :, :length], mode='drop'
    )

  return _each(copy, cache, source)


def read_lines(cache: KVCache, lines: jax.Array, *, length: int) -> KVCache:
  """Returns the beginnings of some lines, f[L, M, K, length, A].

  Args:
    cache: of S lines.
    lines: i32[M]; S or more reads what means nothing.
    length: positions to read.
  """
  return _each(lambda x: x[:, lines, :, :length], cache)


def write_tokens(
  cache: KVCache,
  k: jax.Array,
  v: jax.Array,
  lines: jax.Array,
  positions: jax.Array,
) -> KVCache:
  """Returns the cache with tokens written in some lines.

  Args:
    cache: of S lines.
    k: f[L, M, K, T, A], of the new tokens.
    v: f[L, M, K, T, A].
    lines: i32[M]; S or more writes nothing.
    positions: i32[M, T]; C or more writes nothing.
  """
  return write_entries(cache, as_entries(k, v, cache.k.dtype), lines, positions)


def write_entries(
  cache: KVCache, entries: KVCache, lines: jax.Array, positions: jax.Array
) -> KVCache:
  """Returns the cache with entries of its own dtype written in some lines.

  Args:
    cache: of S lines.
    entries: of M lines and T positions.
    lines: i32[M]; S or more writes nothing.
    positions: i32[M, T]; C or more writes nothing.
  """
  chex.assert_shape(positions, (entries.num_lines, entries.capacity))

  def put(into: jax.Array, new: jax.Array) -> jax.Array:
    # The indices stand apart in the array, so their axes come first.
    new = jnp.moveaxis(new, (1, 3), (0, 1))
    return into.at[:, lines[:, None], :, positions].set(new, mode='drop')

  return _each(put, cache, entries)

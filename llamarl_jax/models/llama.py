"""Llama: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

Touvron et al. (2023). The nnx modules describe the parameters once: their
shapes, initial values and logical axes. The functions below apply them to
plain trees of arrays, layers stacked along the first axis and scanned.
"""

from collections.abc import Callable
import functools
from typing import Any

import chex
from flax import nnx
import jax
import jax.numpy as jnp

from llamarl_jax import types
from llamarl_jax.models import attention as attention_lib
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import kv_cache
from llamarl_jax.models import linear
from llamarl_jax.models import rotary
from llamarl_jax.sharding import spec

# (queries, keys, values) -> mixed values, shaped as the queries.
AttendFn = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

# A loop costs a shallow model a tenth of its training step, and compiling it
# unrolled costs little; a deep one gains nothing and compiles for long.
_MAX_UNROLLED = 8


def _weight(
  rngs: nnx.Rngs,
  shape: tuple[int, ...],
  axes: tuple[str, ...],
  scale: float,
) -> nnx.Param:
  init = nnx.with_partitioning(nnx.initializers.normal(scale), axes)
  return nnx.Param(init(rngs.params(), shape, jnp.float32))


class RMSNorm(nnx.Module):
  """x / sqrt(mean(x ** 2) + epsilon) * scale, in float32."""

  def __init__(self, config: config_lib.LlamaConfig, rngs: nnx.Rngs):
    init = nnx.with_partitioning(nnx.initializers.ones, ('norm',))
    self.scale = nnx.Param(init(rngs.params(), (config.width,), jnp.float32))
    self.epsilon = config.norm_epsilon

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns x normed over its last axis, in the dtype of x."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
    normal = wide * jax.lax.rsqrt(mean_square + self.epsilon)
    return (normal * scale).astype(x.dtype)


class Attention(nnx.Module):
  """Projections to queries, keys, values, and back."""

  def __init__(self, config: config_lib.LlamaConfig, rngs: nnx.Rngs):
    width, head_dim = config.width, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    scale = width**-0.5
    back = (2 * config.num_layers * heads * head_dim) ** -0.5
    self.query = _weight(
      rngs, (width, heads, head_dim), ('embed', 'heads', 'head_dim'), scale
    )
    self.key = _weight(
      rngs,
      (width, kv_heads, head_dim),
      ('embed', 'kv_heads', 'head_dim'),
      scale,
    )
    self.value = _weight(
      rngs,
      (width, kv_heads, head_dim),
      ('embed', 'kv_heads', 'head_dim'),
      scale,
    )
    self.output = _weight(
      rngs, (heads, head_dim, width), ('heads', 'head_dim', 'embed'), back
    )

  def __call__(
    self, x: jax.Array, turn: rotary.Rotation, attend: AttendFn
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns the mixed values, and the keys and values read: f[..., K, A]."""
    queries = rotary.rotate(_project(x, self.query[...]), turn)
    keys = rotary.rotate(_project(x, self.key[...]), turn)
    values = _project(x, self.value[...])
    mixed = attend(queries, keys, values)
    output = self.output[...].astype(x.dtype)
    return linear.project(mixed, output, 2), (keys, values)


class MLP(nnx.Module):
  """SwiGLU: (silu(x gate) * (x up)) down. Shazeer (2020)."""

  def __init__(self, config: config_lib.LlamaConfig, rngs: nnx.Rngs):
    width, inner = config.width, config.mlp_width
    back = (2 * config.num_layers * inner) ** -0.5
    self.gate = _weight(rngs, (width, inner), ('embed', 'mlp'), width**-0.5)
    self.up = _weight(rngs, (width, inner), ('embed', 'mlp'), width**-0.5)
    self.down = _weight(rngs, (inner, width), ('mlp', 'embed'), back)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns what the layer adds to the residual stream, f[..., D]."""
    gate = linear.project(x, self.gate[...].astype(x.dtype))
    up = linear.project(x, self.up[...].astype(x.dtype))
    return linear.project(
      jax.nn.silu(gate) * up, self.down[...].astype(x.dtype)
    )


class Block(nnx.Module):
  """One decoder layer: attention and MLP, each on its normed input."""

  def __init__(self, config: config_lib.LlamaConfig, rngs: nnx.Rngs):
    self.attention_norm = RMSNorm(config, rngs)
    self.attention = Attention(config, rngs)
    self.mlp_norm = RMSNorm(config, rngs)
    self.mlp = MLP(config, rngs)

  def __call__(
    self, x: jax.Array, turn: rotary.Rotation, attend: AttendFn
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns the residual stream, and the keys and values: f[..., K, A]."""
    mixed, read = self.attention(self.attention_norm(x), turn, attend)
    x = x + mixed
    return x + self.mlp(self.mlp_norm(x)), read


class Llama(nnx.Module):
  """The parameters of a Llama, its layers stacked."""

  def __init__(self, config: config_lib.LlamaConfig, rngs: nnx.Rngs):
    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: 'layers'})
    def stack(rngs: nnx.Rngs) -> Block:
      return Block(config, rngs)

    size, width = config.vocab_size, config.width
    # Logits of a tied model then start with unit variance.
    scale = width**-0.5
    self.embedding = _weight(rngs, (size, width), ('vocab', 'embed'), scale)
    self.layers = stack(rngs)
    self.final_norm = RMSNorm(config, rngs)
    if not config.tie_embeddings:
      self.head = _weight(rngs, (width, size), ('embed', 'vocab'), scale)


def _project(x: jax.Array, weight: jax.Array) -> jax.Array:
  return linear.project(x, weight.astype(x.dtype))


def abstract_params(
  config: config_lib.LlamaConfig, dtype: jax.typing.DTypeLike = jnp.float32
) -> types.Params:
  """Returns the tree of parameters with a ParamSpec for each array.

  Args:
    config: of the model.
    dtype: written into each spec.
  """
  with nnx.use_eager_sharding(False):
    model = nnx.eval_shape(lambda: Llama(config, nnx.Rngs(params=0)))
    state = nnx.state(model, nnx.Param)
    axes = nnx.to_pure_dict(nnx.get_partition_spec(state))
  return jax.tree.map(
    lambda array, names: spec.ParamSpec(
      tuple(array.shape), jnp.dtype(dtype), tuple(names)
    ),
    nnx.to_pure_dict(state),
    axes,
  )


def init_params(
  config: config_lib.LlamaConfig, key: chex.PRNGKey
) -> types.Params:
  """Returns random float32 parameters, a nested dict of arrays.

  Projections start with variance 1 / fan-in, those back into the residual
  stream with 1 / (2 L fan-in) (Radford et al. 2019), norms at 1.

  Args:
    config: of the model.
    key: to draw with.
  """
  # Logical axes are metadata here, not names of mesh axes.
  with nnx.use_eager_sharding(False):
    model = Llama(config, nnx.Rngs(params=key))
  return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def _bind(
  make: Callable[..., nnx.Module],
  config: config_lib.LlamaConfig,
  params: types.Params,
) -> Any:
  """Returns the module of `make` holding the arrays of a plain tree."""
  with nnx.use_eager_sharding(False):
    abstract = nnx.eval_shape(lambda: make(config, nnx.Rngs(params=0)))
    graph, state = nnx.split(abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def _embed(
  params: types.Params, tokens: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
  return params['embedding'][tokens].astype(dtype)


def _forward(
  config: config_lib.LlamaConfig,
  params: types.Params,
  tokens: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  prefix_ids: jax.Array | None,
  compute_dtype: jax.typing.DTypeLike,
  remat: bool,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Returns the residual stream and each layer's keys and values."""
  chex.assert_rank(tokens, 2)
  chex.assert_equal_shape([tokens, positions, segment_ids])
  turn = rotary.rotation(
    positions, head_dim=config.head_dim, theta=config.rope_theta
  )
  mask = attention_lib.causal_mask(segment_ids, prefix_ids)
  attend = functools.partial(attention_lib.attend, mask=mask)

  def layer(
    x: jax.Array, weights: types.Params
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _bind(Block, config, weights)(x, turn, attend)

  x = _embed(params, tokens, compute_dtype)
  return jax.lax.scan(
    jax.checkpoint(layer) if remat else layer,
    x,
    params['layers'],
    unroll=config.num_layers <= _MAX_UNROLLED,
  )


def hidden_states(
  config: config_lib.LlamaConfig,
  params: types.Params,
  tokens: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  *,
  prefix_ids: jax.Array | None = None,
  compute_dtype: jax.typing.DTypeLike = jnp.float32,
  remat: bool = False,
) -> jax.Array:
  """Returns the normed output of the last layer, f32[B, T, D].

  Args:
    config: of the model.
    params: tree as `abstract_params` describes it.
    tokens: i32[B, T].
    positions: i32[B, T], restarting at 0 with each segment.
    segment_ids: i32[B, T], 0 = padding; tokens of one segment see only it.
    prefix_ids: i32[B, T], a further segment that a token sees, 0 = none; or
      None.
    compute_dtype: of the matrix products; norms and softmax are in float32.
    remat: whether to recompute each layer in the backward pass, which saves
      memory.
  """
  x, _ = _forward(
    config,
    params,
    tokens,
    positions,
    segment_ids,
    prefix_ids,
    compute_dtype,
    remat,
  )
  norm = _bind(RMSNorm, config, params['final_norm'])
  return norm(x.astype(jnp.float32))


def logits(
  config: config_lib.LlamaConfig,
  params: types.Params,
  hidden: jax.Array,
  *,
  compute_dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
  """Returns the scores of the next token, f32[..., V].

  Args:
    config: of the model.
    params: tree as `abstract_params` describes it.
    hidden: f32[..., D], from `hidden_states`.
    compute_dtype: of the factors; sums are in float32.
  """
  tied = config.tie_embeddings
  weight = params['embedding'] if tied else params['head']
  return jnp.einsum(
    '...d,vd->...v' if tied else '...d,dv->...v',
    hidden.astype(compute_dtype),
    weight.astype(compute_dtype),
    preferred_element_type=jnp.float32,
  )


def prefill(
  config: config_lib.LlamaConfig,
  params: types.Params,
  tokens: jax.Array,
  lengths: jax.Array,
  *,
  compute_dtype: jax.typing.DTypeLike = jnp.float32,
) -> kv_cache.KVCache:
  """Returns keys and values of prompts, f[L, P, T, K, A].

  Args:
    config: of the model.
    params: tree as `abstract_params` describes it.
    tokens: i32[P, T], right-padded.
    lengths: i32[P]; what is at or beyond a row's length means nothing.
    compute_dtype: as for `hidden_states`.
  """
  chex.assert_rank([tokens, lengths], [2, 1])
  row = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
  positions = jnp.broadcast_to(row, tokens.shape)
  segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
  _, (keys, values) = _forward(
    config, params, tokens, positions, segment_ids, None, compute_dtype, False
  )
  return kv_cache.KVCache(keys, values)


def decode_step(
  config: config_lib.LlamaConfig,
  params: types.Params,
  tokens: jax.Array,
  positions: jax.Array,
  cache: kv_cache.KVCache,
  *,
  compute_dtype: jax.typing.DTypeLike = jnp.float32,
) -> tuple[jax.Array, kv_cache.KVCache]:
  """Returns the scores of each slot's next token, and the longer cache.

  Args:
    config: of the model.
    params: tree as `abstract_params` describes it.
    tokens: i32[S], the newest token of each slot.
    positions: i32[S], its place; the cache holds what precedes it.
    cache: of S slots; not written where the position is beyond its capacity.
    compute_dtype: as for `hidden_states`.

  Returns:
    f32[S, V] and the cache with the new tokens.
  """
  chex.assert_rank([tokens, positions], 1)
  turn = rotary.rotation(
    positions, head_dim=config.head_dim, theta=config.rope_theta
  )

  def layer(
    x: jax.Array, inputs: tuple[types.Params, jax.Array, jax.Array]
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    weights, cached_keys, cached_values = inputs
    attend = functools.partial(
      attention_lib.attend_cached,
      cached_keys=cached_keys,
      cached_values=cached_values,
      positions=positions,
    )
    return _bind(Block, config, weights)(x, turn, attend)

  x = _embed(params, tokens, compute_dtype)
  x, (keys, values) = jax.lax.scan(
    layer, x, (params['layers'], cache.k, cache.v)
  )
  norm = _bind(RMSNorm, config, params['final_norm'])
  hidden = norm(x.astype(jnp.float32))
  scores = logits(config, params, hidden, compute_dtype=compute_dtype)
  return scores, kv_cache.write(cache, keys, values, positions)

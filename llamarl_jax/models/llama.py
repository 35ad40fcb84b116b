"""Llama as functions of plain trees of arrays.

Whole sequences, prompts into a cache, and one token a slot from a cache. The
layers, described by the modules in `layers`, are stacked along the first axis
of their arrays and scanned.
"""

import functools

import chex
from flax import nnx
import jax
import jax.numpy as jnp

from llamarl_jax import types
from llamarl_jax.models import attention as attention_lib
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import kv_cache
from llamarl_jax.models import layers
from llamarl_jax.models import remat as remat_lib
from llamarl_jax.models import rotary
from llamarl_jax.sharding import activations
from llamarl_jax.sharding import spec

# A loop costs a shallow model a tenth of its training step, and compiling it
# unrolled costs little; a deep one gains nothing and compiles for long.
_MAX_UNROLLED = 8
# Drawn apart from the weights, whose draws are numbered from 0.
_ADAPTERS = 2**31 - 1


def abstract_params(
  config: config_lib.LlamaConfig, dtype: jax.typing.DTypeLike = jnp.float32
) -> types.Params:
  """Returns the tree of parameters with a ParamSpec for each array.

  Args:
    config: of the model.
    dtype: written into each spec.
  """
  with nnx.use_eager_sharding(False):
    model = nnx.eval_shape(
      lambda: layers.Llama(config, _rngs(jax.random.key(0)))
    )
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
  stream with 1 / (2 L fan-in) (Radford et al. 2019), norms at 1,
  biases at 0. The weights are the same with and without adapters.

  Args:
    config: of the model.
    key: to draw with.
  """
  # Logical axes are metadata here, not names of mesh axes.
  with nnx.use_eager_sharding(False):
    model = layers.Llama(config, _rngs(key))
  return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def _rngs(key: chex.PRNGKey) -> nnx.Rngs:
  return nnx.Rngs(params=key, lora=jax.random.fold_in(key, _ADAPTERS))


def _block(
  config: config_lib.LlamaConfig, params: types.Params
) -> layers.Block:
  """Returns a layer that holds the arrays of a plain tree."""
  # On a mesh, nnx would look for logical axes among those of the mesh.
  no_mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
  with nnx.use_eager_sharding(False), no_mesh:
    abstract = nnx.eval_shape(
      lambda: layers.Block(config, _rngs(jax.random.key(0)))
    )
    graph, state = nnx.split(abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def _embed(
  params: types.Params, tokens: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
  # Each device looks tokens up in its part of the vocabulary, which would be
  # gathered if the width were left sharded.
  table = activations.constrain(params['embedding'], 'vocab', 'width')
  x = table[tokens].astype(dtype)
  return activations.constrain(x, 'width')


def _rotation(
  config: config_lib.LlamaConfig, positions: jax.Array
) -> rotary.Rotation:
  return rotary.rotation(
    positions,
    head_dim=config.head_dim,
    theta=config.rope_theta,
    scaling=config.rope_scaling,
  )


def _final_norm(
  config: config_lib.LlamaConfig, params: types.Params, x: jax.Array
) -> jax.Array:
  scale = params['final_norm']['scale']
  return layers.rms_norm(x.astype(jnp.float32), scale, config.norm_epsilon)


def _forward(
  config: config_lib.LlamaConfig,
  params: types.Params,
  tokens: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  prefix_ids: jax.Array | None,
  compute_dtype: jax.typing.DTypeLike,
  remat: str,
  attention: str,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Returns the residual stream and each layer's keys and values."""
  chex.assert_rank(tokens, 2)
  chex.assert_equal_shape([tokens, positions, segment_ids])
  turn = _rotation(config, positions)
  attend = functools.partial(
    attention_lib.attend,
    segment_ids=segment_ids,
    prefix_ids=prefix_ids,
    implementation=attention,
  )

  def layer(
    x: jax.Array, weights: types.Params
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _block(config, weights)(x, turn, attend)

  x = _embed(params, tokens, compute_dtype)
  return jax.lax.scan(
    remat_lib.POLICIES[remat](layer),
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
  remat: str = 'none',
  attention: str = 'auto',
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
    remat: what the backward pass computes again, a key of `remat.POLICIES`.
    attention: a key of `attention.IMPLEMENTATIONS`.
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
    attention,
  )
  return _final_norm(config, params, x)


def output_weight(
  params: types.Params, config: config_lib.LlamaConfig
) -> tuple[jax.Array, bool]:
  """Returns the output projection, and whether it is the embedding.

  Args:
    params: tree as `abstract_params` describes it.
    config: of the model.

  Returns:
    (f[V, D], True) where they are tied, else (f[D, V], False).
  """
  if config.tie_embeddings:
    return params['embedding'], True
  return params['head'], False


def logits(
  config: config_lib.LlamaConfig,
  params: types.Params,
  hidden: jax.Array,
  *,
  compute_dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
  """Returns the scores of the next token, f32[..., V].

  Those of padded vocabulary, beyond `config.num_tokens`, are -inf.

  Args:
    config: of the model.
    params: tree as `abstract_params` describes it.
    hidden: f32[..., D], from `hidden_states`.
    compute_dtype: of the factors; sums are in float32.
  """
  weight, tied = output_weight(params, config)
  scores = jnp.einsum(
    '...d,vd->...v' if tied else '...d,dv->...v',
    hidden.astype(compute_dtype),
    weight.astype(compute_dtype),
    preferred_element_type=jnp.float32,
  )
  scores = activations.constrain(scores, 'vocab')
  if config.num_tokens is None:
    return scores
  known = jnp.arange(config.vocab_size) < config.num_tokens
  return jnp.where(jnp.broadcast_to(known, scores.shape), scores, -jnp.inf)


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
    config,
    params,
    tokens,
    positions,
    segment_ids,
    None,
    compute_dtype,
    'none',
    'auto',
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
  turn = _rotation(config, positions)

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
    return _block(config, weights)(x, turn, attend)

  x = _embed(params, tokens, compute_dtype)
  x, (keys, values) = jax.lax.scan(
    layer, x, (params['layers'], cache.k, cache.v)
  )
  hidden = _final_norm(config, params, x)
  scores = logits(config, params, hidden, compute_dtype=compute_dtype)
  return scores, kv_cache.write(cache, keys, values, positions)

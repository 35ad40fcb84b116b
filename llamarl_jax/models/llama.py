"""Llama as functions of plain trees of arrays.

The layers, described by the modules in `layers`, are stacked along the first
axis of their arrays and scanned. Whole sequences are run here; prompts into a
cache, and one token a slot from a cache, by `inference`.
"""

import functools

import chex
from flax import nnx
import jax
import jax.numpy as jnp

from llamarl_jax import types
from llamarl_jax.models import attention as attention_lib
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import layers
from llamarl_jax.models import quantization
from llamarl_jax.models import remat as remat_lib
from llamarl_jax.models import rotary
from llamarl_jax.sharding import activations
from llamarl_jax.sharding import spec

# A loop costs a shallow model a tenth of its training step, and compiling it
# unrolled costs little; a deep one compiles for long.
MAX_UNROLLED = 8
# On a CPU each turn of the loop copies weights, activations and gradients out
# of the stacked arrays and into them: a tenth of the step at 30 layers.
_MAX_UNROLLED_ON_CPU = 32
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


def block(config: config_lib.LlamaConfig, params: types.Params) -> layers.Block:
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


def embed(
  params: types.Params, tokens: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
  """Returns rows of the embedding, f[..., D] of tokens i32[...]."""
  table = params['embedding']
  if not quantization.is_quantized(table):
    # Each device looks tokens up in its part of the vocabulary, which would be
    # gathered if the width were left sharded.
    table = activations.constrain(table, 'vocab', 'width')
  x = quantization.rows(table, tokens, dtype)
  return activations.constrain(x, 'width')


def rotation(
  config: config_lib.LlamaConfig, positions: jax.Array
) -> rotary.Rotation:
  """Returns the rotation of positions i32[...] as the model turns them."""
  return rotary.rotation(
    positions,
    head_dim=config.head_dim,
    theta=config.rope_theta,
    scaling=config.rope_scaling,
  )


def final_norm(
  config: config_lib.LlamaConfig, params: types.Params, x: jax.Array
) -> jax.Array:
  """Returns the residual stream f[..., D] normed as logits read it, f32."""
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
  turn = rotation(config, positions)
  attend = functools.partial(
    attention_lib.attend,
    segment_ids=segment_ids,
    prefix_ids=prefix_ids,
    implementation=attention,
  )

  def layer(
    x: jax.Array, weights: types.Params
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    weights = quantization.dequantize(weights, compute_dtype)
    return block(config, weights)(x, turn, attend)

  on_cpu = jax.default_backend() == 'cpu'
  most = _MAX_UNROLLED_ON_CPU if on_cpu else MAX_UNROLLED
  x = embed(params, tokens, compute_dtype)
  return jax.lax.scan(
    remat_lib.POLICIES[remat](layer),
    x,
    params['layers'],
    unroll=config.num_layers <= most,
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
  return final_norm(config, params, x)


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
  weight = quantization.dequantize(weight, compute_dtype)
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

"""The modules of a Llama: what its parameters are and what a layer does.

Touvron et al. (2023). They describe the parameters once: their shapes, initial
values and logical axes. Whole models are run by the functions in `llama`.
"""

from collections.abc import Callable
import functools
import math

from flax import nnx
import jax
import jax.numpy as jnp

from llamarl_jax.models import config as config_lib
from llamarl_jax.models import linear
from llamarl_jax.models import rotary
from llamarl_jax.models import swiglu
from llamarl_jax.sharding import activations

# (queries, keys, values) -> mixed values, shaped as the queries.
AttendFn = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _param(
  key: jax.Array,
  shape: tuple[int, ...],
  axes: tuple[str, ...],
  init: nnx.Initializer,
) -> nnx.Param:
  return nnx.Param(nnx.with_partitioning(init, axes)(key, shape, jnp.float32))


class RMSNorm(nnx.Module):
  """x / sqrt(mean(x ** 2) + epsilon) * scale, in float32."""

  def __init__(self, size: int, epsilon: float, rngs: nnx.Rngs):
    init = nnx.initializers.ones
    self.scale = _param(rngs.params(), (size,), ('norm',), init)
    self.epsilon = epsilon

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns x normed over its last axis, in the dtype of x."""
    return rms_norm(x, self.scale[...], self.epsilon)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
  """Returns x / sqrt(mean(x ** 2) + epsilon) * scale, in the dtype of x.

  Args:
    x: f[..., E].
    scale: f32[E].
    epsilon: added to the mean square.
  """
  return _norm_forward(x, scale, epsilon)[0]


def _norm_forward(
  x: jax.Array, scale: jax.Array, epsilon: float
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
  wide = x.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
  inverse = jax.lax.rsqrt(mean_square + epsilon)
  scaled = wide * inverse * _along_last(scale, x.ndim)
  return scaled.astype(x.dtype), (x, scale, inverse)


def _norm_backward(
  epsilon: float,
  residuals: tuple[jax.Array, jax.Array, jax.Array],
  gradient: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Reads x once more, where autodiff keeps the normed x beside it."""
  del epsilon
  x, scale, inverse = residuals
  wide, gradient = x.astype(jnp.float32), gradient.astype(jnp.float32)
  product = gradient * wide
  # A sum over tokens as a matrix product, which is faster than a reduction.
  by_scale = jnp.tensordot(
    inverse[..., 0], jax.lax.optimization_barrier(product), x.ndim - 1
  )
  scales = _along_last(scale, x.ndim)
  overlap = jnp.mean(product * scales, axis=-1, keepdims=True)
  by_x = gradient * scales * inverse - wide * (overlap * inverse**3)
  return by_x.astype(x.dtype), by_scale


rms_norm.defvjp(_norm_forward, _norm_backward)


def _along_last(scale: jax.Array, ndim: int) -> jax.Array:
  return scale.reshape((1,) * (ndim - 1) + (-1,))


def _uniform_by_fan_in(fan_in: int) -> nnx.Initializer:
  """Returns draws from (-1, 1) / sqrt(fan_in), as PEFT starts adapters."""
  bound = fan_in**-0.5

  def init(
    key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike
  ) -> jax.Array:
    return jax.random.uniform(key, shape, dtype, -bound, bound)

  return init


def _weight(
  config: config_lib.LlamaConfig, name: str, scale: float, rngs: nnx.Rngs
) -> nnx.Param:
  """Returns the weight of a projection, drawn from a normal distribution."""
  shape = config_lib.projections(config)[name]
  return _param(
    rngs.params(),
    shape.inner + shape.outer,
    shape.inner_axes + shape.outer_axes,
    nnx.initializers.normal(scale),
  )


def _adapter(
  config: config_lib.LlamaConfig, name: str, rngs: nnx.Rngs
) -> tuple[nnx.Param | None, nnx.Param | None]:
  """Returns the factors A and B of a projection's adapter, if it has one.

  B is 0: training starts from the function of the weights alone.
  """
  if config.lora is None or name not in config.lora.targets:
    return None, None
  shape, rank = config_lib.projections(config)[name], config.lora.rank
  # A stream of their own leaves the weights what they are without adapters.
  first = _param(
    rngs.lora(),
    (*shape.inner, rank),
    (*shape.inner_axes, 'lora'),
    _uniform_by_fan_in(math.prod(shape.inner)),
  )
  second = _param(
    rngs.lora(),
    (rank, *shape.outer),
    ('lora', *shape.outer_axes),
    nnx.initializers.zeros,
  )
  return first, second


def _adapter_scale(config: config_lib.LlamaConfig) -> float:
  return 0.0 if config.lora is None else config.lora.scale


def _bias(
  config: config_lib.LlamaConfig, name: str, rngs: nnx.Rngs
) -> nnx.Param | None:
  """Returns the bias of a projection, None where the model has none."""
  if not config.qkv_bias:
    return None
  shape = config_lib.projections(config)[name]
  init = nnx.initializers.zeros
  return _param(rngs.params(), shape.outer, shape.outer_axes, init)


def _project(
  x: jax.Array,
  weight: nnx.Param,
  lora_a: nnx.Param | None,
  lora_b: nnx.Param | None,
  lora_scale: float,
  *,
  bias: nnx.Param | None = None,
  num_inner: int = 1,
) -> jax.Array:
  """Returns x W + scale (x A) B + bias, computed in the dtype of x."""
  product = linear.project(x, weight[...].astype(x.dtype), num_inner)
  if lora_a is not None and lora_b is not None:
    # Through the narrow middle: A B is never formed.
    narrow = linear.project(x, lora_a[...].astype(x.dtype), num_inner)
    wide = linear.project(narrow, lora_b[...].astype(x.dtype))
    product = product + lora_scale * wide
  if bias is not None:
    added = bias[...].astype(x.dtype)
    product = product + jnp.broadcast_to(added, product.shape)
  return product


class Attention(nnx.Module):
  """Projections to queries, keys, values, and back."""

  def __init__(self, config: config_lib.LlamaConfig, rngs: nnx.Rngs):
    inner = config.num_heads * config.head_dim
    scale = config.width**-0.5
    self.query = _weight(config, 'query', scale, rngs)
    self.key = _weight(config, 'key', scale, rngs)
    self.value = _weight(config, 'value', scale, rngs)
    back = (2 * config.num_layers * inner) ** -0.5
    self.output = _weight(config, 'output', back, rngs)
    self.query_bias = _bias(config, 'query', rngs)
    self.key_bias = _bias(config, 'key', rngs)
    self.value_bias = _bias(config, 'value', rngs)
    self.query_norm, self.key_norm = (
      RMSNorm(config.head_dim, config.norm_epsilon, rngs)
      if config.qk_norm
      else None
      for _ in range(2)
    )
    self.query_lora_a, self.query_lora_b = _adapter(config, 'query', rngs)
    self.key_lora_a, self.key_lora_b = _adapter(config, 'key', rngs)
    self.value_lora_a, self.value_lora_b = _adapter(config, 'value', rngs)
    self.output_lora_a, self.output_lora_b = _adapter(config, 'output', rngs)
    self.lora_scale = _adapter_scale(config)

  def __call__(
    self, x: jax.Array, turn: rotary.Rotation, attend: AttendFn
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns the mixed values, and the keys and values read: f[..., K, A]."""
    scale = self.lora_scale
    queries = _project(
      x,
      self.query,
      self.query_lora_a,
      self.query_lora_b,
      scale,
      bias=self.query_bias,
    )
    keys = _project(
      x, self.key, self.key_lora_a, self.key_lora_b, scale, bias=self.key_bias
    )
    values = _project(
      x,
      self.value,
      self.value_lora_a,
      self.value_lora_b,
      scale,
      bias=self.value_bias,
    )
    if self.query_norm is not None and self.key_norm is not None:
      queries, keys = self.query_norm(queries), self.key_norm(keys)
    queries = activations.constrain(queries, 'heads', 'head_dim')
    keys = activations.constrain(keys, 'kv_heads', 'head_dim')
    values = activations.constrain(values, 'kv_heads', 'head_dim')
    keys = rotary.rotate(keys, turn)
    mixed = attend(rotary.rotate(queries, turn), keys, values)
    output = _project(
      mixed,
      self.output,
      self.output_lora_a,
      self.output_lora_b,
      scale,
      num_inner=2,
    )
    return output, (keys, values)


class MLP(nnx.Module):
  """SwiGLU: (silu(x gate) * (x up)) down. Shazeer (2020)."""

  def __init__(self, config: config_lib.LlamaConfig, rngs: nnx.Rngs):
    scale = config.width**-0.5
    back = (2 * config.num_layers * config.mlp_width) ** -0.5
    self.gate = _weight(config, 'gate', scale, rngs)
    self.up = _weight(config, 'up', scale, rngs)
    self.down = _weight(config, 'down', back, rngs)
    self.gate_lora_a, self.gate_lora_b = _adapter(config, 'gate', rngs)
    self.up_lora_a, self.up_lora_b = _adapter(config, 'up', rngs)
    self.down_lora_a, self.down_lora_b = _adapter(config, 'down', rngs)
    self.lora_scale = _adapter_scale(config)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns what the layer adds to the residual stream, f[..., D]."""
    scale = self.lora_scale
    gate = _project(x, self.gate, self.gate_lora_a, self.gate_lora_b, scale)
    up = _project(x, self.up, self.up_lora_a, self.up_lora_b, scale)
    hidden = activations.constrain(swiglu.gate(gate, up), 'mlp')
    return _project(
      hidden, self.down, self.down_lora_a, self.down_lora_b, scale
    )


class Block(nnx.Module):
  """One decoder layer: attention and MLP, each on its normed input."""

  def __init__(self, config: config_lib.LlamaConfig, rngs: nnx.Rngs):
    self.attention_norm = RMSNorm(config.width, config.norm_epsilon, rngs)
    self.attention = Attention(config, rngs)
    self.mlp_norm = RMSNorm(config.width, config.norm_epsilon, rngs)
    self.mlp = MLP(config, rngs)

  def __call__(
    self, x: jax.Array, turn: rotary.Rotation, attend: AttendFn
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns the residual stream, and the keys and values: f[..., K, A]."""
    mixed, read = self.attention(self.attention_norm(x), turn, attend)
    x = activations.constrain(x + mixed, 'width')
    x = x + self.mlp(self.mlp_norm(x))
    return activations.constrain(x, 'width'), read


class Llama(nnx.Module):
  """The parameters of a Llama, its layers stacked."""

  def __init__(self, config: config_lib.LlamaConfig, rngs: nnx.Rngs):
    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: 'layers'})
    def stack(rngs: nnx.Rngs) -> Block:
      return Block(config, rngs)

    size, width = config.vocab_size, config.width
    # Logits of a tied model then start with unit variance.
    init = nnx.initializers.normal(width**-0.5)
    self.embedding = _param(
      rngs.params(), (size, width), ('vocab', 'embed'), init
    )
    self.layers = stack(rngs)
    self.final_norm = RMSNorm(width, config.norm_epsilon, rngs)
    if not config.tie_embeddings:
      self.head = _param(rngs.params(), (width, size), ('embed', 'vocab'), init)

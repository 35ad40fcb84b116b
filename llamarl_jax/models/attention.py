"""Grouped-query attention over whole sequences.

Ainslie et al. (2023), GQA. Query head h reads key/value head h // (H / K);
the groups are an axis of the queries, so keys and values are never repeated.
One function over whole sequences, `attend`, stands before one implementation a
platform; they differ in rounding alone.
"""

from collections.abc import Callable
from collections.abc import Mapping
import functools
from typing import Literal

import chex
import jax
from jax.experimental.pallas.ops.tpu import splash_attention
import jax.numpy as jnp

from llamarl_jax.models import blocked_attention
from llamarl_jax.sharding import activations
from llamarl_jax.sharding import rules

# Finite, so that a row with nothing to attend to gives no NaN.
_MASKED = -1e30
# Lanes of a TPU vector register: lengths come in blocks of it.
_LANES = 128
# Larger blocks keep the kernel on the matrix unit; 512 fit on chip with heads
# of up to 256.
_MAX_BLOCK = 512

# (queries, keys, values, segment_ids, prefix_ids) -> mixed values
AttendFn = Callable[
  [jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array
]


def attend(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  segment_ids: jax.Array,
  prefix_ids: jax.Array | None,
  *,
  implementation: str = 'auto',
) -> jax.Array:
  """Returns softmax(q k' / sqrt(A)) v over the keys of `causal_mask`.

  Args:
    queries: f[B, T, H, A].
    keys: f[B, T, K, A].
    values: f[B, T, K, A].
    segment_ids: i32[B, T], see `causal_mask`.
    prefix_ids: i32[B, T] or None, see `causal_mask`.
    implementation: a key of IMPLEMENTATIONS.

  Returns:
    f[B, T, H, A], in the dtype of the values.

  Raises:
    ValueError: the implementation cannot do what is asked of it.
  """
  chex.assert_rank([queries, keys, segment_ids], [4, 4, 2])
  chex.assert_equal_shape([keys, values])
  chex.assert_shape(segment_ids, queries.shape[:2])
  # Devices may share the tokens of a row: each has queries of its own, and
  # needs the keys and values of the whole row.
  keys, values = (
    activations.constrain(x, None, 'kv_heads', 'head_dim')
    for x in (keys, values)
  )
  return IMPLEMENTATIONS[implementation](
    queries, keys, values, segment_ids, prefix_ids
  )


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


def _auto(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  segment_ids: jax.Array,
  prefix_ids: jax.Array | None,
) -> jax.Array:
  """Attends by the fastest that this platform, dtype and layout allow.

  On GPU cuDNN, where `_cudnn_fault` finds nothing; on TPU splash, where
  `_splash_fault` finds nothing; on one CPU device blocks; XLA in all other
  cases.
  """
  platform = jax.default_backend()
  chosen: AttendFn = _xla
  if platform == 'gpu' and not _cudnn_fault(queries):
    chosen = _cudnn
  elif platform == 'tpu' and not _splash_fault(queries, prefix_ids):
    chosen = _splash
  elif platform == 'cpu' and _is_whole():
    chosen = _blocked
  return chosen(queries, keys, values, segment_ids, prefix_ids)


def _is_whole() -> bool:
  """Returns whether activations are on one device.

  Cutting the tokens into blocks would move those that are spread over several.
  """
  mesh = jax.sharding.get_abstract_mesh()
  return mesh.empty or mesh.size == 1


def _blocked(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  segment_ids: jax.Array,
  prefix_ids: jax.Array | None,
) -> jax.Array:
  """Attends by blocks of queries; half of f[B, H, T, T] is kept."""
  mask = causal_mask(segment_ids, prefix_ids)
  return blocked_attention.attend(queries, keys, values, mask)


def _xla(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  segment_ids: jax.Array,
  prefix_ids: jax.Array | None,
) -> jax.Array:
  """Attends by two matrix products; f32[B, H, T, T] scores are kept."""
  batch, length, num_heads, head_dim = queries.shape
  num_kv_heads = keys.shape[2]
  mask = causal_mask(segment_ids, prefix_ids)
  grouped = queries.reshape(batch, length, num_kv_heads, -1, head_dim)
  scores = jnp.einsum(
    'btkga,bska->bkgts', grouped, keys, preferred_element_type=jnp.float32
  )
  scores = jnp.where(mask[:, None, None], scores * head_dim**-0.5, _MASKED)
  weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
  mixed = jnp.einsum('bkgts,bska->btkga', weights, values)
  return mixed.reshape(batch, length, num_heads, head_dim)


def _cudnn(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  segment_ids: jax.Array,
  prefix_ids: jax.Array | None,
  backend: Literal['cudnn', 'xla'] = 'cudnn',
) -> jax.Array:
  """Attends by cuDNN's flash attention; only the mask is [B, T, T].

  `backend` 'xla' runs the same call without a GPU.
  """
  fault = _cudnn_fault(queries)
  if fault and backend == 'cudnn':
    raise ValueError(fault)
  length = queries.shape[1]
  # With a mask cuDNN wants even lengths; segment 0 is padding.
  queries, keys, values, segment_ids = (
    _pad_length(2, x) for x in (queries, keys, values, segment_ids)
  )
  if prefix_ids is not None:
    prefix_ids = _pad_length(2, prefix_ids)
  mixed = jax.nn.dot_product_attention(
    queries,
    keys,
    values,
    mask=causal_mask(segment_ids, prefix_ids)[:, None],
    implementation=backend,
  )
  return mixed[:, :length]


def _cudnn_fault(queries: jax.Array) -> str:
  """Returns why cuDNN cannot do this, or nothing."""
  head_dim = queries.shape[-1]
  if queries.dtype not in (jnp.bfloat16, jnp.float16):
    return (
      f"attention 'cudnn' has no {queries.dtype}: set the compute dtype to "
      "bfloat16, or attention to 'xla'"
    )
  if head_dim % 8 or head_dim > 128:
    return (
      f"attention 'cudnn' has no heads of width {head_dim}, only multiples of "
      "8 up to 128: set attention to 'xla'"
    )
  return ''


def _splash(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  segment_ids: jax.Array,
  prefix_ids: jax.Array | None,
  interpret: bool = False,
) -> jax.Array:
  """Attends by the Pallas kernel for TPUs that comes with JAX.

  Nothing of size [T, T] exists. Under a mesh (`jax.sharding.use_abstract_mesh`)
  each device attends over its own rows and heads; `interpret` runs the kernel
  without a TPU.
  """
  fault = _splash_fault(queries, prefix_ids)
  if fault:
    raise ValueError(fault)
  length = queries.shape[1]
  queries, keys, values, segment_ids = (
    _pad_length(_LANES, x) for x in (queries, keys, values, segment_ids)
  )
  kernel = functools.partial(_splash_kernel, interpret=interpret)
  mesh = jax.sharding.get_abstract_mesh()
  if not mesh.empty:
    # The compiler cannot split a kernel by itself, and would gather.
    rows = tuple(a for a in rules.BATCH_AXES if a in mesh.shape) or None
    shards = mesh.shape.get('tensor', 1)
    heads = None if keys.shape[2] % shards or shards == 1 else 'tensor'
    wide = jax.P(rows, None, heads, None)
    kernel = jax.shard_map(
      kernel,
      mesh=mesh,
      in_specs=(wide, wide, wide, jax.P(rows, None)),
      out_specs=wide,
      check_vma=False,
    )
  return kernel(queries, keys, values, segment_ids)[:, :length]


def _splash_kernel(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  segment_ids: jax.Array,
  *,
  interpret: bool,
) -> jax.Array:
  """Runs the kernel on the rows and heads of one device."""
  length, num_heads, head_dim = queries.shape[1:]
  block = next(size for size in (_MAX_BLOCK, 256, _LANES) if length % size == 0)
  causal = splash_attention.CausalMask((length, length))
  kernel = splash_attention.make_splash_mha(
    splash_attention.MultiHeadMask([causal] * num_heads),
    head_shards=1,
    q_seq_shards=1,
    block_sizes=splash_attention.BlockSizes(
      block_q=block,
      block_kv=block,
      block_q_dkv=block,
      block_kv_dkv=block,
      block_q_dq=block,
      block_kv_dq=block,
    ),
    interpret=interpret,
  )

  def attend_row(
    queries: jax.Array, keys: jax.Array, values: jax.Array, ids: jax.Array
  ) -> jax.Array:
    return kernel(queries, keys, values, splash_attention.SegmentIds(ids, ids))

  # The kernel does not scale, and wants heads before tokens.
  scaled = queries * jnp.asarray(head_dim**-0.5, queries.dtype)
  mixed = jax.vmap(attend_row)(
    scaled.swapaxes(1, 2),
    keys.swapaxes(1, 2),
    values.swapaxes(1, 2),
    segment_ids,
  )
  return mixed.swapaxes(1, 2).astype(values.dtype)


def _splash_fault(queries: jax.Array, prefix_ids: jax.Array | None) -> str:
  """Returns why splash cannot do this, or nothing."""
  head_dim = queries.shape[-1]
  if prefix_ids is not None:
    return (
      "attention 'splash' has no shared prompts: set trainer.share_prompts to "
      "False (with trainer.pack_tokens, to fill rows), or attention to 'xla'"
    )
  if head_dim % 64 or head_dim > 256:
    return (
      f"attention 'splash' has no heads of width {head_dim}, only multiples of "
      "64 up to 256: set attention to 'xla'"
    )
  return ''


def _pad_length(multiple: int, x: jax.Array) -> jax.Array:
  """Returns x with axis 1 filled up by zeros."""
  more = -x.shape[1] % multiple
  return jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2))


IMPLEMENTATIONS: Mapping[str, AttendFn] = {
  'auto': _auto,
  'xla': _xla,
  'blocked': _blocked,
  'cudnn': _cudnn,
  'splash': _splash,
}

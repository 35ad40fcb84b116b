"""Log-probs of chosen tokens from hidden states, in chunks of tokens.

With a vocabulary of 128256, the logits of a batch are its largest array by
far. Here only those of one chunk exist at a time, in the forward pass and in
the backward pass, which computes them again. The vocabulary may be spread over
devices: then neither the weight nor logits are gathered along it.
"""

import functools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from llamarl_jax import types
from llamarl_jax.algorithms import log_probs as log_probs_lib
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.sharding import rules

# Each chunk reads and writes the whole gradient of the weight, so that small
# chunks are slow.
DEFAULT_MAX_BYTES = 2**28

_VOCAB_AXIS = 'tensor'


class _Head(NamedTuple):
  """The output projection, but for its weight; static.

  Attributes:
    tied: whether the weight is f[V, D] rather than f[D, V].
    num_tokens: ids from here on are forbidden; None for none.
    temperature: of the softmax.
    dtype: of the factors of matrix products; sums are in float32.
  """

  tied: bool
  num_tokens: int | None
  temperature: float
  dtype: jax.typing.DTypeLike

  @property
  def axes(self) -> str:
    """Of the weight, as einsum names them."""
    return 'vd' if self.tied else 'dv'

  @property
  def vocab(self) -> int:
    """Which axis of the weight is the vocabulary."""
    return self.axes.index('v')


def token_log_probs(
  config: config_lib.LlamaConfig,
  params: types.Params,
  hidden: jax.Array,
  tokens: jax.Array,
  *,
  temperature: float,
  compute_dtype: jax.typing.DTypeLike = jnp.float32,
  max_bytes: int = DEFAULT_MAX_BYTES,
) -> tuple[jax.Array, jax.Array]:
  """Returns the log-prob of each token, and the entropy of what it is from.

  log_softmax(logits(hidden) / temperature)[token]; f32[B, S] each. There is no
  gradient of the entropy, which is a metric.

  Args:
    config: of the model.
    params: tree as `llama.abstract_params` describes it.
    hidden: f32[B, S, D], from `llama.hidden_states`.
    tokens: i32[B, S], predicted from `hidden`.
    temperature: above 0.
    compute_dtype: of the factors of the projection.
    max_bytes: that logits may take on a device, in float32. Where there are
      several chunks, each takes half of it, to make room for the gradients of
      the weight, of this chunk and of those before it.

  Raises:
    ValueError: if the temperature is not above 0.
  """
  # Axes of what follows: k parts of the batch, one for each group of devices
  # that holds tokens of its own; n chunks of each part; c tokens of a chunk.
  chex.assert_rank(hidden, 3)
  chex.assert_shape(tokens, hidden.shape[:2])
  weight, tied = llama.output_weight(params, config)
  head = _Head(tied, config.num_tokens, temperature, jnp.dtype(compute_dtype))
  batch, length = tokens.shape
  rows = _num_shards(batch, *rules.BATCH_AXES)
  parts = _num_shards(length, rules.TOKEN_AXIS)
  size = batch * length // (rows * parts)
  width = config.vocab_size // _num_shards(config.vocab_size, _VOCAB_AXIS)
  num_bytes = 4 * size * width
  if num_bytes <= max_bytes:
    num_chunks = 1
  else:
    num_chunks = min(size, -(-2 * num_bytes // max_bytes))

  def deal(x: jax.Array) -> jax.Array:
    """Returns x of [B, S, ...] as [n, k, c, ...]."""
    x = x.reshape(rows, batch // rows, parts, length // parts, *x.shape[2:])
    x = x.swapaxes(1, 2).reshape(rows * parts, size, *x.shape[4:])
    more = -size % num_chunks
    x = jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(rows * parts, num_chunks, -1, *x.shape[2:])
    return _lay_out(x.swapaxes(0, 1), 1)

  def collect(x: jax.Array) -> jax.Array:
    """Returns x of [n, k * c] as [B, S]."""
    x = x.reshape(num_chunks, rows * parts, -1)
    x = x.swapaxes(0, 1).reshape(rows * parts, -1)[:, :size]
    x = x.reshape(rows, parts, batch // rows, length // parts)
    return x.swapaxes(1, 2).reshape(batch, length)

  log_probs, entropy = _score(head, deal(hidden), weight, deal(tokens))
  return collect(log_probs), collect(entropy)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score(
  head: _Head, hidden: jax.Array, weight: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns log-probs and entropy, f32[n, k * c] each, of f[n, k, c, D]."""
  return _score_forward(head, hidden, weight, tokens)[0]


# What the backward pass needs; the exponentials of logits only where there is
# but one chunk, as they need all the memory that chunks save.
_Residuals = tuple[
  jax.Array,
  jax.Array,
  jax.Array,
  log_probs_lib.TokenScores,
  jax.Array | None,
]


# Of the backward pass: hidden, tokens, scores, gradient by the log-probs.
_Chunk = tuple[jax.Array, jax.Array, log_probs_lib.TokenScores, jax.Array]


def _score_forward(
  head: _Head, hidden: jax.Array, weight: jax.Array, tokens: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], _Residuals]:
  whole = _whole_weight(head, weight)

  def score(
    chunk: tuple[jax.Array, jax.Array],
  ) -> tuple[log_probs_lib.TokenScores, jax.Array]:
    return log_probs_lib.score_tokens(
      _logits(head, chunk[0], whole),
      chunk[1].reshape(-1),
      temperature=head.temperature,
    )

  if len(hidden) == 1:
    scores, exponentials = jax.tree.map(
      lambda x: x[None], score((hidden[0], tokens[0]))
    )
  else:
    scores = jax.lax.map(lambda chunk: score(chunk)[0], (hidden, tokens))
    exponentials = None
  residuals = (hidden, weight, tokens, scores, exponentials)
  return (scores.log_probs, scores.entropy), residuals


def _score_backward(
  head: _Head,
  residuals: _Residuals,
  gradients: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, None]:
  hidden, weight, tokens, scores, exponentials = residuals
  whole = _whole_weight(head, weight)
  shape = (hidden.shape[1], *weight.shape)

  def by_logits(
    chunk: _Chunk, exponentials: jax.Array | None
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of a chunk by f[k, c, D] and f[k * c, V]."""
    hidden, tokens, scores, gradient = chunk
    temperature = head.temperature
    if exponentials is None:
      exponentials = log_probs_lib.exponentials_of(
        _logits(head, hidden, whole), scores, temperature=temperature
      )
    by_logit = log_probs_lib.logits_gradient(
      exponentials,
      tokens.reshape(-1),
      scores,
      gradient,
      temperature=temperature,
    )
    # Keeps the products that follow whole; see `linear`.
    by_logit = jax.lax.optimization_barrier(by_logit.astype(head.dtype))
    by_hidden = _product(f'tv,{head.axes}->td', by_logit, whole)
    return by_hidden.reshape(hidden.shape).astype(hidden.dtype), by_logit

  def by_weight(hidden: jax.Array, by_logit: jax.Array) -> jax.Array:
    factor = hidden.astype(head.dtype)
    return _product(f'td,tv->{head.axes}', factor, by_logit)

  chunks = (hidden, tokens, scores, gradients[0])
  if exponentials is not None:
    only = jax.tree.map(lambda x: x[0], chunks)
    by_hidden, by_logit = by_logits(only, exponentials[0])
    total = by_weight(_flat(hidden[0]), by_logit)
    return by_hidden[None], total.astype(weight.dtype), None

  def add(total: jax.Array, chunk: _Chunk) -> tuple[jax.Array, jax.Array]:
    by_hidden, by_logit = by_logits(chunk, None)
    # Each part keeps a sum of its own, so that devices add up but once.
    parts = by_logit.reshape(*chunk[1].shape, -1)
    more = jax.vmap(by_weight)(chunk[0], parts)
    return _lay_out(total + more, 0, head.vocab + 1), by_hidden

  zeros = _lay_out(jnp.zeros(shape, jnp.float32), 0, head.vocab + 1)
  total, by_hidden = jax.lax.scan(add, zeros, chunks)
  return by_hidden, jnp.sum(total, axis=0).astype(weight.dtype), None


_score.defvjp(_score_forward, _score_backward)


def _whole_weight(head: _Head, weight: jax.Array) -> jax.Array:
  """Returns the weight as each device needs it: split by vocabulary alone.

  Before the loop over chunks, so that devices that share it exchange it once.
  """
  return _lay_out(weight.astype(head.dtype), None, head.vocab)


def _logits(head: _Head, hidden: jax.Array, weight: jax.Array) -> jax.Array:
  """Returns f32[k * c, V] of f[k, c, D]."""
  factor = _flat(hidden.astype(head.dtype))
  logits = _product(f'td,{head.axes}->tv', factor, weight)
  logits = _lay_out(logits, 0, 1)
  if head.num_tokens is None:
    return logits
  place = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
  return jnp.where(place < head.num_tokens, logits, -jnp.inf)


def _flat(x: jax.Array) -> jax.Array:
  """Returns x of [..., E] as [N, E].

  XLA on CPU takes six times as long for sums over the last axis where the
  first has size 1.
  """
  return x.reshape(-1, x.shape[-1])


def _product(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
  return jnp.einsum(formula, x, y, preferred_element_type=jnp.float32)


def _num_shards(size: int, *axes: str) -> int:
  """Returns over how many devices a dimension is spread: 1 if not evenly."""
  mesh = jax.sharding.get_abstract_mesh()
  shards = math.prod(mesh.shape.get(axis, 1) for axis in axes)
  return 1 if size % shards else shards


def _lay_out(
  x: jax.Array, parts_axis: int | None, vocab_axis: int | None = None
) -> jax.Array:
  """Returns x, its parts and its vocabulary spread over the devices."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return x
  entries: list[str | tuple[str, ...] | None] = [None] * x.ndim
  if parts_axis is not None:
    axes = tuple(
      axis
      for axis in (*rules.BATCH_AXES, rules.TOKEN_AXIS)
      if mesh.shape.get(axis, 1) > 1
    )
    if x.shape[parts_axis] % math.prod(mesh.shape[axis] for axis in axes) == 0:
      entries[parts_axis] = axes or None
  if (
    vocab_axis is not None and _num_shards(x.shape[vocab_axis], _VOCAB_AXIS) > 1
  ):
    entries[vocab_axis] = _VOCAB_AXIS
  return jax.lax.with_sharding_constraint(x, jax.P(*entries))

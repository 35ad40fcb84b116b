"""Batched decoding over slots, in bounded segments.

Between segments finished slots are harvested and refilled, and the weights may
change: what is unfinished goes on under the new ones, each token recorded with
the version that sampled it.
"""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp

from llamarl_jax import types
from llamarl_jax.models import apart
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import inference
from llamarl_jax.models import kv_cache
from llamarl_jax.sampling import keys as keys_lib
from llamarl_jax.sampling import samplers
from llamarl_jax.sampling import slots as slots_lib


def _compiler_options(platform: str) -> dict[str, str] | None:
  """Returns what makes XLA's programs fastest on a platform."""
  if platform != 'cpu':
    return None
  # Matrix products run faster by Eigen than by YNNPACK, which has the others
  # by default; sums run faster by YNNPACK.
  return {'xla_cpu_experimental_ynn_fusion_type': 'LIBRARY_FUSION_TYPE_REDUCE'}


@functools.cache
def _prefill_program(platform: str) -> Any:
  return jax.jit(
    inference.prefill_chunk,
    static_argnames=('config', 'read_length', 'compute_dtype'),
    donate_argnames=('cache',),
    compiler_options=_compiler_options(platform),
  )


def prefill_chunk(
  config: config_lib.LlamaConfig,
  params: types.Params,
  cache: kv_cache.KVCache,
  chunk: inference.PromptChunk,
  *,
  read_length: int,
  compute_dtype: jax.typing.DTypeLike = jnp.float32,
) -> kv_cache.KVCache:
  """Returns the cache, donated, with the tokens of a chunk read.

  Args:
    config: of the model.
    params: of the model.
    cache: of the slots or of prompt lines; see `inference.prefill_chunk`.
    chunk: the tokens.
    read_length: no row of the chunk starts beyond it.
    compute_dtype: of the matrix products.
  """
  return _prefill_program(jax.default_backend())(
    config,
    params,
    cache,
    chunk,
    read_length=read_length,
    compute_dtype=compute_dtype,
  )


def _record(
  state: slots_lib.DecodeState,
  sampled: samplers.Sampled,
  version: jax.Array,
  stop_tokens: tuple[int, ...],
) -> slots_lib.DecodeState:
  """Returns the state, its cache aside, after one sampled token a slot."""
  active = state.active
  column = jnp.arange(state.tokens.shape[1])[None, :]
  # Rows that are done match no column, so nothing is written past their end.
  here = active[:, None] & (column == state.num_new[:, None])
  num_new = state.num_new + active
  stopped = jnp.zeros_like(active)
  for stop in stop_tokens:
    stopped |= sampled.tokens == stop
  full = num_new >= state.max_new
  reason = jnp.where(
    stopped,
    slots_lib.STOPPED,
    jnp.where(full, slots_lib.FULL, slots_lib.RUNNING),
  )
  finish = jnp.where(active, reason, state.finish)
  return dataclasses.replace(
    state,
    last_token=jnp.where(active, sampled.tokens, state.last_token),
    position=state.position + active,
    num_new=num_new,
    active=active & (finish == slots_lib.RUNNING),
    tokens=jnp.where(here, sampled.tokens[:, None], state.tokens),
    log_probs=jnp.where(here, sampled.log_probs[:, None], state.log_probs),
    versions=jnp.where(here, version, state.versions),
    finish=finish,
  )


def _without_early_stops(
  logits: jax.Array, state: slots_lib.DecodeState, stop_tokens: tuple[int, ...]
) -> jax.Array:
  """Returns the logits, stop tokens impossible where it is too early."""
  if not stop_tokens:
    return logits
  early = (state.num_new < state.min_new)[:, None]
  stops = jnp.asarray(stop_tokens)
  allowed = jnp.where(early, -jnp.inf, logits[:, stops])
  return logits.at[:, stops].set(allowed)


@functools.cache
def segment_program(platform: str) -> Any:
  """Returns `decode_segment`, compiled as is best on a platform."""
  return jax.jit(
    _decode_segment,
    static_argnames=(
      'config',
      'read_length',
      'max_steps',
      'stop_tokens',
      'compute_dtype',
    ),
    donate_argnames=('state',),
    compiler_options=_compiler_options(platform),
  )


def prepare(
  config: config_lib.LlamaConfig,
  params: types.Params,
  *,
  compute_dtype: jax.typing.DTypeLike = jnp.float32,
) -> types.Params:
  """Returns parameters as `decode_segment` reads them fastest.

  On CPU a second copy, to be kept for all segments of a version; see `apart`.
  Elsewhere the parameters themselves.

  Args:
    config: of the model.
    params: of the model.
    compute_dtype: of the matrix products.
  """
  if jax.default_backend() != 'cpu':
    return params
  return apart.take_apart(config, params, compute_dtype=compute_dtype)


def decode_segment(
  config: config_lib.LlamaConfig,
  params: types.Params,
  state: slots_lib.DecodeState,
  key: chex.PRNGKey,
  version: int | jax.Array,
  *,
  num_steps: int | jax.Array,
  stop_tokens: tuple[int, ...],
  min_active: int | jax.Array = 1,
  read_length: int | None = None,
  max_steps: int | None = None,
  compute_dtype: jax.typing.DTypeLike = jnp.float32,
) -> slots_lib.DecodeState:
  """Returns the state after up to `num_steps` tokens more in each active slot.

  A sampled stop token is recorded as the last token of its completion.

  Args:
    config: of the model.
    params: of the model, or what `prepare` made of them.
    state: the slots, donated.
    key: the key of the run; see `keys.token_keys`.
    version: i32[], of `params`, recorded with each token.
    num_steps: most decode steps.
    stop_tokens: tokens that end a completion.
    min_active: fewer active slots end the segment, at least 1.
    read_length: positions of the cache that are read: the newest token of no
      active slot is beyond them. Without `prepare` they are also all that is
      written. None = all.
    max_steps: most that `num_steps` ever is, known when it is compiled; None =
      as many as there are positions, which is slower.
    compute_dtype: of the matrix products.
  """
  return segment_program(jax.default_backend())(
    config,
    params,
    state,
    key,
    version,
    num_steps=num_steps,
    stop_tokens=stop_tokens,
    min_active=min_active,
    read_length=read_length,
    max_steps=max_steps,
    compute_dtype=compute_dtype,
  )


def _decode_segment(
  config: config_lib.LlamaConfig,
  params: types.Params,
  state: slots_lib.DecodeState,
  key: chex.PRNGKey,
  version: jax.Array,
  *,
  num_steps: jax.Array,
  stop_tokens: tuple[int, ...],
  min_active: jax.Array,
  read_length: int | None,
  max_steps: int | None,
  compute_dtype: jax.typing.DTypeLike,
) -> slots_lib.DecodeState:
  whole = state.cache
  length = whole.capacity if read_length is None else read_length
  slot_keys = keys_lib.slot_keys(
    key, state.stream, state.admission, state.sample
  )
  starts = state.position
  decode: Any
  memory: Any
  if apart.is_apart(params):
    room = length if max_steps is None else min(max_steps, length)
    memory = apart.open_windows(whole, length=length, num_new=room)
    decode = functools.partial(
      _step_apart, config, params, starts, length, compute_dtype
    )
  else:
    room = length
    params = inference.cast_matrices(params, compute_dtype)
    memory = jax.tree.map(lambda x: x[:, :, :, :length], whole)
    decode = functools.partial(
      _step_stacked, config, params, length, compute_dtype
    )

  def unfinished(carry: tuple[jax.Array, Any, Any]) -> jax.Array:
    step, state, _ = carry
    wanted = step < jnp.minimum(num_steps, room)
    return wanted & (jnp.sum(state.active) >= min_active)

  def advance(
    carry: tuple[jax.Array, slots_lib.DecodeState, Any],
  ) -> tuple[jax.Array, slots_lib.DecodeState, Any]:
    step, state, memory = carry
    logits, memory = decode(state, memory, step)
    sampled = samplers.sample(
      _without_early_stops(logits, state, stop_tokens),
      keys_lib.at_position(slot_keys, state.num_new),
      state.temperature,
      state.top_k,
      state.top_p,
      state.min_p,
    )
    return step + 1, _record(state, sampled, version, stop_tokens), memory

  # The whole cache stays outside the loop, which would copy it.
  nothing: Any = None
  state = dataclasses.replace(state, cache=nothing)
  _, state, memory = jax.lax.while_loop(
    unfinished, advance, (jnp.int32(0), state, memory)
  )
  if apart.is_apart(params):
    counts = state.position - starts
    cache = apart.close_windows(whole, memory, starts, counts, length=length)
  else:
    cache = jax.tree.map(
      lambda into, new: into.at[:, :, :, :length].set(new), whole, memory
    )
  return dataclasses.replace(state, cache=cache)


def _step_apart(
  config: config_lib.LlamaConfig,
  params: types.Params,
  starts: jax.Array,
  length: int,
  compute_dtype: jax.typing.DTypeLike,
  state: slots_lib.DecodeState,
  windows: tuple[apart.Window, ...],
  step: jax.Array,
) -> tuple[jax.Array, tuple[apart.Window, ...]]:
  return apart.decode_step(
    config,
    params,
    state.last_token,
    state.position,
    windows,
    starts=starts,
    length=length,
    step=step,
    compute_dtype=compute_dtype,
  )


def _step_stacked(
  config: config_lib.LlamaConfig,
  params: types.Params,
  length: int,
  compute_dtype: jax.typing.DTypeLike,
  state: slots_lib.DecodeState,
  cache: kv_cache.KVCache,
  step: jax.Array,
) -> tuple[jax.Array, kv_cache.KVCache]:
  del step
  # At the end nothing is written: slots that are done stay as they are.
  positions = jnp.where(state.active, state.position, length)
  return inference.decode_step(
    config,
    params,
    state.last_token,
    positions,
    cache,
    compute_dtype=compute_dtype,
  )

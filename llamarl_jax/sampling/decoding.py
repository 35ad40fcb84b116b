"""Batched decoding over slots, in bounded segments.

A slot holds one unfinished completion. Between segments finished slots are
harvested and refilled, and the weights may change: what is unfinished goes on
under the new ones, each token recorded with the version that sampled it.
"""

import dataclasses
import functools

import chex
import flax.struct
import jax
import jax.numpy as jnp

from llamarl_jax import types
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import kv_cache
from llamarl_jax.models import llama
from llamarl_jax.sampling import keys as keys_lib
from llamarl_jax.sampling import samplers

# Values of `DecodeState.finish`.
RUNNING = 0
STOPPED = 1
FULL = 2


@flax.struct.dataclass
class DecodeState:
  """The S slots, with room for M new tokens each.

  Attributes:
    last_token: i32[S], newest token, not yet in the cache.
    position: i32[S], its place in the sequence.
    num_new: i32[S], tokens sampled so far.
    active: bool[S], whether the slot is being decoded.
    tokens: i32[S, M], sampled tokens, 0 where there is none yet.
    log_probs: f32[S, M], behavior log-probs of `tokens`.
    versions: i32[S, M], policy version that sampled each of `tokens`.
    admission: i32[S], admission index of the request.
    sample: i32[S], sample index within the group.
    stream: i32[S], `types.Stream` of the request.
    temperature: f32[S], 0 = greedy.
    max_new: i32[S], limit on `num_new`, at most M.
    finish: i32[S], RUNNING, STOPPED (a stop token) or FULL (max_new reached).
    cache: keys and values before `position`.
  """

  last_token: jax.Array
  position: jax.Array
  num_new: jax.Array
  active: jax.Array
  tokens: jax.Array
  log_probs: jax.Array
  versions: jax.Array
  admission: jax.Array
  sample: jax.Array
  stream: jax.Array
  temperature: jax.Array
  max_new: jax.Array
  finish: jax.Array
  cache: kv_cache.KVCache


@flax.struct.dataclass
class Filling:
  """Prompts to prefill and the M slots that continue them.

  Prepared as host arrays; see `segments.pack`.

  Attributes:
    prompts: i32[P, max_prompt], right-padded.
    prompt_lengths: i32[P], at least 1.
    source_rows: i32[M], row of `prompts` each slot continues.
    slots: i32[M], slot to fill; one that does not exist is padding.
    admission: i32[M], as in DecodeState, and so on.
    sample: i32[M].
    stream: i32[M].
    temperature: f32[M].
    max_new: i32[M].
  """

  prompts: jax.Array
  prompt_lengths: jax.Array
  source_rows: jax.Array
  slots: jax.Array
  admission: jax.Array
  sample: jax.Array
  stream: jax.Array
  temperature: jax.Array
  max_new: jax.Array


def init_state(
  config: config_lib.LlamaConfig,
  num_slots: int,
  max_prompt: int,
  max_new: int,
  dtype: jax.typing.DTypeLike = jnp.float32,
) -> DecodeState:
  """Returns S empty slots.

  Args:
    config: of the model.
    num_slots: completions decoded at once (S).
    max_prompt: longest prompt, in tokens.
    max_new: most tokens sampled for a completion (M).
    dtype: of the cache.
  """
  # Each leaf its own buffer, since the state is donated.
  integers = [jnp.zeros(num_slots, jnp.int32) for _ in range(8)]
  last, position, num_new, admission, sample, stream, limit, finish = integers
  shape = (num_slots, max_new)
  return DecodeState(
    last_token=last,
    position=position,
    num_new=num_new,
    active=jnp.zeros(num_slots, bool),
    tokens=jnp.zeros(shape, jnp.int32),
    log_probs=jnp.zeros(shape, jnp.float32),
    versions=jnp.zeros(shape, jnp.int32),
    admission=admission,
    sample=sample,
    stream=stream,
    temperature=jnp.zeros(num_slots, jnp.float32),
    max_new=limit,
    finish=finish,
    cache=kv_cache.init_cache(config, num_slots, max_prompt + max_new, dtype),
  )


@functools.partial(
  jax.jit,
  static_argnames=('config', 'compute_dtype'),
  donate_argnames=('state',),
)
def insert(
  config: config_lib.LlamaConfig,
  params: types.Params,
  state: DecodeState,
  filling: Filling,
  *,
  compute_dtype: jax.typing.DTypeLike = jnp.float32,
) -> DecodeState:
  """Returns the state with prompts prefilled and slots set to continue them.

  A prompt is prefilled once for all its samples, and without its last token,
  which becomes `last_token`: so tokens are sampled in one place only.

  Args:
    config: of the model.
    params: of the model.
    state: the slots, donated.
    filling: what to put where; see `segments.pack`.
    compute_dtype: of the matrix products.
  """
  rows, slots = filling.source_rows, filling.slots
  last = filling.prompt_lengths - 1
  block = llama.prefill(
    config, params, filling.prompts, last, compute_dtype=compute_dtype
  )
  position = last[rows]

  def fill(into: jax.Array, value: jax.Array | int | bool) -> jax.Array:
    return into.at[slots].set(value, mode='drop')

  return DecodeState(
    last_token=fill(state.last_token, filling.prompts[rows, position]),
    position=fill(state.position, position),
    num_new=fill(state.num_new, 0),
    active=fill(state.active, True),
    tokens=fill(state.tokens, 0),
    log_probs=fill(state.log_probs, 0),
    versions=fill(state.versions, 0),
    admission=fill(state.admission, filling.admission),
    sample=fill(state.sample, filling.sample),
    stream=fill(state.stream, filling.stream),
    temperature=fill(state.temperature, filling.temperature),
    max_new=fill(state.max_new, filling.max_new),
    finish=fill(state.finish, RUNNING),
    cache=kv_cache.insert(state.cache, block, rows, slots),
  )


def _record(
  state: DecodeState,
  sampled: samplers.Sampled,
  version: jax.Array,
  stop_tokens: tuple[int, ...],
) -> DecodeState:
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
  reason = jnp.where(stopped, STOPPED, jnp.where(full, FULL, RUNNING))
  finish = jnp.where(active, reason, state.finish)
  return dataclasses.replace(
    state,
    last_token=jnp.where(active, sampled.tokens, state.last_token),
    position=state.position + active,
    num_new=num_new,
    active=active & (finish == RUNNING),
    tokens=jnp.where(here, sampled.tokens[:, None], state.tokens),
    log_probs=jnp.where(here, sampled.log_probs[:, None], state.log_probs),
    versions=jnp.where(here, version, state.versions),
    finish=finish,
  )


def _cast_matrices(
  params: types.Params, dtype: jax.typing.DTypeLike
) -> types.Params:
  """Returns the factors of matrix products in `dtype`, once for all steps."""

  def cast(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array:
    # Norms are computed in float32, with weights as the trainer has them.
    is_norm = 'norm' in jax.tree_util.keystr(path)
    return leaf if is_norm else leaf.astype(dtype)

  return jax.tree_util.tree_map_with_path(cast, params)


@functools.partial(
  jax.jit,
  static_argnames=('config', 'stop_tokens', 'compute_dtype'),
  donate_argnames=('state',),
)
def decode_segment(
  config: config_lib.LlamaConfig,
  params: types.Params,
  state: DecodeState,
  key: chex.PRNGKey,
  version: jax.Array,
  *,
  num_steps: int | jax.Array,
  stop_tokens: tuple[int, ...],
  compute_dtype: jax.typing.DTypeLike = jnp.float32,
) -> DecodeState:
  """Returns the state after up to `num_steps` tokens more in each active slot.

  Ends early when no slot is active. A sampled stop token is recorded as the
  last token of its completion.

  Args:
    config: of the model.
    params: of the model.
    state: the slots, donated.
    key: the key of the run; see `keys.token_keys`.
    version: i32[], of `params`, recorded with each token.
    num_steps: most decode steps.
    stop_tokens: tokens that end a completion.
    compute_dtype: of the matrix products.
  """
  chex.assert_rank(version, 0)
  capacity = state.cache.capacity
  params = _cast_matrices(params, compute_dtype)

  def unfinished(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
    step, state = carry
    return (step < num_steps) & jnp.any(state.active)

  def advance(
    carry: tuple[jax.Array, DecodeState],
  ) -> tuple[jax.Array, DecodeState]:
    step, state = carry
    logits, cache = llama.decode_step(
      config,
      params,
      state.last_token,
      # At the capacity nothing is written: slots that are done stay as they
      # are.
      jnp.where(state.active, state.position, capacity),
      state.cache,
      compute_dtype=compute_dtype,
    )
    token_keys = keys_lib.token_keys(
      key, state.stream, state.admission, state.sample, state.num_new
    )
    sampled = samplers.sample(logits, token_keys, state.temperature)
    state = _record(state, sampled, version, stop_tokens)
    return step + 1, dataclasses.replace(state, cache=cache)

  _, state = jax.lax.while_loop(unfinished, advance, (jnp.int32(0), state))
  return state

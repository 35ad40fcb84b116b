"""The slots that completions are decoded in: their state, filled and freed.

A slot holds one unfinished completion, in arrays on the device that
`decoding` advances. Slots are filled from prompts that were read once, however
many completions they have, and each by itself.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp

from llamarl_jax.models import config as config_lib
from llamarl_jax.models import kv_cache

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
    prompt_length: i32[S], tokens of the prompt.
    num_new: i32[S], tokens sampled so far.
    active: bool[S], whether the slot is being decoded.
    tokens: i32[S, M], sampled tokens, 0 where there is none yet.
    log_probs: f32[S, M], behavior log-probs of `tokens`.
    versions: i32[S, M], policy version that sampled each of `tokens`.
    admission: i32[S], admission index of the request.
    sample: i32[S], sample index within the group.
    stream: i32[S], `types.Stream` of the request.
    temperature: f32[S], 0 = greedy.
    top_k: i32[S], see `samplers.sample`.
    top_p: f32[S].
    min_p: f32[S].
    min_new: i32[S], stop tokens are not sampled before so many tokens.
    max_new: i32[S], limit on `num_new`, at most M.
    finish: i32[S], RUNNING, STOPPED (a stop token) or FULL (max_new reached).
    cache: keys and values before `position`; a line is a slot.
  """

  last_token: jax.Array
  position: jax.Array
  prompt_length: jax.Array
  num_new: jax.Array
  active: jax.Array
  tokens: jax.Array
  log_probs: jax.Array
  versions: jax.Array
  admission: jax.Array
  sample: jax.Array
  stream: jax.Array
  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  min_p: jax.Array
  min_new: jax.Array
  max_new: jax.Array
  finish: jax.Array
  cache: kv_cache.KVCache


@flax.struct.dataclass
class Starting:
  """M slots that begin to continue prompts which lines of a cache hold.

  Attributes:
    lines: i32[M], line of the prompt cache.
    slots: i32[M], slot to fill; one that does not exist is padding.
    prompt_length: i32[M], at least 1; all tokens but the last are in the line.
    last_token: i32[M], the last token of the prompt.
    admission: i32[M], as in DecodeState, and so on.
    sample: i32[M].
    stream: i32[M].
    temperature: f32[M].
    top_k: i32[M].
    top_p: f32[M].
    min_p: f32[M].
    min_new: i32[M].
    max_new: i32[M].
  """

  lines: jax.Array
  slots: jax.Array
  prompt_length: jax.Array
  last_token: jax.Array
  admission: jax.Array
  sample: jax.Array
  stream: jax.Array
  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  min_p: jax.Array
  min_new: jax.Array
  max_new: jax.Array


@flax.struct.dataclass
class Resumed:
  """M slots that go on with completions begun elsewhere or earlier.

  All that precedes `last_token` is in the slot's own line of the cache.

  Attributes:
    slots: i32[M], slot to fill; one that does not exist is padding.
    prompt_length: i32[M], tokens of the prompt.
    last_token: i32[M], newest token, of the completion or of the prompt.
    num_new: i32[M], tokens sampled so far, fewer than `max_new`.
    tokens: i32[M, max_new], as in DecodeState, and so on.
    log_probs: f32[M, max_new].
    versions: i32[M, max_new].
    admission: i32[M].
    sample: i32[M].
    stream: i32[M].
    temperature: f32[M].
    top_k: i32[M].
    top_p: f32[M].
    min_p: f32[M].
    min_new: i32[M].
    max_new: i32[M].
  """

  slots: jax.Array
  prompt_length: jax.Array
  last_token: jax.Array
  num_new: jax.Array
  tokens: jax.Array
  log_probs: jax.Array
  versions: jax.Array
  admission: jax.Array
  sample: jax.Array
  stream: jax.Array
  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  min_p: jax.Array
  min_new: jax.Array
  max_new: jax.Array


def init_state(
  config: config_lib.LlamaConfig,
  num_slots: int,
  capacity: int,
  max_new: int,
  cache_dtype: jax.typing.DTypeLike = jnp.float32,
) -> DecodeState:
  """Returns S empty slots.

  Args:
    config: of the model.
    num_slots: completions decoded at once (S).
    capacity: most tokens of a prompt with its completion (C).
    max_new: most tokens sampled for a completion (M).
    cache_dtype: of the cache, see `kv_cache.init_cache`.
  """

  # Each leaf its own buffer, since the state is donated.
  def integers() -> jax.Array:
    return jnp.zeros(num_slots, jnp.int32)

  def floats() -> jax.Array:
    return jnp.zeros(num_slots, jnp.float32)

  shape = (num_slots, max_new)
  return DecodeState(
    last_token=integers(),
    position=integers(),
    prompt_length=integers(),
    num_new=integers(),
    active=jnp.zeros(num_slots, bool),
    tokens=jnp.zeros(shape, jnp.int32),
    log_probs=jnp.zeros(shape, jnp.float32),
    versions=jnp.zeros(shape, jnp.int32),
    admission=integers(),
    sample=integers(),
    stream=integers(),
    temperature=floats(),
    top_k=integers(),
    top_p=floats() + 1,
    min_p=floats(),
    min_new=integers(),
    max_new=integers(),
    finish=integers(),
    cache=kv_cache.init_cache(config, num_slots, capacity, cache_dtype),
  )


def _fill(
  state: DecodeState, slots: jax.Array, **values: jax.Array | int | bool
) -> DecodeState:
  """Returns the state with named leaves set in some slots."""
  filled = {
    name: getattr(state, name).at[slots].set(value, mode='drop')
    for name, value in values.items()
  }
  return dataclasses.replace(state, **filled)


@functools.partial(
  jax.jit, static_argnames=('copy_length',), donate_argnames=('state',)
)
def start_slots(
  state: DecodeState,
  prompts: kv_cache.KVCache,
  starting: Starting,
  *,
  copy_length: int,
) -> DecodeState:
  """Returns the state with slots set to continue prompts.

  The last token of a prompt is not read with it, but becomes `last_token`: so
  tokens are sampled in one place only.

  Args:
    state: the slots, donated.
    prompts: lines that hold the prompts, of the dtype of the slots' cache.
    starting: what to put where.
    copy_length: positions copied, no fewer than any prompt has but the last.
  """
  slots = starting.slots
  cache = kv_cache.copy_lines(
    state.cache, prompts, starting.lines, slots, length=copy_length
  )
  return _fill(
    dataclasses.replace(state, cache=cache),
    slots,
    last_token=starting.last_token,
    position=starting.prompt_length - 1,
    prompt_length=starting.prompt_length,
    num_new=0,
    active=True,
    tokens=0,
    log_probs=0,
    versions=0,
    admission=starting.admission,
    sample=starting.sample,
    stream=starting.stream,
    temperature=starting.temperature,
    top_k=starting.top_k,
    top_p=starting.top_p,
    min_p=starting.min_p,
    min_new=starting.min_new,
    max_new=starting.max_new,
    finish=RUNNING,
  )


@functools.partial(jax.jit, donate_argnames=('state',))
def resume_slots(state: DecodeState, resumed: Resumed) -> DecodeState:
  """Returns the state with slots set to go on with completions.

  Args:
    state: the slots, donated; `prefill_chunk` has written their lines.
    resumed: what to put where.
  """
  return _fill(
    state,
    resumed.slots,
    last_token=resumed.last_token,
    position=resumed.prompt_length + resumed.num_new - 1,
    prompt_length=resumed.prompt_length,
    num_new=resumed.num_new,
    active=True,
    tokens=resumed.tokens,
    log_probs=resumed.log_probs,
    versions=resumed.versions,
    admission=resumed.admission,
    sample=resumed.sample,
    stream=resumed.stream,
    temperature=resumed.temperature,
    top_k=resumed.top_k,
    top_p=resumed.top_p,
    min_p=resumed.min_p,
    min_new=resumed.min_new,
    max_new=resumed.max_new,
    finish=RUNNING,
  )


@functools.partial(jax.jit, donate_argnames=('state',))
def release(state: DecodeState, slots: jax.Array) -> DecodeState:
  """Returns the state with slots no longer decoded.

  Args:
    state: the slots, donated.
    slots: i32[M]; one that does not exist is padding.
  """
  return _fill(state, slots, active=False)

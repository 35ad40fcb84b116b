"""A tiny model with slots, and prompts addressed by a number."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax import types
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import inference
from llamarl_jax.models import kv_cache
from llamarl_jax.models import llama
from llamarl_jax.sampling import decoding
from llamarl_jax.sampling import slots as slots_lib

CONFIG = config_lib.LlamaConfig(
  vocab_size=24,
  width=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_width=48,
  rope_theta=1e4,
)
MAX_PROMPT, MAX_NEW = 4, 6
STOP = (3, 7)


@functools.cache
def params():
  """Drawn in numpy: no compilation; logits of about unit variance."""
  generator = np.random.default_rng(0)
  return jax.tree.map(
    lambda spec: jnp.asarray(
      generator.normal('norm' in spec.logical_axes, 0.18, spec.shape),
      jnp.float32,
    ),
    llama.abstract_params(CONFIG),
  )


@functools.cache
def prepared():
  return decoding.prepare(CONFIG, params())


class Done(NamedTuple):
  """A finished completion, and where it was asked for."""

  admission: int
  sample: int
  tokens: np.ndarray
  log_probs: np.ndarray
  finish: int


def prompt(index):
  """One to four tokens, in turn."""
  return tuple(10 + (index + i) % 9 for i in range(1 + index % MAX_PROMPT))


def fill(state, wanted, weights=None, temperature=1.0, **limits):
  """Starts (admission, sample, slot) ...; each prompt is read by itself."""
  admission, sample, slots = np.array(wanted, np.int32).T
  lengths = np.array([len(prompt(i)) for i in admission], np.int32)
  tokens = np.zeros((len(wanted), MAX_PROMPT), np.int32)
  for row, index in enumerate(admission):
    tokens[row, : lengths[row]] = prompt(index)
  lines = np.arange(len(wanted), dtype=np.int32)
  prompts = decoding.prefill_chunk(
    CONFIG,
    params() if weights is None else weights,
    kv_cache.init_cache(CONFIG, len(wanted), MAX_PROMPT),
    inference.PromptChunk(tokens, np.zeros_like(lines), lengths - 1, lines),
    read_length=0,
  )

  def all_of(value, dtype=np.int32):
    return np.broadcast_to(np.asarray(value, dtype), lines.shape)

  starting = slots_lib.Starting(
    lines=lines,
    slots=slots,
    prompt_length=lengths,
    last_token=tokens[lines, lengths - 1],
    admission=admission,
    sample=sample,
    stream=all_of(types.Stream.TRAIN),
    temperature=all_of(temperature, np.float32),
    top_k=all_of(0),
    top_p=all_of(1, np.float32),
    min_p=all_of(0, np.float32),
    min_new=all_of(limits.get('min_new', 0)),
    max_new=all_of(limits.get('max_new', MAX_NEW)),
  )
  return slots_lib.start_slots(state, prompts, starting, copy_length=MAX_PROMPT)


def segment(state, num_steps=MAX_NEW, version=0, weights=None, **settings):
  return decoding.decode_segment(
    CONFIG,
    prepared() if weights is None else weights,
    state,
    jax.random.key(11),
    jnp.int32(version),
    num_steps=num_steps,
    stop_tokens=STOP,
    **settings,
  )


def empty(num_slots):
  return slots_lib.init_state(CONFIG, num_slots, MAX_PROMPT + MAX_NEW, MAX_NEW)


def harvest(state, slots):
  """Returns what is finished in some slots by slot."""
  state = jax.tree.map(np.array, state.replace(cache=None))
  return {
    slot: Done(
      int(state.admission[slot]),
      int(state.sample[slot]),
      state.tokens[slot, : state.num_new[slot]],
      state.log_probs[slot, : state.num_new[slot]],
      int(state.finish[slot]),
    )
    for slot in slots
    if state.finish[slot] != slots_lib.RUNNING
  }


def generate(wanted, num_slots, num_steps, **settings):
  """Returns (admission, sample) -> Done, refilling slots as they free."""
  state = empty(num_slots)
  waiting, running, done = list(wanted), set(), {}
  while waiting or running:
    free = [slot for slot in range(num_slots) if slot not in running]
    new = [(*waiting.pop(0), slot) for slot in free[: len(waiting)]]
    if new:
      state = fill(state, new)
      running.update(slot for *_, slot in new)
    state = segment(state, num_steps, **settings)
    for slot, one in harvest(state, running.copy()).items():
      running.remove(slot)
      done[one.admission, one.sample] = one
  return done

"""The device's side of an engine: its caches, and the programs that fill them.

Every program has one of a few shapes, known beforehand, so that all of them
can be compiled before the first request comes.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import chex
import jax
import numpy as np

from llamarl_jax import types
from llamarl_jax.models import apart
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import kv_cache
from llamarl_jax.sampling import decoding
from llamarl_jax.sampling import plan as plan_lib
from llamarl_jax.sampling import prefilling
from llamarl_jax.sampling import segments
from llamarl_jax.sampling import slots as slots_lib
from llamarl_jax.sharding import rules


class Runner:
  """Owns slots and prompt lines, and runs programs on them."""

  def __init__(
    self,
    config: config_lib.LlamaConfig,
    settings: plan_lib.EngineSettings,
    plan: plan_lib.CachePlan,
    *,
    key: chex.PRNGKey,
    stop_tokens: Sequence[int],
    mesh: jax.sharding.Mesh,
  ):
    """Allocates the caches.

    Args:
      config: of the model.
      settings: of the engine.
      plan: of the caches.
      key: of the run.
      stop_tokens: tokens that end a completion.
      mesh: where the caches live.
    """
    self._config = config
    self._settings = settings
    self._key = jax.device_put(key, rules.replicated(mesh))
    self._stop_tokens = tuple(stop_tokens)
    self._num_slots = plan.num_slots
    # The newest parameters, as given and as decoding reads them.
    self._params: types.Params = None
    self._prepared: types.Params = None
    self.state = _empty_slots(config, settings, plan, mesh)
    self.lines = _empty_lines(config, plan, mesh)
    self.slot_shapes = plan_lib.read_shapes(
      settings.max_prompt + settings.max_new - 1,
      settings.prefill_tokens,
      plan.num_slots,
      # Rare: one width is enough.
      settings.max_prompt + settings.max_new,
    )
    self.line_shapes = plan_lib.read_shapes(
      settings.max_prompt - 1,
      settings.prefill_tokens,
      plan.num_lines,
      settings.least_width,
    )
    self._copy_lengths = plan_lib.read_lengths(
      plan.lines.capacity, settings.least_read
    )
    self._read_lengths = plan_lib.read_lengths(
      plan.slots.capacity, settings.least_read
    )
    self._start_sizes = plan_lib.counts(plan.num_slots)
    # Rare, so one shape is enough.
    self._resume_size = self._start_sizes[min(1, len(self._start_sizes) - 1)]

  def read_prompts(self, params: types.Params, call: prefilling.Call) -> None:
    """Reads chunks of prompts into their lines."""
    self.lines = self._read(params, self.lines, call)

  def read_slots(self, params: types.Params, call: prefilling.Call) -> None:
    """Reads chunks of completions with their prompts into their slots."""
    cache = self._read(params, self.state.cache, call)
    self.state = dataclasses.replace(self.state, cache=cache)

  def start(self, starts: Sequence[segments.Start]) -> None:
    """Begins completions of prompts that are in their lines."""
    by_length: dict[int, list[segments.Start]] = {}
    for start in starts:
      copied = max(len(start.request.prompt_tokens) - 1, 1)
      length = plan_lib.bucket(copied, self._copy_lengths)
      by_length.setdefault(length, []).append(start)
    for length, alike in by_length.items():
      while alike:
        size = plan_lib.split(len(alike), self._start_sizes)
        self._start(alike[:size], size, length)
        alike = alike[size:]

  def resume(
    self, completions: Sequence[tuple[segments.Suspended, int]]
  ) -> None:
    """Goes on with completions that are in their slots' lines."""
    for first in range(0, len(completions), self._resume_size):
      self._resume(completions[first : first + self._resume_size])

  def release(self, slots: Sequence[int]) -> None:
    """Stops decoding some slots."""
    if slots:
      self._release(slots)

  def decode(
    self,
    params: types.Params,
    version: int,
    *,
    positions: Sequence[tuple[int, int]],
    least_active: int,
  ) -> segments.Slots:
    """Decodes a segment and returns what the slots hold then.

    Args:
      params: of the policy.
      version: of `params`.
      positions: of each active slot the place of its newest token, and the
        place of the last token it will read.
      least_active: fewer active slots end the segment.
    """
    num_steps = self._settings.segment_length
    if apart.is_apart(self._prepare(params)):
      # What a segment adds is kept beside the cache while it lasts.
      needed = max(now for now, _ in positions)
    else:
      # The token at place p is read with all before it: p + 1 positions.
      needed = max(min(now + num_steps, last + 1) for now, last in positions)
    length = plan_lib.bucket(needed, self._read_lengths)
    self._decode(params, version, num_steps, least_active, length)
    return self.view()

  def view(self) -> segments.Slots:
    """Returns what the slots hold, as host values."""
    return segments.Slots(self.state)

  def warm_up(self, params: types.Params) -> None:
    """Compiles every program there is, by running it on nothing."""
    for num_rows, width, length in self.line_shapes.all():
      self.read_prompts(params, prefilling.Call((), num_rows, width, length))
    for num_rows, width, length in self.slot_shapes.all():
      self.read_slots(params, prefilling.Call((), num_rows, width, length))
    for length in self._copy_lengths:
      for size in self._start_sizes:
        self._start((), size, length)
    self._resume(())
    self._release(())
    for length in self._read_lengths:
      self._decode(params, 0, 0, 1, length)
    self.view()
    jax.block_until_ready(self.state.finish)

  def _read(
    self, params: types.Params, cache: kv_cache.KVCache, call: prefilling.Call
  ) -> kv_cache.KVCache:
    return decoding.prefill_chunk(
      self._config,
      params,
      cache,
      prefilling.make_chunk(call, cache.num_lines),
      read_length=call.read_length,
      compute_dtype=self._settings.compute_dtype,
    )

  def _start(
    self, starts: Sequence[segments.Start], size: int, copy_length: int
  ) -> None:
    self.state = slots_lib.start_slots(
      self.state,
      self.lines,
      segments.starting(starts, size=size, num_slots=self._num_slots),
      copy_length=copy_length,
    )

  def _resume(
    self, completions: Sequence[tuple[segments.Suspended, int]]
  ) -> None:
    self.state = slots_lib.resume_slots(
      self.state,
      segments.resumed(
        completions,
        size=self._resume_size,
        num_slots=self._num_slots,
        max_new=self._settings.max_new,
      ),
    )

  def _release(self, slots: Sequence[int]) -> None:
    padding = [self._num_slots] * (self._num_slots - len(slots))
    rows: Any = np.array([*slots, *padding], np.int32)
    self.state = slots_lib.release(self.state, rows)

  def _prepare(self, params: types.Params) -> types.Params:
    """Returns parameters as decoding reads them, made once for a version."""
    if params is not self._params:
      self._prepared = None  # Freed before there is another.
      self._prepared = decoding.prepare(
        self._config, params, compute_dtype=self._settings.compute_dtype
      )
      self._params = params
    return self._prepared

  def _decode(
    self,
    params: types.Params,
    version: int,
    num_steps: int,
    least_active: int,
    read_length: int,
  ) -> None:
    whole_number: Any = np.int32  # Arrays of the host, as good as jax's.
    self.state = decoding.decode_segment(
      self._config,
      self._prepare(params),
      self.state,
      self._key,
      whole_number(version),
      num_steps=whole_number(num_steps),
      min_active=whole_number(least_active),
      read_length=read_length,
      max_steps=self._settings.segment_length,
      stop_tokens=self._stop_tokens,
      compute_dtype=self._settings.compute_dtype,
    )


def _empty_slots(
  config: config_lib.LlamaConfig,
  settings: plan_lib.EngineSettings,
  plan: plan_lib.CachePlan,
  mesh: jax.sharding.Mesh,
) -> slots_lib.DecodeState:
  """Returns slots whose cache is sharded, and all else replicated."""

  def make() -> slots_lib.DecodeState:
    return slots_lib.init_state(
      config,
      plan.num_slots,
      plan.slots.capacity,
      settings.max_new,
      plan.slots.k.dtype,
    )

  layout = jax.tree.map(
    lambda _: rules.replicated(mesh), jax.eval_shape(make).replace(cache=None)
  )
  cache, _ = rules.shardings(plan.slots, mesh, rules.GENERATOR_RULES)
  return jax.jit(make, out_shardings=layout.replace(cache=cache))()


def _empty_lines(
  config: config_lib.LlamaConfig,
  plan: plan_lib.CachePlan,
  mesh: jax.sharding.Mesh,
) -> kv_cache.KVCache:
  """Returns prompt lines, sharded as the slots are."""
  layout, _ = rules.shardings(plan.lines, mesh, rules.GENERATOR_RULES)

  def make() -> kv_cache.KVCache:
    return kv_cache.init_cache(
      config, plan.num_lines, plan.lines.capacity, plan.lines.k.dtype
    )

  return jax.jit(make, out_shardings=layout)()

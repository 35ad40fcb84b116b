"""What happens between two segments, on the host: slots filled and harvested.

Host records of completions, and the arrays by which slots are filled from them
and read out again.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple

import numpy as np

from llamarl_jax import types
from llamarl_jax.sampling import slots as slots_lib

_REASONS = {
  slots_lib.STOPPED: types.FinishReason.STOP,
  slots_lib.FULL: types.FinishReason.LENGTH,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Suspended:
  """An unfinished completion as host values.

  Attributes:
    request: it answers.
    sample_index: its place in the group.
    tokens: i32[n], sampled so far; n may be 0.
    log_probs: f32[n], behavior log-probs.
    versions: i32[n], policy version of each token.
  """

  request: types.Request
  sample_index: int
  tokens: np.ndarray
  log_probs: np.ndarray
  versions: np.ndarray


class Finished(NamedTuple):
  """A finished completion with its request; see `types.Completion`."""

  request: types.Request
  completion: types.Completion


class SegmentStats(NamedTuple):
  """What a segment did.

  Attributes:
    num_active: slots that decoded when it began.
    num_steps: decode steps.
    num_tokens: tokens sampled.
    prefill_tokens: tokens of prompts that were read.
    padded_tokens: tokens of the programs that read them.
  """

  num_active: int = 0
  num_steps: int = 0
  num_tokens: int = 0
  prefill_tokens: int = 0
  padded_tokens: int = 0


class SegmentResult(NamedTuple):
  """Completions that a segment finished, and what it did."""

  finished: list[Finished]
  stats: SegmentStats


class Start(NamedTuple):
  """A completion to begin in a slot, its prompt read into a line."""

  request: types.Request
  sample_index: int
  line: int
  slot: int


def _column(values: Sequence[float], size: int, fill: int, dtype: type) -> Any:
  # The containers are typed by what the device makes of them, hence Any.
  return np.array([*values, *[fill] * (size - len(values))], dtype)


def _facts(
  samples: Sequence[tuple[types.Request, int]], size: int
) -> dict[str, Any]:
  """Returns what slots know of their requests, padded to `size`."""
  requests = [request for request, _ in samples]

  def integers(values: Sequence[int], fill: int = 0) -> Any:
    return _column(values, size, fill, np.int32)

  def floats(values: Sequence[float]) -> Any:
    return _column(values, size, 1, np.float32)

  return {
    'prompt_length': integers([len(r.prompt_tokens) for r in requests], 1),
    'admission': integers([r.admission_index for r in requests]),
    'sample': integers([index for _, index in samples]),
    'stream': integers([int(r.stream) for r in requests]),
    'temperature': floats([r.temperature for r in requests]),
    'top_k': integers([r.top_k for r in requests]),
    'top_p': floats([r.top_p for r in requests]),
    'min_p': floats([r.min_p for r in requests]),
    'min_new': integers([r.min_new_tokens for r in requests]),
    'max_new': integers([r.max_new_tokens for r in requests], 1),
  }


def starting(
  starts: Sequence[Start], *, size: int, num_slots: int
) -> slots_lib.Starting:
  """Returns completions to begin as the arrays `start_slots` takes.

  Args:
    starts: at most `size`.
    size: rows of the arrays.
    num_slots: of the decode state (S); padding goes to slot S.
  """
  return slots_lib.Starting(
    lines=_column([s.line for s in starts], size, 0, np.int32),
    slots=_column([s.slot for s in starts], size, num_slots, np.int32),
    last_token=_column(
      [s.request.prompt_tokens[-1] for s in starts], size, 0, np.int32
    ),
    **_facts([(s.request, s.sample_index) for s in starts], size),
  )


def resumed(
  completions: Sequence[tuple[Suspended, int]],
  *,
  size: int,
  num_slots: int,
  max_new: int,
) -> slots_lib.Resumed:
  """Returns completions to go on with as the arrays `resume_slots` takes.

  Args:
    completions: with the slot of each, at most `size`.
    size: rows of the arrays.
    num_slots: of the decode state (S); padding goes to slot S.
    max_new: most new tokens a slot holds.
  """
  tokens: Any = np.zeros((size, max_new), np.int32)
  log_probs: Any = np.zeros((size, max_new), np.float32)
  versions: Any = np.zeros((size, max_new), np.int32)
  for row, (one, _) in enumerate(completions):
    count = len(one.tokens)
    tokens[row, :count] = one.tokens
    log_probs[row, :count] = one.log_probs
    versions[row, :count] = one.versions
  records = [one for one, _ in completions]
  return slots_lib.Resumed(
    slots=_column([slot for _, slot in completions], size, num_slots, np.int32),
    last_token=_column(
      [sequence(one)[-1] for one in records], size, 0, np.int32
    ),
    num_new=_column([len(one.tokens) for one in records], size, 0, np.int32),
    tokens=tokens,
    log_probs=log_probs,
    versions=versions,
    **_facts([(one.request, one.sample_index) for one in records], size),
  )


def sequence(one: Suspended) -> list[int]:
  """Returns the tokens of the prompt and of the completion so far."""
  return [*one.request.prompt_tokens, *map(int, one.tokens)]


def not_begun(request: types.Request, sample_index: int) -> Suspended:
  """Returns a completion without tokens."""
  return Suspended(
    request,
    sample_index,
    np.zeros(0, np.int32),
    np.zeros(0, np.float32),
    np.zeros(0, np.int32),
  )


def finish(one: Suspended, reason: types.FinishReason, text: str) -> Finished:
  """Returns a completion that ended, with its text."""
  completion = types.Completion(
    admission_index=one.request.admission_index,
    sample_index=one.sample_index,
    tokens=one.tokens,
    log_probs=one.log_probs,
    versions=one.versions,
    finish_reason=reason,
    text=text,
  )
  return Finished(one.request, completion)


class Slots:
  """What the slots hold, fetched from the device on first use."""

  def __init__(self, state: slots_lib.DecodeState):
    self.finish = np.asarray(state.finish)
    self.num_new = np.asarray(state.num_new)
    self._state = state
    self._arrays: tuple[np.ndarray, ...] | None = None

  def reason(self, slot: int) -> types.FinishReason | None:
    """Returns why a completion ended; None if it did not."""
    return _REASONS.get(int(self.finish[slot]))

  def completion(
    self, slot: int, request: types.Request, sample_index: int, *, num_new: int
  ) -> Suspended:
    """Returns a completion as it stands.

    Args:
      slot: that decodes it.
      request: it answers.
      sample_index: its place in the group.
      num_new: take so many of its tokens.
    """
    if self._arrays is None:
      state = self._state
      self._arrays = tuple(
        np.asarray(array)
        for array in (state.tokens, state.log_probs, state.versions)
      )
    # Copies, so that a completion does not keep the whole state alive.
    arrays = [array[slot, :num_new].copy() for array in self._arrays]
    return Suspended(request, sample_index, *arrays)

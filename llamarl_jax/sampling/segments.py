"""What happens between two segments, on the host: slots filled and harvested.

Pure functions of host arrays: which slots are free, and what to do with a
finished completion, is the business of the generator.
"""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np

from llamarl_jax import types
from llamarl_jax.sampling import decoding

_REASONS = {
  decoding.STOPPED: types.FinishReason.STOP,
  decoding.FULL: types.FinishReason.LENGTH,
}


class Assignment(NamedTuple):
  """One completion to be decoded, and the slot to decode it in."""

  request: types.Request
  sample_index: int
  slot: int


class Finished(NamedTuple):
  """A finished completion as its slot held it, text aside.

  Attributes:
    slot: where it was.
    stream: of its request.
    admission_index: of its request.
    sample_index: its place in the group.
    tokens: i32[n].
    log_probs: f32[n], behavior log-probs.
    versions: i32[n], policy version of each token.
    finish_reason: why it ended.
  """

  slot: int
  stream: types.Stream
  admission_index: int
  sample_index: int
  tokens: np.ndarray
  log_probs: np.ndarray
  versions: np.ndarray
  finish_reason: types.FinishReason


def check_fits(
  request: types.Request, *, max_prompt: int, max_new: int
) -> None:
  """Raises unless a slot has room for the request.

  Args:
    request: what is asked.
    max_prompt: longest prompt a slot holds, in tokens.
    max_new: most new tokens a slot holds.

  Raises:
    ValueError: if the prompt is empty or longer than `max_prompt`, if the limit
      on new tokens is not between 1 and `max_new`, or the temperature negative.
  """
  name = f'Request {request.admission_index}'
  length = len(request.prompt_tokens)
  if not 1 <= length <= max_prompt:
    raise ValueError(
      f'{name} has a prompt of {length} tokens; the slots hold 1 to '
      f'{max_prompt}. Raise the limit on prompts or shorten the prompt.'
    )
  if not 1 <= request.max_new_tokens <= max_new:
    raise ValueError(
      f'{name} asks for up to {request.max_new_tokens} new tokens; the slots '
      f'hold 1 to {max_new}, {max_prompt + max_new} tokens with the prompt.'
    )
  if not request.temperature >= 0:
    raise ValueError(
      f'{name} has temperature {request.temperature}; it must be at least 0, '
      'which is greedy.'
    )


def _check_slots(slots: Sequence[int], num_slots: int) -> None:
  if not slots:
    raise ValueError('There are 0 assignments; give at least 1.')
  for slot in slots:
    if not 0 <= slot < num_slots:
      raise ValueError(f'Slot {slot} does not exist; there are {num_slots}.')
  if len(set(slots)) < len(slots):
    raise ValueError(f'A slot is assigned twice among {list(slots)}.')


def _power_of_two(count: int) -> int:
  return 1 << (count - 1).bit_length()


def pack(
  assignments: Sequence[Assignment],
  *,
  num_slots: int,
  max_prompt: int,
  max_new: int,
) -> decoding.Filling:
  """Returns assignments as the arrays `decoding.insert` takes.

  Each request is one row of prompts, however many of its samples are assigned.
  Prompts and slots are padded to powers of two, which bounds the number of
  shapes that are ever compiled.

  Args:
    assignments: completions with their slots, at least one.
    num_slots: slots of the decode state (S).
    max_prompt: width of the prompt rows.
    max_new: most new tokens a slot holds.

  Raises:
    ValueError: if there is no assignment, a slot does not exist or is assigned
      twice, or a request does not fit (see `check_fits`).
  """
  slots = [assignment.slot for assignment in assignments]
  _check_slots(slots, num_slots)
  requests: list[types.Request] = []
  row_of: dict[tuple[types.Stream, int], int] = {}
  rows = []
  for assignment in assignments:
    request = assignment.request
    address = (request.stream, request.admission_index)
    if address not in row_of:
      check_fits(request, max_prompt=max_prompt, max_new=max_new)
      row_of[address] = len(requests)
      requests.append(request)
    rows.append(row_of[address])
  num_rows = _power_of_two(len(requests))
  # `Filling` is typed by what the device makes of it, hence Any.
  prompts: Any = np.zeros((num_rows, max_prompt), np.int32)
  lengths: Any = np.ones(num_rows, np.int32)
  for row, request in enumerate(requests):
    lengths[row] = len(request.prompt_tokens)
    prompts[row, : lengths[row]] = request.prompt_tokens
  size = _power_of_two(len(slots))

  def padded(values: Sequence[float], fill: int, dtype: type) -> Any:
    return np.array([*values, *[fill] * (size - len(values))], dtype)

  asked = [assignment.request for assignment in assignments]
  return decoding.Filling(
    prompts=prompts,
    prompt_lengths=lengths,
    source_rows=padded(rows, 0, np.int32),
    slots=padded(slots, num_slots, np.int32),
    admission=padded([r.admission_index for r in asked], 0, np.int32),
    sample=padded([a.sample_index for a in assignments], 0, np.int32),
    stream=padded([int(r.stream) for r in asked], 0, np.int32),
    temperature=padded([r.temperature for r in asked], 0, np.float32),
    max_new=padded([r.max_new_tokens for r in asked], 1, np.int32),
  )


def harvest(
  state: decoding.DecodeState, slots: Sequence[int]
) -> list[Finished]:
  """Returns the finished completions among some slots, in their order.

  Args:
    state: with arrays of the host or a device; the cache is not read.
    slots: the slots to look at; those still running are passed over.
  """
  finish = np.asarray(state.finish)
  num_new = np.asarray(state.num_new)
  tokens = np.asarray(state.tokens)
  log_probs = np.asarray(state.log_probs)
  versions = np.asarray(state.versions)
  stream = np.asarray(state.stream)
  admission = np.asarray(state.admission)
  sample = np.asarray(state.sample)
  finished = []
  for slot in slots:
    if finish[slot] == decoding.RUNNING:
      continue
    length = num_new[slot]
    finished.append(
      Finished(
        slot=slot,
        stream=types.Stream(int(stream[slot])),
        admission_index=int(admission[slot]),
        sample_index=int(sample[slot]),
        # Copies, so that a completion does not keep the whole state alive.
        tokens=tokens[slot, :length].copy(),
        log_probs=log_probs[slot, :length].copy(),
        versions=versions[slot, :length].copy(),
        finish_reason=_REASONS[int(finish[slot])],
      )
    )
  return finished

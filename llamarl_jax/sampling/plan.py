"""What an engine will hold and compile, known before it exists.

The memory of its caches, from a budget of bytes, and the few array shapes that
requests of any length are cut and padded to.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from llamarl_jax import types
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import kv_cache

# A prompt is prefilled ahead of the slots that will continue it; more lines
# than this share of the slots would be memory that no slot can use.
_LINES_SHARE = 4
_LEAST_LINES = 4
# Rows of a prefill and slots of a refill come in steps of this factor.
_COUNT_GROWTH = 8


@dataclasses.dataclass(frozen=True)
class EngineSettings:
  """Plain settings of an engine.

  Attributes:
    num_slots: completions decoded side by side, at most (S).
    segment_length: decode steps of one segment, at most.
    max_prompt: tokens of the longest prompt.
    max_new: tokens of the longest completion.
    prefill_tokens: tokens of prompts, padding included, that are read between
      two segments while completions wait to go on; no prompt has more than
      half of them, so that a long one does not hold up others.
    cache_bytes: budget of all keys and values of one engine, over all of its
      devices; 0 = what `num_slots` slots need.
    cache_dtype: of keys and values; empty = `compute_dtype`.
    compute_dtype: of the factors of matrix products.
    max_versions: policy versions that may sample one completion; 0 = any.
    refill_share: share of the slots that, fallen free while others wait, ends
      a segment.
    least_read: positions of the cache that are read in any case. From there on
      and up there is a program for each half as many more.
    least_width: tokens a row of a prefill, at least; up from there there is a
      program for each doubling.
  """

  num_slots: int
  segment_length: int
  max_prompt: int
  max_new: int
  prefill_tokens: int = 512
  cache_bytes: int = 0
  cache_dtype: str = ''
  compute_dtype: str = 'float32'
  max_versions: int = 0
  refill_share: float = 0.125
  least_read: int = 64
  least_width: int = 8


@dataclasses.dataclass(frozen=True)
class CachePlan:
  """Keys and values of an engine.

  Attributes:
    slots: specs of the cache of the slots, one line a slot.
    lines: specs of the cache of prompts that wait to be continued.
    budget_bytes: what was asked for, 0 = no limit.
  """

  slots: kv_cache.KVCache
  lines: kv_cache.KVCache
  budget_bytes: int = 0

  @property
  def num_slots(self) -> int:
    """Completions decoded side by side."""
    return self.slots.num_lines

  @property
  def num_lines(self) -> int:
    """Prompts held ready."""
    return self.lines.num_lines

  @property
  def slot_bytes(self) -> int:
    """Bytes of all slots."""
    return _nbytes(self.slots)

  @property
  def line_bytes(self) -> int:
    """Bytes of all prompt lines."""
    return _nbytes(self.lines)

  @property
  def total_bytes(self) -> int:
    """Bytes of the whole cache."""
    return self.slot_bytes + self.line_bytes

  def describe(self) -> str:
    """Returns the plan as one line."""
    budget = f' of {_size(self.budget_bytes)}' if self.budget_bytes else ''
    return (
      f'cache of {_size(self.total_bytes)}{budget}, {self.slots.k.dtype}:'
      f' {self.num_slots} slots of {self.slots.capacity} positions and'
      f' {self.num_lines} prompts of {self.lines.capacity}'
    )


def _nbytes(cache: Any) -> int:
  arrays = (cache.k, cache.v, cache.k_scale, cache.v_scale)
  return sum(array.nbytes for array in arrays if array is not None)


def _size(count: int) -> str:
  return f'{count / 1e6:.4g} MB'


def _num_lines(num_slots: int) -> int:
  return min(num_slots, max(_LEAST_LINES, num_slots // _LINES_SHARE))


def make_plan(
  config: config_lib.LlamaConfig, settings: EngineSettings
) -> CachePlan:
  """Returns the caches of an engine, with as many slots as the budget holds.

  Args:
    config: of the model.
    settings: of the engine.

  Raises:
    ValueError: the budget does not hold one slot.
  """
  dtype = jnp.dtype(settings.cache_dtype or settings.compute_dtype)

  def plan(num_slots: int) -> CachePlan:
    return CachePlan(
      slots=kv_cache.cache_specs(
        config, num_slots, settings.max_prompt + settings.max_new, dtype
      ),
      # The last token of a prompt is read where it is continued.
      lines=kv_cache.cache_specs(
        config, _num_lines(num_slots), max(settings.max_prompt - 1, 1), dtype
      ),
      budget_bytes=settings.cache_bytes,
    )

  if not settings.cache_bytes:
    return plan(settings.num_slots)
  one = plan(1)
  if one.total_bytes > settings.cache_bytes:
    raise ValueError(
      f'cache_bytes={settings.cache_bytes} does not hold one slot: a prompt of'
      f' {settings.max_prompt} tokens with {settings.max_new} new ones takes'
      f' {one.total_bytes} bytes in {dtype.name}. Raise it, lower the limits on'
      " tokens, or set the cache's dtype to int8."
    )
  least = min(settings.num_slots, settings.cache_bytes // one.slot_bytes)
  return next(
    found
    for count in range(least, 0, -1)
    if (found := plan(count)).total_bytes <= settings.cache_bytes
  )


def check_fits(
  request: types.Request, *, max_prompt: int, max_new: int
) -> None:
  """Raises unless a slot has room for the request.

  Args:
    request: what is asked.
    max_prompt: longest prompt a slot holds, in tokens.
    max_new: most new tokens a slot holds.

  Raises:
    ValueError: the request can never be answered; says why.
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
  if not 0 <= request.min_new_tokens <= request.max_new_tokens:
    raise ValueError(
      f'{name} has min_new_tokens={request.min_new_tokens}; it must be between '
      f'0 and max_new_tokens={request.max_new_tokens}.'
    )
  if request.num_samples < 1:
    raise ValueError(f'{name} asks for {request.num_samples} completions.')
  if '' in request.stop_strings:
    raise ValueError(f'{name} has an empty stop string; leave it out.')
  check_sampling(
    name,
    temperature=request.temperature,
    top_k=request.top_k,
    top_p=request.top_p,
    min_p=request.min_p,
  )


def check_sampling(
  name: str, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
  """Raises unless these name a distribution; see `types.Request`.

  Args:
    name: of what they belong to.
    temperature: of the softmax.
    top_k: tokens to sample among.
    top_p: probability to sample among.
    min_p: least share of the largest probability.

  Raises:
    ValueError: names the first that is out of its range.
  """
  if not temperature >= 0:
    raise ValueError(
      f'{name} has temperature {temperature}; it must be at least 0, which is '
      'greedy.'
    )
  if top_k < 0:
    raise ValueError(
      f'{name} has top_k={top_k}; it must be at least 0, which is all tokens.'
    )
  if not 0 < top_p <= 1:
    raise ValueError(
      f'{name} has top_p={top_p}; it must be above 0, and 1 for all tokens.'
    )
  if not 0 <= min_p <= 1:
    raise ValueError(
      f'{name} has min_p={min_p}; it must be between 0, all tokens, and 1.'
    )


def counts(most: int) -> tuple[int, ...]:
  """Returns the numbers of rows that programs are compiled for: 1, 8, ..."""
  steps = math.ceil(math.log(most, _COUNT_GROWTH) - 1e-9)
  return (*(_COUNT_GROWTH**i for i in range(steps)), most)


def split(number: int, sizes: Sequence[int]) -> int:
  """Returns the size in which to take the first of `number` rows.

  The size that holds all is taken if less than half of it is padding, else the
  largest that is filled.

  Args:
    number: rows there are, at least 1.
    sizes: of programs, ascending from 1; see `counts`.
  """
  above = [size for size in sizes if size >= number]
  if above and above[0] < 2 * number:
    return above[0]
  return max(size for size in sizes if size <= number)


def read_lengths(capacity: int, least: int) -> tuple[int, ...]:
  """Returns the numbers of positions that attention is compiled for.

  Each is half as long again as the one before, so that a quarter of what is
  read is unused at most, in the long run and in the mean.

  Args:
    capacity: positions of a line.
    least: the first of them.
  """
  lengths = []
  length = least
  while length < capacity:
    lengths.append(length)
    multiple = 32 if length < 256 else 128
    length = -(-length * 3 // (2 * multiple)) * multiple
  return (*lengths, capacity)


def bucket(length: int, lengths: Sequence[int]) -> int:
  """Returns the first of ascending lengths that is enough."""
  return next(found for found in lengths if found >= length)


def halvings(most: int, least: int) -> tuple[int, ...]:
  """Returns most, most / 2, ... down to `least`, ascending."""
  lengths = [most]
  while lengths[-1] // 2 >= least:
    lengths.append(lengths[-1] // 2)
  return tuple(reversed(lengths))


@dataclasses.dataclass(frozen=True)
class ReadShapes:
  """The shapes of prefill programs over one cache.

  Attributes:
    widths: tokens a row, ascending.
    rows: by width, the numbers of rows.
    read_lengths: positions of the cache read by a chunk that is not the first
      of its sequence; such chunks have the greatest width and most rows.
  """

  widths: tuple[int, ...]
  rows: dict[int, tuple[int, ...]]
  read_lengths: tuple[int, ...]

  def all(self) -> list[tuple[int, int, int]]:
    """Returns every (rows, width, read length) there is."""
    first = [(rows, w, 0) for w in self.widths for rows in self.rows[w]]
    widest = self.widths[-1]
    most = self.rows[widest][-1]
    return first + [(most, widest, length) for length in self.read_lengths]


def read_shapes(
  longest: int, prefill_tokens: int, num_lines: int, least_width: int
) -> ReadShapes:
  """Returns the shapes in which sequences are read.

  Args:
    longest: tokens of the longest sequence to be read.
    prefill_tokens: see EngineSettings.
    num_lines: of the cache.
    least_width: see EngineSettings.
  """
  widest = max(1, min(longest, prefill_tokens // 2))
  widths = halvings(widest, least_width)
  # What a chunk has before it is a multiple of the widest.
  before = [widest * i for i in range(1, -(-longest // widest))]
  lengths: list[int] = []
  for length in before:
    if length == before[-1] or length >= 2 * (lengths or [0])[-1]:
      lengths.append(length)
  return ReadShapes(
    widths=widths,
    rows={
      w: counts(max(1, min(prefill_tokens // w, num_lines))) for w in widths
    },
    read_lengths=tuple(lengths),
  )

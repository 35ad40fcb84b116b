"""Which chunks of which prompts are read next, in few shapes.

Sequences are read first come, first served, but none has more than one chunk
before all others had theirs: what is short overtakes what is long.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple

import numpy as np

from llamarl_jax.models import inference
from llamarl_jax.sampling import plan as plan_lib


@dataclasses.dataclass(eq=False)
class Reading:
  """A sequence on its way into a line of a cache.

  Attributes:
    tokens: to be read.
    line: where to.
    num_read: tokens that are in the line.
  """

  tokens: Sequence[int]
  line: int
  num_read: int = 0

  @property
  def num_left(self) -> int:
    """Tokens still to be read."""
    return len(self.tokens) - self.num_read


class Call(NamedTuple):
  """One run of a prefill program.

  Attributes:
    readings: the sequences that have a chunk in it.
    num_rows: rows of the program, at least as many.
    width: tokens a row.
    read_length: positions of the cache that the program reads.
  """

  readings: Sequence[Reading]
  num_rows: int
  width: int
  read_length: int

  @property
  def num_tokens(self) -> int:
    """Tokens of the program, padding included."""
    return self.num_rows * self.width


def next_call(
  readings: Sequence[Reading],
  shapes: plan_lib.ReadShapes,
  most_tokens: int | None,
) -> Call | None:
  """Returns what to read next, None if there is nothing or no room.

  The first sequence that fits into `most_tokens` goes, with those behind it
  whose chunks have the same shape.

  Args:
    readings: sequences with tokens left, the first come first.
    shapes: there are programs for.
    most_tokens: room, padding included; None = no limit.
  """
  seen = set()
  for reading in readings:
    shape = _shape(reading, shapes)
    if shape in seen:
      continue
    seen.add(shape)
    width, read_length = shape
    sizes = shapes.rows[width]
    rows = [
      size
      for size in (sizes[-1:] if read_length else sizes)
      if most_tokens is None or size * width <= most_tokens
    ]
    if not rows:
      continue
    alike = [r for r in readings if _shape(r, shapes) == shape]
    num_rows = rows[-1]
    if not read_length:
      num_rows = plan_lib.split(min(len(alike), num_rows), rows)
    return Call(alike[:num_rows], num_rows, width, read_length)
  return None


def _shape(reading: Reading, shapes: plan_lib.ReadShapes) -> tuple[int, int]:
  """Returns width and read length of the next chunk of a sequence."""
  widest = shapes.widths[-1]
  if reading.num_read:
    return widest, plan_lib.bucket(reading.num_read, shapes.read_lengths)
  return plan_lib.bucket(min(reading.num_left, widest), shapes.widths), 0


def make_chunk(call: Call, num_lines: int) -> inference.PromptChunk:
  """Returns the arrays of a call, and moves its sequences on.

  Args:
    call: what is read.
    num_lines: of the cache.
  """
  # `PromptChunk` is typed by what the device makes of it, hence Any.
  tokens: Any = np.zeros((call.num_rows, call.width), np.int32)
  starts: Any = np.zeros(call.num_rows, np.int32)
  lengths: Any = np.zeros(call.num_rows, np.int32)
  lines: Any = np.full(call.num_rows, num_lines, np.int32)
  for row, reading in enumerate(call.readings):
    start = reading.num_read
    length = min(reading.num_left, call.width)
    tokens[row, :length] = reading.tokens[start : start + length]
    starts[row], lengths[row], lines[row] = start, length, reading.line
    reading.num_read += length
  return inference.PromptChunk(tokens, starts, lengths, lines)

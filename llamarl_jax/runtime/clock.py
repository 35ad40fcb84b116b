"""The time of a run: a clock that tests can set, and an estimate of the rest.

Spans of processes on one host are compared with one another, so the clock is
wall time since the epoch, not a monotonic clock with an origin of its own.
"""

import collections
import time
from typing import Protocol


class Clock(Protocol):
  """Gives the time."""

  def now(self) -> float:
    """Returns seconds since the epoch."""


class SystemClock:
  """The clock of the host."""

  def now(self) -> float:
    """Returns seconds since the epoch."""
    return time.time()


class ManualClock:
  """A clock for tests, which stands until it is moved."""

  def __init__(self, now: float = 0.0):
    self._now = now

  def now(self) -> float:
    """Returns the seconds it was set to."""
    return self._now

  def advance(self, seconds: float) -> None:
    """Moves the clock on.

    Args:
      seconds: to add, not negative.

    Raises:
      ValueError: `seconds` is negative.
    """
    if seconds < 0:
      raise ValueError(f'A clock cannot go back: advance({seconds}); use >= 0.')
    self._now += seconds


class TimeLeft:
  """Estimates the seconds a run still takes from its recent steps.

  Only the time between ends of steps counts, so that start-up and the
  compilation in the first step do not weigh on the estimate.
  """

  def __init__(self, num_steps: int, *, window: int = 10):
    """Starts without any knowledge.

    Args:
      num_steps: steps of the whole run.
      window: number of recent steps averaged over, at least 1.

    Raises:
      ValueError: `window` is below 1.
    """
    if window < 1:
      raise ValueError(f'window = {window}: average over at least 1 step.')
    self._num_steps = num_steps
    self._ends: collections.deque[tuple[int, float]] = collections.deque(
      maxlen=window + 1
    )

  def record(self, num_done: int, now: float) -> None:
    """Notes the end of a step.

    Args:
      num_done: steps done so far, this one included.
      now: seconds, of the same clock at every call.
    """
    self._ends.append((num_done, now))

  def seconds(self) -> float | None:
    """Returns the estimate, or None before two steps have ended."""
    if len(self._ends) < 2:
      return None
    first_step, first_time = self._ends[0]
    last_step, last_time = self._ends[-1]
    if last_step <= first_step:
      return None
    pace = max(0.0, last_time - first_time) / (last_step - first_step)
    return pace * max(0, self._num_steps - last_step)


def format_seconds(seconds: float | None) -> str:
  """Returns a duration for people: '0:07', '12:03', '1:02:03'; '-' for None."""
  if seconds is None:
    return '-'
  minutes, rest = divmod(round(max(0.0, seconds)), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours}:{minutes:02d}:{rest:02d}'
  return f'{minutes}:{rest:02d}'

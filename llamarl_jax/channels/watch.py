"""Whether a fetch may go on: its deadline, and a flag that ends it early.

Nothing that a fetch waits for ends by itself: the peer may have died, and the
transfer library's own time-out has no effect. So every wait asks here.
"""

from collections.abc import Sequence
import threading
import time
from typing import Any

from llamarl_jax.channels import weights

_SHORTEST_PAUSE = 0.0002
_LONGEST_PAUSE = 0.005


class Watch:
  """The deadline of one fetch; any thread may end it."""

  def __init__(self, deadline_seconds: float) -> None:
    """Starts now, and ends after `deadline_seconds`."""
    self._deadline_seconds = deadline_seconds
    self._stop = time.monotonic() + deadline_seconds
    self._cancelled = threading.Event()

  def cancel(self) -> None:
    """Ends every wait."""
    self._cancelled.set()

  @property
  def over(self) -> bool:
    """Whether the fetch was given up or its time is over."""
    return self._cancelled.is_set() or time.monotonic() > self._stop

  def check(self, what: str) -> None:
    """Raises where the fetch must not go on.

    Args:
      what: is being waited for, for the message.

    Raises:
      WeightTransferError: given up, or the deadline has passed.
    """
    if self._cancelled.is_set():
      raise weights.WeightTransferError(f'given up while waiting for {what}')
    if time.monotonic() > self._stop:
      raise weights.WeightTransferError(
        f'{what} did not arrive within {self._deadline_seconds:g} s'
      )

  def sleep(self, seconds: float) -> None:
    """Waits; ends early where the fetch is given up."""
    self._cancelled.wait(seconds)

  def await_arrays(self, arrays: Sequence[Any], what: str) -> None:
    """Waits until arrays are there, or have failed.

    Args:
      arrays: of `jax.Array`.
      what: they are, for the message.

    Raises:
      WeightTransferError: given up, or the deadline has passed.
    """
    # Short pauses for what is about to arrive, longer ones for what is not.
    pause = _SHORTEST_PAUSE
    for array in arrays:
      while not array.is_ready():
        self.check(what)
        self.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)

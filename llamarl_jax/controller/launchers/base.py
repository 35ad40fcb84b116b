"""What a launcher gives the controller: handles, futures, and failures."""

from collections.abc import Sequence
from typing import Any
from typing import Protocol

from llamarl_jax.controller import program


class ExecutorError(RuntimeError):
  """An executor raised, died or did not answer; names it and says why."""

  def __init__(self, name: str, reason: str):
    super().__init__(f'executor {name} failed: {reason}')
    self.name = name
    self.reason = reason


class Future(Protocol):
  """The answer to one command, now or later."""

  def result(self) -> Any:
    """Returns the answer; only to be called once `wait` gave the future.

    Raises:
      ExecutorError: the command raised, or its process died.
    """


class Handle(Protocol):
  """A started executor."""

  name: str

  def call(self, method: str, *args: Any) -> Future:
    """Sends a command; commands of one handle run in the order sent."""

  def describe(self) -> Future:
    """Asks for the mapping of 'pid' and 'num_devices'."""


class Launcher(Protocol):
  """Starts executors and waits for their answers."""

  def start(self, node: program.Node) -> Handle:
    """Starts an executor; its factory may still be running on return."""

  def wait(self, futures: Sequence[Future], timeout: float) -> list[Future]:
    """Returns the futures that are done, at least one.

    Args:
      futures: commands under way, in the order they were sent.
      timeout: seconds after which silence counts as a failure.

    Raises:
      ExecutorError: an executor died, or none answered within `timeout`.
    """

  def close(self) -> None:
    """Ends every executor; may be called twice."""


def answer(launcher: Launcher, future: Future, timeout: float = 600.0) -> Any:
  """Returns the answer to one command, waiting for it alone."""
  while future not in launcher.wait([future], timeout):
    pass
  return future.result()


def ask(launcher: Launcher, handle: Handle, method: str, *args: Any) -> Any:
  """Sends one command and returns its answer."""
  return answer(launcher, handle.call(method, *args))

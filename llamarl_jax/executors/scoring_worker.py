"""What runs inside a scoring process; it must not import jax.

A worker killed for overrunning its time is replaced, so it should be up
quickly: it knows a problem as a plain record, not as `types.Problem`.
"""

from collections.abc import Callable
from collections.abc import Mapping
import importlib
import logging
import types
from typing import Any
from typing import NamedTuple

# What scorers raise on junk. Everything else is a fault of the program.
JUNK_ERRORS = (
  ArithmeticError,
  AssertionError,
  AttributeError,
  LookupError,
  MemoryError,
  RuntimeError,
  SyntaxError,
  TypeError,
  ValueError,
)


class Outcome(NamedTuple):
  """What scoring one completion gave: named parts, or why there are none."""

  parts: Mapping[str, float]
  failure: str = ''


def prepare(modules: tuple[str, ...]) -> None:
  """Imports what scorers need, before any time limit runs."""
  # It warns that its own time-outs are off; ours replace them.
  logging.getLogger('math_verify').setLevel(logging.ERROR)
  for module in modules:
    importlib.import_module(module)


def imported_modules() -> frozenset[str]:
  """Returns the names of what the worker has imported."""
  import sys

  return frozenset(sys.modules)


def score(
  reward_fn: Callable[..., Mapping[str, float]],
  problem: Mapping[str, Any],
  text: str,
  finish_reason: str,
) -> Outcome:
  """Returns the reward of one completion.

  Args:
    reward_fn: a `types.RewardFn`.
    problem: the fields of a `types.Problem`.
    text: the completion.
    finish_reason: value of a `types.FinishReason`.
  """
  record = types.SimpleNamespace(**problem)
  try:
    return Outcome(dict(reward_fn(record, text, finish_reason)))
  except JUNK_ERRORS as error:
    return Outcome({}, f'{type(error).__name__}: {error}')

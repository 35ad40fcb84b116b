"""Problem sources by the names that configs use."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Protocol

from llamarl_jax.data import arithmetic
from llamarl_jax.data import jsonl
from llamarl_jax.data import reasoning_gym
from llamarl_jax.data.addressing import Split
from llamarl_jax.types import Problem


class ProblemSource(Protocol):
  """Problems addressed by split and index: there is no cursor to lose."""

  def problem(self, split: Split | str, index: int) -> Problem:
    """Returns problem `index` of a split; training has no last index."""

  def num_problems(self, split: Split | str) -> int | None:
    """Returns how many there are (training: in an epoch); None if endless."""


# Each takes a seed and, by keyword, prompt_format and options of its own.
SOURCES: Mapping[str, Callable[..., ProblemSource]] = {
  'arithmetic': arithmetic.ArithmeticSource,
  'jsonl': jsonl.JsonlSource,
  'reasoning_gym': reasoning_gym.ReasoningGymSource,
}

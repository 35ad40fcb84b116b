"""The scorers by the names that configs use."""

from collections.abc import Callable
from collections.abc import Mapping
import functools
import inspect
from typing import TYPE_CHECKING
from typing import Any

from llamarl_jax.rewards import exact_answer
from llamarl_jax.rewards import format as format_scorer
from llamarl_jax.rewards import math_answer

if TYPE_CHECKING:
  from llamarl_jax.types import RewardFn

REWARDS: Mapping[str, Callable[..., Mapping[str, float]]] = {
  'first_number': exact_answer.first_number,
  'exact': exact_answer.exact,
  'math': math_answer.math_answer,
  'format': format_scorer.matches_format,
}

# These may run for ever on hostile text: only in workers with a time limit.
NEEDS_TIME_LIMIT = frozenset({'math'})


def make_reward(name: str, **options: Any) -> 'RewardFn':
  """Returns the scorer of that name with its options set; it can be pickled.

  Raises:
    ValueError: if there is no such scorer or it has no such option.
  """
  if name not in REWARDS:
    raise ValueError(f'Reward {name!r} must be one of {sorted(REWARDS)}.')
  parameters = inspect.signature(REWARDS[name]).parameters.values()
  known = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
  unknown = sorted(options.keys() - known.keys())
  if unknown:
    raise ValueError(
      f'Reward {name!r} has no options {unknown}; it has {sorted(known)}.'
    )
  missing = [
    p.name
    for p in known.values()
    if p.default is p.empty and p.name not in options
  ]
  if missing:
    raise ValueError(f'Reward {name!r} needs the options {missing}.')
  return functools.partial(REWARDS[name], **options)

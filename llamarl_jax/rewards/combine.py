"""The reward: a weighted sum of named parts."""

from collections.abc import Mapping
import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from llamarl_jax.types import FinishReason
  from llamarl_jax.types import Problem
  from llamarl_jax.types import RewardFn


@dataclasses.dataclass(frozen=True)
class WeightedSum:
  """Adds to the parts of several scorers their weighted sum, 'total'.

  total = sum_k weights[k] * parts[k]

  Attributes:
    scorers: each gives parts of its own.
    weights: of the parts; a part without one is shown and not counted.
  """

  scorers: 'tuple[RewardFn, ...]'
  weights: Mapping[str, float]

  def __post_init__(self) -> None:
    if not self.scorers or not self.weights:
      raise ValueError(
        f'{len(self.scorers)} scorers with weights {dict(self.weights)}: give '
        'at least one of each.'
      )

  def __call__(
    self, problem: 'Problem', text: str, finish_reason: 'FinishReason'
  ) -> Mapping[str, float]:
    """Returns all parts and 'total'.

    Raises:
      ValueError: if two scorers give the same part, or a weight has no part.
    """
    parts: dict[str, float] = {}
    for scorer in self.scorers:
      for name, value in scorer(problem, text, finish_reason).items():
        if name in parts or name == 'total':
          raise ValueError(
            f'Two scorers give a reward part named {name!r}: drop one.'
          )
        parts[name] = value
    unknown = sorted(self.weights.keys() - parts.keys())
    if unknown:
      raise ValueError(
        f'No scorer gives the reward parts {unknown}, which have weights; the '
        f'parts are {sorted(parts)}.'
      )
    total = sum(weight * parts[name] for name, weight in self.weights.items())
    return {**parts, 'total': float(total)}

"""Who looks on while the controller works."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Protocol

from llamarl_jax import types


class Observer(Protocol):
  """Sees what the controller sees; recording is all it does."""

  def report(self, executor: str, report: types.StepReport) -> None:
    """Takes the report of an executor, by its name."""

  def train_step(
    self,
    groups: Sequence[types.Group],
    metrics: Mapping[str, Any],
    busy_since: Mapping[str, float],
  ) -> None:
    """Takes the facts of a train step.

    Args:
      groups: the batch it trained on.
      metrics: of the trainer.
      busy_since: by executor at work, when its command was sent, in seconds
        since the epoch.
    """

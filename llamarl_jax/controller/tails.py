"""Forced lengths: a long tail of completions, to measure what one costs."""

import dataclasses

from llamarl_jax import types
from llamarl_jax.data import addressing


@dataclasses.dataclass(frozen=True)
class LongTail:
  """Makes the completions of some training problems long.

  Which ones depends on seed and index alone, so that runs with different
  schedules sample the same lengths.

  Attributes:
    seed: of the run.
    share: of problems, in [0, 1].
    length: tokens of each of their completions, exactly.
  """

  seed: int
  share: float
  length: int

  def has(self, index: int) -> bool:
    """Returns whether training problem `index` is among them."""
    draw = addressing.draw('long tail', self.seed, index)
    return draw < self.share * 2**64

  def apply(self, request: types.Request) -> types.Request:
    """Returns a training request, its length forced if it is among them.

    Stop tokens are not sampled then, and behavior log-probs are those of the
    policy without them.
    """
    if not self.has(request.admission_index):
      return request
    return dataclasses.replace(
      request,
      min_new_tokens=self.length,
      max_new_tokens=self.length,
      stop_strings=(),
    )

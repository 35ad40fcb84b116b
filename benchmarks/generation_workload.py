"""What is generated in the benchmarks: model, prompts, lengths.

Standard library and numpy alone, as in `workload.py`: every peer takes prompts
and lengths from here. Lengths are forced, so that all engines make the same
number of tokens for each prompt, whatever they sample.
"""

import dataclasses
import math

import numpy as np

from benchmarks import workload as workload_lib


@dataclasses.dataclass(frozen=True)
class GenerationWorkload:
  """Prompts to be continued, each by a length of its own.

  Attributes:
    model: key of `workload.WORKLOADS`, for the shape and the weights.
    slots: completions decoded side by side (S); also the batch of engines that
      do not refill.
    prompt: tokens of each prompt.
    lengths: new tokens of each completion, in order of admission.
  """

  model: str
  slots: int
  prompt: int
  lengths: tuple[int, ...]

  @property
  def shape(self) -> workload_lib.Workload:
    """Shape of the model."""
    return workload_lib.WORKLOADS[self.model]

  @property
  def num_tokens(self) -> int:
    """New tokens of all completions."""
    return sum(self.lengths)

  @property
  def max_new(self) -> int:
    """New tokens of the longest completion."""
    return max(self.lengths)


def skewed_lengths(
  count: int, mean: float, sigma: float, limit: int
) -> tuple[int, ...]:
  """Returns log-normal lengths, rounded, between 1 and a limit.

  length = exp(log(mean) - sigma ** 2 / 2 + sigma * z),  z normal

  of which the mean is `mean` before the limit cuts it.
  """
  z = np.random.default_rng(0).standard_normal(count)
  lengths = np.exp(math.log(mean) - sigma**2 / 2 + sigma * z)
  return tuple(int(n) for n in np.clip(np.rint(lengths), 1, limit))


WORKLOADS = {
  # A batch of equal lengths: nothing to refill.
  'equal': GenerationWorkload('3m', 32, 32, (128,) * 32),
  # As reasoning makes them: most short, some long.
  'skewed': GenerationWorkload('3m', 32, 32, skewed_lengths(256, 64, 1.0, 512)),
  'smollm2': GenerationWorkload('smollm2-135m', 32, 32, (64,) * 32),
  # For trying the benchmarks out.
  'tiny': GenerationWorkload('tiny', 4, 5, (3, 9, 1, 4, 7, 2)),
}


def prompts(workload: GenerationWorkload) -> np.ndarray:
  """Returns i32[N, prompt]; no token is 0, which some peers take for padding.

  All differ, so that no engine gains by sharing what it prefills.
  """
  rng = np.random.default_rng(1)
  shape = (len(workload.lengths), workload.prompt)
  return rng.integers(1, workload.shape.vocab_size, shape, dtype=np.int32)


def batches(workload: GenerationWorkload) -> list[slice]:
  """Returns what engines without refill take at a time: S in order."""
  count, slots = len(workload.lengths), workload.slots
  return [slice(i, min(i + slots, count)) for i in range(0, count, slots)]


def static_occupancy(workload: GenerationWorkload) -> float:
  """Returns the fraction of slot steps that batches without refill use.

  A batch takes as many steps as its longest completion.
  """
  lengths = workload.lengths
  steps = sum(max(lengths[batch]) for batch in batches(workload))
  return workload.num_tokens / (workload.slots * steps)

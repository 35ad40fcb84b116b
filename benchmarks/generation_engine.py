"""The workloads on this project's engine, with what its segments say.

Completions are recorded as the generator records them: tokens, behavior
log-probs and policy versions.
"""

from collections.abc import Callable
from collections.abc import Sequence
import time
from typing import NamedTuple

import jax
import numpy as np

from benchmarks import generation_workload as workload_lib
from benchmarks import train_steps
from llamarl_jax import types
from llamarl_jax.sampling import engine as engine_lib
from llamarl_jax.sampling import plan
from llamarl_jax.sampling import segments

# Decode steps of a segment: as many as a weight swap waits for.
SEGMENT_LENGTH = 32

_PROBLEM = types.Problem(index=0, prompt='', answer='')


def make_engine(
  workload: workload_lib.GenerationWorkload,
  segment_length: int = SEGMENT_LENGTH,
) -> engine_lib.Engine:
  """Returns an engine with the slots of a workload, nothing compiled yet."""
  return engine_lib.Engine(
    train_steps.llama_config(workload.shape),
    plan.EngineSettings(
      num_slots=workload.slots,
      segment_length=segment_length,
      max_prompt=workload.prompt,
      max_new=workload.max_new,
    ),
    key=jax.random.key(0),
    stop_tokens=(),
    # Nobody reads the text; decoding it is the tokenizer's time.
    decode_text=lambda tokens: '',
  )


def requests(
  prompts: np.ndarray, lengths: Sequence[int], temperature: float
) -> list[types.Request]:
  """Returns prompts i32[N, prompt] as requests of one completion each."""
  return [
    types.Request(
      admission_index=i,
      stream=types.Stream.TRAIN,
      problem=_PROBLEM,
      prompt_tokens=tuple(prompt.tolist()),
      num_samples=1,
      temperature=temperature,
      max_new_tokens=length,
    )
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
  ]


class Run(NamedTuple):
  """One run of requests to their end.

  Attributes:
    completions: in order of admission.
    stats: of each segment.
    seconds: of each segment, filling included.
  """

  completions: list[types.Completion]
  stats: list[segments.SegmentStats]
  seconds: list[float]

  @property
  def num_steps(self) -> int:
    """Decode steps of all segments."""
    return sum(stats.num_steps for stats in self.stats)

  def occupancy(self, slots: int) -> float:
    """Returns the fraction of slot steps that sampled a token."""
    tokens = sum(stats.num_tokens for stats in self.stats)
    return tokens / (slots * self.num_steps)


def run(
  engine: engine_lib.Engine,
  policy: Callable[[], types.VersionedParams],
  asked: Sequence[types.Request],
) -> Run:
  """Answers requests.

  Args:
    engine: idle.
    policy: gives the parameters of each segment.
    asked: the requests.
  """
  engine.submit(asked)
  completions, stats, seconds = [], [], []
  while engine.num_running or engine.num_waiting:
    start = time.perf_counter()
    params = policy()
    result = engine.segment(params.params, params.version.batches)
    seconds.append(time.perf_counter() - start)
    completions += [finished.completion for finished in result.finished]
    stats.append(result.stats)
  completions.sort(key=lambda completion: completion.admission_index)
  return Run(completions, stats, seconds)


def load_policy(
  workload: workload_lib.GenerationWorkload,
) -> types.VersionedParams:
  """Returns the workload's weights as version 0."""
  params = train_steps.load_params(workload.shape)
  return types.VersionedParams(types.Version(0, 0), params)

"""Worker: the engine of this project, behavior log-probs recorded."""

from collections.abc import Sequence

import numpy as np

from benchmarks import generation_engine
from benchmarks import generation_workload as workload_lib
from benchmarks.peers import generate_turns
from llamarl_jax.runtime import host_memory


def make(
  workload: workload_lib.GenerationWorkload,
) -> generate_turns.GenerateFn:
  """Returns the engine, all of its programs compiled."""
  engine = generation_engine.make_engine(workload)
  policy = generation_engine.load_policy(workload)
  engine.warm_up(policy.params)

  def generate(
    prompts: np.ndarray, lengths: Sequence[int], temperature: float
  ) -> list[Sequence[int]]:
    asked = generation_engine.requests(prompts, lengths, temperature)
    run = generation_engine.run(engine, lambda: policy, asked)
    return [completion.tokens for completion in run.completions]

  return generate


if __name__ == '__main__':
  # As executors do when they are processes.
  host_memory.keep_freed_memory()
  generate_turns.serve(make, ('jax', 'jaxlib'))

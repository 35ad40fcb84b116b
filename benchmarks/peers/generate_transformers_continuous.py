"""Worker: continuous batching of transformers, each request at its length.

The manager stays alive between runs, with pages for exactly the requests that
may run side by side.
"""

from collections.abc import Sequence
import math

import numpy as np
import transformers

from benchmarks import generation_workload as workload_lib
from benchmarks.peers import generate_transformers
from benchmarks.peers import generate_turns

# Positions a page. Small ones waste little, large ones are fewer to look up.
_PAGE = 32


def _make_manager(
  workload: workload_lib.GenerationWorkload, temperature: float
) -> transformers.generation.ContinuousBatchingManager:
  """Returns a running manager; each has one way of sampling."""
  model = generate_transformers.load_model(workload)
  pages = math.ceil((workload.prompt + workload.max_new) / _PAGE)
  manager = model.init_continuous_batching(
    generation_config=transformers.GenerationConfig(
      max_new_tokens=workload.max_new,
      eos_token_id=-1,
      pad_token_id=0,
      **generate_transformers.sampling(temperature),
    ),
    continuous_batching_config=transformers.ContinuousBatchingConfig(
      page_size=_PAGE,
      num_blocks=workload.slots * (pages + 1),
      max_batch_tokens=workload.slots * workload.prompt,
      max_requests_per_batch=workload.slots,
      # Prompts differ: there is no prefix to find.
      allow_block_sharing=False,
      seed=0,
    ),
  )
  manager.warmup()
  manager.start()
  return manager


def make(
  workload: workload_lib.GenerationWorkload,
) -> generate_turns.GenerateFn:
  """Returns the engine."""
  managers: dict[float, transformers.generation.ContinuousBatchingManager] = {}

  def generate(
    prompts: np.ndarray, lengths: Sequence[int], temperature: float
  ) -> list[Sequence[int]]:
    if temperature not in managers:
      managers[temperature] = _make_manager(workload, temperature)
    manager = managers[temperature]
    names = [
      manager.add_request(prompt.tolist(), max_new_tokens=length)
      for prompt, length in zip(prompts, lengths, strict=True)
    ]
    done: dict[str, Sequence[int]] = {}
    while len(done) < len(names):
      result = manager.get_result(timeout=1)
      if result is None:
        if not manager.is_running():
          raise RuntimeError('the manager ended; see above')
      elif result.error is not None:
        raise RuntimeError(result.error)
      elif result.is_finished():
        done[result.request_id] = result.generated_tokens
    return [done[name] for name in names]

  return generate


if __name__ == '__main__':
  generate_turns.serve(make, ('torch', 'transformers'))

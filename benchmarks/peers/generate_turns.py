"""How the workers that generate take turns; see `turns.py`.

A worker makes an engine, shows what it generates greedily, warms up, and then
generates the workload as often as its turns ask for. Standard library and
numpy only: workers run in many environments.
"""

from collections.abc import Callable
from collections.abc import Sequence
import importlib.metadata
import json
import os
import platform
import resource
import sys
import time
from typing import Any

import numpy as np

from benchmarks import generation_workload as workload_lib

# (prompts i32[N, prompt], new tokens of each, temperature) -> tokens of each.
# Temperature is 0 (greedy) or 1. An engine has S slots, however many N are.
GenerateFn = Callable[[np.ndarray, Sequence[int], float], list[Sequence[int]]]
MakeFn = Callable[[workload_lib.GenerationWorkload], GenerateFn]

# Tokens a prompt that are compared between engines.
NUM_COMPARED = 8


def serve(make: MakeFn, packages: Sequence[str]) -> None:
  """Runs a worker: prepares, then generates as often as each line asks for.

  Args:
    make: prepares the engine for a workload.
    packages: whose versions to report.
  """
  # What libraries print must not get between the answers.
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)

  def answer(**facts: Any) -> None:
    print(json.dumps(facts), file=answers, flush=True)

  workload = workload_lib.WORKLOADS[sys.argv[1]]
  start = time.perf_counter()
  generate = make(workload)
  run, run_first, greedy = _programs(workload, generate)
  compared = greedy()
  run_first()
  run()
  answer(
    python=platform.python_version(),
    versions={name: importlib.metadata.version(name) for name in packages},
    greedy=compared,
    ready_seconds=time.perf_counter() - start,
  )
  for line in sys.stdin:
    seconds, first_seconds = [], []
    for _ in range(int(line)):
      seconds.append(_timed(run))
      first_seconds.append(_timed(run_first))
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer(
      seconds=seconds, first_seconds=first_seconds, peak_bytes=kibibytes * 1024
    )
  # Engines may have threads that would keep the process.
  os._exit(0)


def _programs(
  workload: workload_lib.GenerationWorkload, generate: GenerateFn
) -> tuple[Callable[[], None], Callable[[], None], Callable[[], Any]]:
  """Returns the workload, its first token, and its beginning, greedily."""
  prompts = workload_lib.prompts(workload)
  batch = prompts[: workload.slots]

  def run() -> None:
    made = [len(tokens) for tokens in generate(prompts, workload.lengths, 1.0)]
    if made != list(workload.lengths):
      raise ValueError(f'asked for {workload.lengths} tokens, made {made}')

  def run_first() -> None:
    generate(batch, [1] * len(batch), 1.0)

  def greedy() -> Any:
    made = generate(batch, [NUM_COMPARED] * len(batch), 0.0)
    return [[int(token) for token in tokens] for tokens in made]

  return run, run_first, greedy


def _timed(program: Callable[[], None]) -> float:
  """Returns the seconds that a program takes."""
  start = time.perf_counter()
  program()
  return time.perf_counter() - start

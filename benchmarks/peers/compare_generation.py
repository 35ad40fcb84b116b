"""Times generation here and in other systems, in turns.

  python -m benchmarks.peers.compare_generation [--workload=equal]
      [--rounds=7] [--json=FILE]
      [--peers=transformers,transformers_continuous,tunix,vllm]

Each system runs in a process and an environment of its own (`make
bench-generation-peers` makes them): same weights, same prompts, the same number
of tokens for each. Their first greedy tokens are compared, so that a peer that
computes something else is found out. Processes take turns, one at work while
the others sleep: ratios hold where seconds do not.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import json
import pathlib
import statistics
import sys
import time
from typing import Any

from absl import app
from absl import flags
from absl import logging

from benchmarks import generation_workload as workload_lib
from benchmarks import workload as shapes_lib
from benchmarks.peers import turns

# Each peer and the environment it runs in.
PEERS = {
  'transformers': 'transformers',
  'transformers_continuous': 'transformers',
  'tunix': 'tunix',
  'vllm': 'vllm',
}
OURS = 'llamarl'
# Sums of other orders decide near-ties otherwise, and a row that took another
# token goes on differently.
_LEAST_AGREEMENT = 0.9


def interpreter(system: str) -> str:
  """Returns the python that runs a system.

  Raises:
    ValueError: if it is not known or its environment is not there.
  """
  if system == OURS:
    return sys.executable
  if system not in PEERS:
    raise ValueError(f'no peer {system!r}; there are {", ".join(PEERS)}')
  path = pathlib.Path(f'.venv-bench-{PEERS[system]}/bin/python')
  if not path.exists():
    raise ValueError(
      f'{path} is not there: run `make bench-generation-peers`, or leave '
      f'{system!r} out of --peers'
    )
  return str(path)


def agreement(
  ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]
) -> float:
  """Returns the fraction of tokens that are equal, up to the first other one.

  Args:
    ours: greedy tokens of each prompt.
    theirs: likewise.
  """
  equal = total = 0
  for a, b in zip(ours, theirs, strict=True):
    same = [x == y for x, y in zip(a, b, strict=True)]
    # What follows a token that differs has another context.
    compared = same.index(False) + 1 if False in same else len(same)
    equal += sum(same[:compared])
    total += compared
  return equal / total


def measure(workers: Mapping[str, turns.Worker], rounds: int) -> dict[str, Any]:
  """Returns what is known of each system, with the seconds of all runs.

  Args:
    workers: by system, all ready.
    rounds: turns of each.
  """
  results = {
    system: {**worker.facts, 'seconds': [], 'first_seconds': []}
    for system, worker in workers.items()
  }
  for i in range(rounds):
    for system, worker in workers.items():
      time.sleep(0.5)  # Threads of the last one spin on for a moment.
      # Workers end a turn with a short run, which the next begins with cold
      # caches: little beside a run of hundreds of steps.
      turn = worker.turn(1)
      for name in ('seconds', 'first_seconds'):
        results[system][name] += turn[name]
      results[system]['peak_bytes'] = turn['peak_bytes']
    logging.info('round %d of %d', i + 1, rounds)
  for result in results.values():
    result['median_seconds'] = statistics.median(result['seconds'])
    # Of each round by itself: both ran within a minute of each other.
    result['ratios'] = [
      theirs / ours
      for ours, theirs in zip(
        results[OURS]['seconds'], result['seconds'], strict=True
      )
    ]
    result['ratio'] = statistics.median(result['ratios'])
    result['median_first_seconds'] = statistics.median(result['first_seconds'])
    result['agreement'] = agreement(results[OURS]['greedy'], result['greedy'])
  return results


def check(results: Mapping[str, Any]) -> None:
  """Raises ValueError where a system's greedy tokens are not ours."""
  for system, result in results.items():
    if result['agreement'] < _LEAST_AGREEMENT:
      raise ValueError(
        f'{system} takes the same greedy token {result["agreement"]:.2f} of '
        'the time: not the same model'
      )


def table(name: str, results: Mapping[str, Any]) -> str:
  """Returns the results for people to read."""
  workload = workload_lib.WORKLOADS[name]
  parameters = shapes_lib.num_parameters(workload.shape)
  rows = [
    f'{name}: {parameters / 1e6:.2f} M parameters, {len(workload.lengths)}'
    f' completions of {min(workload.lengths)} to {workload.max_new} tokens,'
    f' {workload.num_tokens} in all, prompts of {workload.prompt},'
    f' {workload.slots} slots, float32; without refill'
    f' {workload_lib.static_occupancy(workload):.2f} of the slots are in use',
    'system                   seconds  tokens/s  tokens/s ours/theirs '
    '(least, most)  first token s  peak GB  same  versions',
  ]
  for system, result in results.items():
    seconds, ratios = result['median_seconds'], result['ratios']
    versions = ' '.join(f'{k} {v}' for k, v in result['versions'].items())
    rows.append(
      f'{system:24}{seconds:8.2f}{workload.num_tokens / seconds:10.0f}'
      f'{result["ratio"]:22.2f} ({min(ratios):.2f}, {max(ratios):.2f})'
      f'{result["median_first_seconds"]:15.3f}'
      f'{result["peak_bytes"] / 1e9:9.2f}{result["agreement"]:6.2f}  {versions}'
    )
  return '\n'.join(rows)


def main(arguments: Sequence[str]) -> None:
  """Runs the command."""
  del arguments
  values = flags.FLAGS
  systems = [OURS, *values.peers]
  pythons = {system: interpreter(system) for system in systems}
  workers: dict[str, turns.Worker] = {}
  try:
    for system, python in pythons.items():
      workers[system] = turns.Worker(
        python, f'benchmarks.peers.generate_{system}', values.workload
      )
      logging.info('%s is ready', system)
    results = measure(workers, values.rounds)
  finally:
    for worker in workers.values():
      worker.close()
  if values.json:
    pathlib.Path(values.json).write_text(json.dumps(results, indent=1))
  print(table(values.workload, results))
  check(results)


def _define_flags() -> None:
  names = sorted(workload_lib.WORKLOADS)
  flags.DEFINE_enum('workload', 'equal', names, 'What to generate.')
  flags.DEFINE_list('peers', list(PEERS), 'Whom to compare with.')
  flags.DEFINE_integer('rounds', 7, 'Turns of each.', lower_bound=1)
  flags.DEFINE_string('json', None, 'File to write the results to.')


if __name__ == '__main__':
  _define_flags()
  app.run(main)

"""Times the same train step here and in other systems, in turns.

  python -m benchmarks.peers.compare [--workload=3m] [--rounds=7]
      [--peers=transformers,tunix,trl] [--json=FILE]

Each system runs in a process and an environment of its own (`make
bench-peers` makes them): same weights, same tokens, same loss, same optimizer.
The norm of the first gradient is compared, so that a peer that computes
something else is found out. Processes take turns, one at work while the others
sleep, so that what else the machine does falls on all alike: ratios hold where
seconds do not.
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

from benchmarks import workload as workload_lib
from benchmarks.peers import turns

_WORKLOAD = flags.DEFINE_enum(
  'workload', '3m', sorted(workload_lib.WORKLOADS), 'What to run.'
)
_PEERS = flags.DEFINE_list(
  'peers', ['transformers', 'tunix', 'trl'], 'Whom to compare with.'
)
_ROUNDS = flags.DEFINE_integer('rounds', 7, 'Turns of each.', lower_bound=1)
_TURN_SECONDS = flags.DEFINE_float(
  'turn_seconds', 1.5, 'Steps of a turn take about so long.', lower_bound=0.0
)
_JSON = flags.DEFINE_string('json', None, 'File to write the results to.')

OURS = 'llamarl'
# Sums of other orders: gradients of 100 M parameters agree to this.
_GRAD_NORM_TOLERANCE = 1e-3


def interpreter(system: str) -> str:
  """Returns the python that runs a system.

  Raises:
    ValueError: if its environment is not there.
  """
  if system == OURS:
    return sys.executable
  path = pathlib.Path(f'.venv-bench-{system}/bin/python')
  if not path.exists():
    raise ValueError(
      f'{path} is not there: run `make bench-peers`, or leave {system!r} out '
      'of --peers'
    )
  return str(path)


def measure(
  workers: Mapping[str, turns.Worker], rounds: int, turn_seconds: float
) -> dict[str, Any]:
  """Returns what is known of each system, with the seconds of all steps.

  Args:
    workers: by system, all ready.
    rounds: turns of each.
    turn_seconds: about as long is a turn.
  """
  num_steps = {}
  results = {}
  for system, worker in workers.items():
    (second,) = worker.turn(1)['seconds']
    num_steps[system] = max(1, round(turn_seconds / second))
    results[system] = {**worker.facts, 'seconds': []}
  for i in range(rounds):
    for system, worker in workers.items():
      time.sleep(0.2)  # Threads of the last one spin on for a moment.
      # The first brings its memory back into the caches.
      turn = worker.turn(num_steps[system] + 1)
      results[system]['seconds'].append(turn['seconds'][1:])
      results[system]['peak_bytes'] = turn['peak_bytes']
    logging.info('round %d of %d', i + 1, rounds)
  for result in results.values():
    result['median_seconds'] = statistics.median(
      statistics.median(turn) for turn in result['seconds']
    )
  for result in results.values():
    # Of each round by itself: both ran within seconds of each other.
    result['ratios'] = [
      statistics.median(ours) / statistics.median(theirs)
      for ours, theirs in zip(
        results[OURS]['seconds'], result['seconds'], strict=True
      )
    ]
    result['ratio'] = statistics.median(result['ratios'])
  return results


def check(results: Mapping[str, Any]) -> None:
  """Raises ValueError where a system's first gradient differs from ours."""
  ours = results[OURS]['grad_norm']
  for system, result in results.items():
    theirs = result['grad_norm']
    if abs(theirs - ours) > _GRAD_NORM_TOLERANCE * ours:
      raise ValueError(
        f'the first gradient has norm {theirs} in {system}, {ours} here: not '
        'the same step'
      )


def table(workload: str, results: Mapping[str, Any]) -> str:
  """Returns the results for people to read."""
  shape = workload_lib.WORKLOADS[workload]
  flops = 3 * workload_lib.forward_flops(shape)
  rows = [
    f'{workload}: {workload_lib.num_parameters(shape) / 1e6:.2f} M parameters,'
    f' {shape.rows} x {shape.length} tokens, float32',
    'system         step s  tokens/s  GFLOP/s  ours/theirs (least, most)'
    '  peak GB  versions',
  ]
  for system, result in results.items():
    seconds = result['median_seconds']
    ratios = result['ratios']
    versions = ' '.join(f'{k} {v}' for k, v in result['versions'].items())
    rows.append(
      f'{system:14}{seconds:7.3f}{shape.num_tokens / seconds:10.0f}'
      f'{flops / seconds / 1e9:9.0f}{result["ratio"]:13.2f}'
      f' ({min(ratios):.2f}, {max(ratios):.2f})'
      f'{result["peak_bytes"] / 1e9:14.2f}  {versions}'
    )
  return '\n'.join(rows)


def main(arguments: Sequence[str]) -> None:
  """Runs the command."""
  del arguments
  systems = [OURS, *_PEERS.value]
  pythons = {system: interpreter(system) for system in systems}
  workers: dict[str, turns.Worker] = {}
  try:
    for system, python in pythons.items():
      workers[system] = turns.Worker(
        python, f'benchmarks.peers.{system}_step', _WORKLOAD.value
      )
      logging.info('%s: %s', system, workers[system].facts)
    results = measure(workers, _ROUNDS.value, _TURN_SECONDS.value)
  finally:
    for worker in workers.values():
      worker.close()
  if _JSON.value:
    pathlib.Path(_JSON.value).write_text(json.dumps(results, indent=1))
  print(table(_WORKLOAD.value, results))
  check(results)


if __name__ == '__main__':
  app.run(main)

"""Measures what a long tail of completions costs, by batch order.

  python -m benchmarks.long_tail [--steps=100] [--seeds=0,1,2]
      [--supervised=300] [--arms=completion,drain,admission] [--json=FILE]

One problem in fifty gets completions ten times as long as others may be. Whole
runs of a config, in turns, each in processes of its own:

  completion  batches are the first groups to complete, and weights are taken
              while completions go on: nothing waits for the long ones
  drain       batches in admission order, and a replica finishes all it holds
              before it takes new weights
  admission   batches in admission order, weights taken in flight

The first steps of a run, in which programs are compiled or its pipeline is not
full yet, count in no mean. Compiled programs are kept between runs.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from absl import app
from absl import flags

ARMS: Mapping[str, Mapping[str, str]] = {
  'completion': {'batch_order': 'completion', 'generator.swap': 'in_flight'},
  'drain': {'batch_order': 'admission', 'generator.swap': 'drain'},
  'admission': {'batch_order': 'admission', 'generator.swap': 'in_flight'},
}

_CONFIG = flags.DEFINE_string('config', 'configs/arithmetic.py', 'To run.')
_STEPS = flags.DEFINE_integer('steps', 24, 'Train steps of a run.')
_SKIP = flags.DEFINE_integer('skip', 8, 'First steps that count in no mean.')
_SEEDS = flags.DEFINE_list('seeds', ['0'], 'Seeds, each run by every arm.')
_ARMS = flags.DEFINE_list('arms', ['completion', 'drain'], f'Of {list(ARMS)}.')
_SUPERVISED = flags.DEFINE_integer('supervised', 0, 'Supervised steps before.')
_SHARE = flags.DEFINE_float('tail_share', 0.02, 'Of problems with long ones.')
_FACTOR = flags.DEFINE_integer('tail_factor', 10, 'Times max_new_tokens.')
_STALENESS = flags.DEFINE_integer('max_staleness', 1, 'Versions.')
_LAUNCHER = flags.DEFINE_string('launcher', 'ray', "'ray' or 'local'.")
_JSON = flags.DEFINE_string('json', None, 'File for every number.')


def settings() -> dict[str, Any]:
  """Returns the fields of the config that all arms share."""
  return {
    'num_steps': _STEPS.value,
    'max_staleness': _STALENESS.value,
    'generator.tail_share': _SHARE.value,
    'generator.tail_factor': _FACTOR.value,
    # Rows of one sequence would all be as long as the longest.
    'trainer.pack_tokens': 128,
    'trainer.pack_rows': 64,
    'generator.warm_up': True,
    'supervised.num_steps': _SUPERVISED.value,
    'evaluation.num_problems': 512 if _SUPERVISED.value else 32,
    'launcher.name': _LAUNCHER.value,
    'report.write': False,
    'report.expect_truncation': True,
  }


def run(
  fields: Mapping[str, Any], workdir: pathlib.Path, cache: pathlib.Path
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
  """Runs the config with other fields.

  Args:
    fields: by dotted name.
    workdir: of the run.
    cache: folder of compiled programs.

  Returns:
    the records of its train steps, and its summary.

  Raises:
    RuntimeError: the run failed; has its last lines.
  """
  command = [
    sys.executable,
    '-m',
    'experiments.train',
    f'--config={_CONFIG.value}',
    f'--workdir={workdir}',
    *(f'--config.{name}={value}' for name, value in fields.items()),
  ]
  kept = {
    'JAX_COMPILATION_CACHE_DIR': str(cache),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
  }
  done = subprocess.run(
    command,
    env={**os.environ, **kept},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
  )
  if done.returncode:
    raise RuntimeError(f'{command} failed:\n{done.stdout[-4000:]}')
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  records = [json.loads(line) for line in lines]
  summary = json.loads((workdir / 'summary.json').read_text())
  return [record for record in records if 'loss' in record], summary


def facts(
  records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], skip: int
) -> dict[str, float]:
  """Returns what is compared between runs.

  Args:
    records: of all train steps.
    summary: of the run.
    skip: first steps that the times leave out; lengths are of all steps.
  """
  seconds = [record['step_seconds'] for record in records[skip:]]
  trained = [record['response_length_mean'] for record in records]
  return {
    'step_seconds_mean': statistics.mean(seconds),
    'step_seconds_median': statistics.median(seconds),
    'trained_length': statistics.mean(trained),
    # Means of all completions since the start; see `controller/recorder.py`.
    'length_ratio': records[-1]['length_ratio'],
    'staleness_mean': statistics.mean(r['staleness_mean'] for r in records),
    'staleness_max': max(r['staleness_max'] for r in records),
    'lost_groups': summary['lost_groups'],
    'accuracy_before': summary['accuracy_before'],
    'accuracy_after': summary['accuracy_after'],
  }


def table(results: Sequence[Mapping[str, Any]]) -> str:
  """Returns the results for people to read, and the ratios of step times."""
  lines = [
    'seed arm         step mean  median  length trained  / sampled  stale mean'
    '  max  lost  accuracy'
  ]
  for r in results:
    lines.append(
      f'{r["seed"]:4} {r["arm"]:10}{r["step_seconds_mean"]:9.3f} s'
      f'{r["step_seconds_median"]:6.3f} s{r["trained_length"]:16.2f}'
      f'{r["length_ratio"]:11.3f}{r["staleness_mean"]:12.2f}'
      f'{r["staleness_max"]:5.0f}{r["lost_groups"]:6}'
      f'  {r["accuracy_before"]:.3f} -> {r["accuracy_after"]:.3f}'
    )
  base = _mean(results, 'drain')
  for arm in sorted({r['arm'] for r in results} - {'drain'}):
    if base:
      saved = 1 - _mean(results, arm) / base
      lines.append(f'{arm}: mean step {saved:.0%} below that of drain')
  return '\n'.join(lines)


def _mean(results: Sequence[Mapping[str, Any]], arm: str) -> float:
  """Returns the mean step of an arm, and 0 where it did not run."""
  means = [r['step_seconds_mean'] for r in results if r['arm'] == arm]
  return statistics.mean(means) if means else 0.0


def main(arguments: Sequence[str]) -> None:
  """Runs the command."""
  del arguments
  if _STEPS.value <= _SKIP.value:
    raise app.UsageError(f'--steps must be above --skip={_SKIP.value}')
  if unknown := set(_ARMS.value) - set(ARMS):
    raise app.UsageError(f'--arms: no {sorted(unknown)}, only {list(ARMS)}')
  results: list[dict[str, Any]] = []
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    cache = folder / 'compiled'
    for i, seed in enumerate(_SEEDS.value):
      # There and back, so that what drifts meets both alike.
      for arm in _ARMS.value[:: -1 if i % 2 else 1]:
        fields = {**settings(), **ARMS[arm], 'seed': seed}
        records, summary = run(fields, folder / f'{arm}_{seed}', cache)
        found = facts(records, summary, _SKIP.value)
        results.append({'seed': seed, 'arm': arm, **found})
        print(table(results[-1:]).splitlines()[1], flush=True)
  if _JSON.value:
    pathlib.Path(_JSON.value).write_text(json.dumps(results, indent=1))
  print(table(results))


if __name__ == '__main__':
  app.run(main)

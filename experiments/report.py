"""Builds report.html of a run again, also of one that was cut short.

python -m experiments.report --workdir=DIR
"""

import json
import pathlib

from absl import flags

from experiments import command
from llamarl_jax.runtime import metrics
from llamarl_jax.runtime import report
from llamarl_jax.runtime import timeline
from llamarl_jax.runtime import workdir as workdir_lib


def run(workdir: str | pathlib.Path) -> pathlib.Path:
  """Writes report.html and returns its path.

  Args:
    workdir: folder of a run.

  Raises:
    command.InputError: the folder holds no run.
  """
  workdir = pathlib.Path(workdir)
  with command.checking_input():
    config = workdir_lib.read_config(workdir)
  records_path = workdir / 'metrics.jsonl'
  timeline_path = workdir / 'timeline.json'
  path = workdir / 'report.html'
  run_start, tracks = (
    timeline.read_timeline(timeline_path)
    if timeline_path.exists()
    else (None, {})
  )
  report.write_report(
    path,
    records=metrics.read_records(records_path) if records_path.exists() else [],
    summary=_read(workdir / 'summary.json', {}),
    tracks=tracks,
    samples=_read(workdir / 'samples.json', []),
    config=config,
    run_start=run_start,
  )
  return path


def _read(path: pathlib.Path, default: object) -> object:
  return json.loads(path.read_text()) if path.exists() else default


def define_flags() -> None:
  """Defines the flags of the command."""
  flags.DEFINE_string('workdir', None, 'Folder of the run.')


def main(values: flags.FlagValues) -> None:
  """Runs the command."""
  if not values.workdir:
    raise command.InputError('--workdir is missing; give the folder of a run')
  print(run(values.workdir))


if __name__ == '__main__':
  command.run(define_flags, main)

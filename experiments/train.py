"""The main job: asynchronous RL of one config, from start to report.

python -m experiments.train --config=configs/X.py --workdir=DIR
"""

from collections.abc import Mapping
import contextlib
import json
import pathlib
import sys
import time
from typing import Any
from typing import TextIO

from absl import flags
import ml_collections
import numpy as np

from experiments import command
from llamarl_jax import types
from llamarl_jax.controller import builder
from llamarl_jax.controller import controller as controller_lib
from llamarl_jax.controller import recorder as recorder_lib
from llamarl_jax.controller.launchers import base
from llamarl_jax.controller.launchers import registry as launchers
from llamarl_jax.runtime import host_memory
from llamarl_jax.runtime import metrics
from llamarl_jax.runtime import report
from llamarl_jax.runtime import run_summary
from llamarl_jax.runtime import strict_json
from llamarl_jax.runtime import workdir as workdir_lib

# Supervised steps whose mean loss is compared with `supervised.stop_loss`.
_SUPERVISED_WINDOW = 10


def run(
  config: ml_collections.ConfigDict,
  workdir: str | pathlib.Path,
  *,
  stream: TextIO | None = None,
) -> dict[str, Any]:
  """Runs a config, or goes on with it from the last checkpoint of `workdir`.

  Args:
    config: as in configs/base.py.
    workdir: folder of the run; made where it does not exist.
    stream: where progress is printed, None = standard output.

  Returns:
    The summary of the run, as in summary.json.

  Raises:
    command.InputError: the config, a file it names or the workdir is at fault.
    base.ExecutorError: an executor raised or died.
  """
  stream = stream or sys.stdout
  workdir = pathlib.Path(workdir).absolute()
  settings = config.to_dict()
  with command.checking_input():
    workdir_lib.check(workdir, settings)
    plan = builder.build(config, workdir)
    launcher = launchers.make_launcher(
      config.launcher.name,
      plan.program.nodes,
      address=config.launcher.address,
      platform=config.launcher.platform,
    )
  try:
    workdir_lib.prepare(workdir, settings)
    return _run(config, workdir, plan, launcher, stream)
  finally:
    launcher.close()


def _run(
  config: ml_collections.ConfigDict,
  workdir: pathlib.Path,
  plan: builder.Plan,
  launcher: base.Launcher,
  stream: TextIO,
) -> dict[str, Any]:
  """Starts the plan's executors, runs it, and writes what came of it."""
  start = time.time()
  handles = {node.name: launcher.start(node) for node in plan.program.nodes}
  version = base.ask(launcher, handles['trainer'], 'resume')
  described = {
    name: base.answer(launcher, handle.describe())
    for name, handle in handles.items()
  }
  print(plan.program.describe(described), file=stream, flush=True)
  recorder = recorder_lib.Recorder(
    workdir,
    stream,
    num_steps=config.num_steps,
    start_step=version.batches,
    lengths_expected=config.report.expect_truncation,
  )
  with contextlib.closing(recorder):
    if version.incarnation:
      recorder.say(f'resumed after step {version.batches}')
    else:
      _supervise(config, plan, launcher, handles['trainer'], recorder)
    if 'reference' in handles:
      if not version.incarnation:
        base.ask(launcher, handles['trainer'], 'save_reference')
      base.ask(launcher, handles['reference'], 'load')
    controller = _controller(config, plan, launcher, handles, version, recorder)
    before, after = _train(config, workdir, plan, controller, recorder)

  facts = run_summary.RunFacts(
    config_name=config.name,
    seed=config.seed,
    accuracy_before=recorder_lib.accuracy(before),
    accuracy_after=recorder_lib.accuracy(after),
    num_steps=controller.version.batches,
    wall_seconds=time.time() - start,
    training_start=recorder.training_start,
    training_stop=recorder.training_stop,
    num_tokens=recorder.num_tokens,
    processes=[
      run_summary.Process(name, **facts) for name, facts in described.items()
    ],
    weight_publications=recorder.num_publications,
    weight_bytes=recorder.weight_bytes,
    lost_groups=controller.num_lost_groups,
    parameter_digest=base.ask(launcher, handles['trainer'], 'digest'),
    replica_digests={
      node.name: base.ask(launcher, handles[node.name], 'digest')
      for node in plan.program.of_role('generator')
    },
  )
  shown = recorder_lib.samples(before, after, config.report.num_samples)
  return _finish(config, workdir, facts, recorder, shown)


def _controller(
  config: ml_collections.ConfigDict,
  plan: builder.Plan,
  launcher: base.Launcher,
  handles: Mapping[str, base.Handle],
  version: types.Version,
  recorder: recorder_lib.Recorder,
) -> controller_lib.Controller:
  """Returns the loop over the started executors."""
  return controller_lib.Controller(
    controller_lib.Executors(
      trainer=handles['trainer'],
      generators=[handles[n.name] for n in plan.program.of_role('generator')],
      reward=handles['reward'],
      reference=handles.get('reference'),
    ),
    launcher,
    plan.rule,
    plan.make_request,
    recorder,
    start_version=version,
    trained=base.ask(launcher, handles['trainer'], 'trained'),
    drain=config.generator.swap == 'drain',
    capacity=plan.capacity,
    command_timeout_seconds=config.launcher.command_timeout_seconds,
    checkpoint_every=config.trainer.checkpoint_every,
  )


def _train(
  config: ml_collections.ConfigDict,
  workdir: pathlib.Path,
  plan: builder.Plan,
  controller: controller_lib.Controller,
  recorder: recorder_lib.Recorder,
) -> tuple[list[recorder_lib.Answer], list[recorder_lib.Answer]]:
  """Evaluates, trains, evaluates; returns the answers before and after."""
  requests = plan.task.evaluation_requests(config.evaluation.num_problems)
  # The policy before training is gone when a run is resumed; its answers stay.
  before_path = workdir / 'before.json'
  if controller.version.incarnation and before_path.exists():
    before = recorder_lib.read_answers(before_path)
  else:
    before = _evaluate(controller, requests, recorder, 'before training')
    recorder_lib.write_answers(before_path, before)
  recorder.begin_training()
  controller.train()
  after = _evaluate(controller, requests, recorder, 'after training')
  return before, after


def _supervise(
  config: ml_collections.ConfigDict,
  plan: builder.Plan,
  launcher: base.Launcher,
  trainer: base.Handle,
  recorder: recorder_lib.Recorder,
) -> None:
  """Gives a model from scratch its start, of a quality that can be set."""
  settings = config.supervised
  losses: list[float] = []
  for step in range(settings.num_steps):
    examples = plan.task.examples(
      step * settings.batch_size, settings.batch_size
    )
    answer = base.ask(launcher, trainer, 'supervise', examples)
    recorder.report('trainer', answer)
    losses.append(answer.metrics['loss'])
    done = step + 1
    loss = float(np.mean(losses[-_SUPERVISED_WINDOW:]))
    good = done >= _SUPERVISED_WINDOW and loss < settings.stop_loss
    if good or done % 50 == 0 or done == settings.num_steps:
      recorder.say(
        f'supervised step {done}/{settings.num_steps}  loss {loss:.3f}'
        + ('  good enough, stopped' if good else '')
      )
    if good:
      break


def _evaluate(
  controller: controller_lib.Controller,
  requests: list[types.Request],
  recorder: recorder_lib.Recorder,
  name: str,
) -> list[recorder_lib.Answer]:
  """Returns the requests answered greedily by the current policy."""
  start = time.time()
  answers = recorder_lib.answers(controller.evaluate(requests))
  recorder.evaluation(
    name,
    controller.version.batches,
    recorder_lib.accuracy(answers),
    time.time() - start,
  )
  return answers


def _finish(
  config: ml_collections.ConfigDict,
  workdir: pathlib.Path,
  facts: run_summary.RunFacts,
  recorder: recorder_lib.Recorder,
  samples: list[Mapping[str, Any]],
) -> dict[str, Any]:
  """Writes summary.json and report.html, and prints the table at the end."""
  records = metrics.read_records(workdir / 'metrics.jsonl')
  tracks = recorder.timeline.tracks
  summary = run_summary.build_summary(facts, records, tracks)
  strict_json.write_text(
    workdir / 'samples.json', json.dumps(samples, indent=2) + '\n'
  )
  if config.report.write:
    report.write_report(
      workdir / 'report.html',
      records=records,
      summary=summary,
      tracks=tracks,
      samples=samples,
      config=config.to_dict(),
      run_start=recorder.timeline.run_start,
    )
  strict_json.write_text(
    workdir / 'summary.json', json.dumps(summary, indent=2) + '\n'
  )
  recorder.say('\n' + run_summary.final_table(summary, records, workdir))
  return summary


def define_flags() -> None:
  """Defines the flags of the command."""
  command.define_config_flag()
  flags.DEFINE_string('workdir', None, 'Folder of the run.')


def main(values: flags.FlagValues) -> None:
  """Runs the command."""
  if not values.workdir:
    raise command.InputError('--workdir is missing; give a folder for the run')
  # Here and not in the launcher: it changes the process, for good.
  if values.config.launcher.platform == 'cpu':
    host_memory.keep_freed_memory()
  run(values.config, values.workdir)


if __name__ == '__main__':
  command.run(define_flags, main)

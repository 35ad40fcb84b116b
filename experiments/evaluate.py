"""Measures a policy on held-out problems: greedy accuracy and pass@k.

  python -m experiments.evaluate --config=configs/X.py [--workdir=DIR]
      [--samples=8]

With --workdir the policy is the newest checkpoint of that run, else the base
model of the config.
"""

import pathlib

from absl import flags
import ml_collections

from experiments import command
from llamarl_jax.controller import answering
from llamarl_jax.controller import recorder


def run(
  config: ml_collections.ConfigDict,
  workdir: str | pathlib.Path | None = None,
  *,
  step: int | None = None,
  num_samples: int = 0,
) -> dict[str, float]:
  """Returns 'accuracy' (greedy) and 'pass@k' for k = 1, 2, 4, ... samples.

  Args:
    config: as in configs/base.py; `evaluation.num_problems` problems are asked.
    workdir: of a run whose checkpoint is the policy; None = the base model.
    step: which checkpoint, None = the newest.
    num_samples: samples a problem, at the training temperature; 0 = none.

  Raises:
    command.InputError: the config, a file or the checkpoint is at fault.
  """
  with command.checking_input():
    if num_samples < 0:
      raise ValueError(f'samples={num_samples} must be 0 or more')
    checkpoints = pathlib.Path(workdir) / 'checkpoints' if workdir else None
    answerer = answering.Answerer(config, checkpoints, step)
    requests = answerer.task.evaluation_requests(config.evaluation.num_problems)
  try:
    groups = answerer.answer(requests)
    results = {'accuracy': recorder.accuracy(recorder.answers(groups))}
    if num_samples:
      sampled = answerer.answer(
        answerer.task.evaluation_requests(
          config.evaluation.num_problems,
          num_samples=num_samples,
          temperature=config.generator.temperature,
        )
      )
      k = 1
      while k <= num_samples:
        results[f'pass@{k}'] = answering.mean_pass_at_k(sampled, k)
        k *= 2
    return results
  finally:
    answerer.close()


def define_flags() -> None:
  """Defines the flags of the command."""
  command.define_config_flag()
  flags.DEFINE_string(
    'workdir', None, 'Run whose newest checkpoint is evaluated.'
  )
  flags.DEFINE_integer('step', None, 'Checkpoint; the newest if unset.')
  flags.DEFINE_integer(
    'samples', 0, 'Samples a problem for pass@k; 0 leaves it out.'
  )


def main(values: flags.FlagValues) -> None:
  """Runs the command."""
  results = run(
    values.config,
    values.workdir,
    step=values.step,
    num_samples=values.samples,
  )
  for name, value in results.items():
    print(f'{name:10} {value:.4f}')


if __name__ == '__main__':
  command.run(define_flags, main)

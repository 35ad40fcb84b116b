"""Prints completions of held-out problems, token by token with log-probs.

python -m experiments.sample --config=configs/X.py [--workdir=DIR]
[--problems=4] [--temperature=0]
"""

import pathlib
import sys
from typing import TextIO

from absl import flags
import ml_collections

from experiments import command
from llamarl_jax import types
from llamarl_jax.controller import answering


def run(
  config: ml_collections.ConfigDict,
  workdir: str | pathlib.Path | None = None,
  *,
  step: int | None = None,
  num_problems: int = 4,
  num_samples: int = 1,
  temperature: float = 0.0,
  stream: TextIO | None = None,
) -> list[types.Group]:
  """Prints completions and returns them, scored.

  Args:
    config: as in configs/base.py.
    workdir: of a run whose checkpoint is the policy; None = the base model.
    step: which checkpoint, None = the newest.
    num_problems: the first so many held-out problems.
    num_samples: completions a problem.
    temperature: of the softmax sampled from; 0 is greedy.
    stream: to print to, None = standard output.

  Raises:
    command.InputError: the config, a file or the checkpoint is at fault.
  """
  stream = stream or sys.stdout
  with command.checking_input():
    for name, value, least in (
      ('problems', num_problems, 1),
      ('samples', num_samples, 1),
      ('temperature', temperature, 0),
    ):
      if value < least:
        raise ValueError(f'{name}={value} must be at least {least}')
    checkpoints = pathlib.Path(workdir) / 'checkpoints' if workdir else None
    answerer = answering.Answerer(config, checkpoints, step)
    requests = answerer.task.evaluation_requests(
      num_problems, num_samples=num_samples, temperature=temperature
    )
  try:
    groups = answerer.answer(requests)
  finally:
    answerer.close()
  for group in groups:
    _print_group(group, answerer, stream)
  return groups


def _print_group(
  group: types.Group, answerer: answering.Answerer, stream: TextIO
) -> None:
  problem = group.request.problem
  print(f'prompt    {problem.prompt!r}', file=stream)
  print(f'expected  {problem.answer!r}', file=stream)
  for completion, parts in zip(
    group.completions, group.rewards or (), strict=True
  ):
    scores = ', '.join(f'{name} {value:g}' for name, value in parts.items())
    print(
      f'  {completion.text!r}  ({completion.finish_reason}; {scores})',
      file=stream,
    )
    for token, log_prob in zip(
      completion.tokens, completion.log_probs, strict=True
    ):
      text = answerer.task.tokenizer.decode([int(token)])
      print(f'    {int(token):>7} {text!r:<14} {log_prob:8.4f}', file=stream)
  print(file=stream)


def define_flags() -> None:
  """Defines the flags of the command."""
  command.define_config_flag()
  flags.DEFINE_string(
    'workdir', None, 'Run whose newest checkpoint is sampled from.'
  )
  flags.DEFINE_integer('step', None, 'Checkpoint; the newest if unset.')
  flags.DEFINE_integer('problems', 4, 'Problems shown.')
  flags.DEFINE_integer('samples', 1, 'Completions a problem.')
  flags.DEFINE_float('temperature', 0.0, '0 is greedy.')


def main(values: flags.FlagValues) -> None:
  """Runs the command."""
  run(
    values.config,
    values.workdir,
    step=values.step,
    num_problems=values.problems,
    num_samples=values.samples,
    temperature=values.temperature,
  )


if __name__ == '__main__':
  command.run(define_flags, main)

"""Answers requests with one policy in this process: evaluation and samples.

The same generator and reward executors as in training, without the loop.
"""

from collections.abc import Sequence
import pathlib

import jax
import ml_collections
import numpy as np

from llamarl_jax import types
from llamarl_jax.checkpoints import run_policy
from llamarl_jax.controller import builder
from llamarl_jax.controller import checks
from llamarl_jax.controller import problems
from llamarl_jax.controller.launchers import local
from llamarl_jax.executors import generator
from llamarl_jax.executors import policy
from llamarl_jax.executors import reward
from llamarl_jax.rewards import pass_at_k


class Answerer:
  """A policy that answers problems, and their scorer."""

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    checkpoints: pathlib.Path | None = None,
    step: int | None = None,
  ):
    """Loads the policy.

    Args:
      config: as in configs/base.py; model, problems, prompt, reward, generator
        and seed are read.
      checkpoints: folder of a run's checkpoints; None takes the base model.
      step: which checkpoint, None = the newest.

    Raises:
      ValueError: the config or one of its files is at fault.
      FileNotFoundError: a file or checkpoint is missing.
    """
    checks.check_config(config)
    model = problems.load_model(config)
    self.task = problems.make_task(config, model)
    if config.launcher.platform == 'cpu':
      local.simulate_devices(config.generator.num_devices)
    devices = jax.devices()[: config.generator.num_devices]
    self._generator = generator.GeneratorExecutor(
      devices=devices,
      name='generator',
      settings=builder.generator_settings(config, model),
    )
    self.abstract_params = self._generator.abstract_params
    shardings = self._generator.param_shardings
    version = types.Version(0, 0)
    if checkpoints is None:
      params = policy.load(model.source, shardings)
    else:
      params = run_policy.load_merged(
        checkpoints, model.source.model, self.abstract_params, step
      )
    self._generator.adopt(types.VersionedParams(version, params))
    self._reward = reward.RewardExecutor(**problems.reward_arguments(config))

  def answer(self, requests: Sequence[types.Request]) -> list[types.Group]:
    """Returns the requests answered and scored, in their order."""
    groups: list[types.Group] = []
    inputs = requests
    while len(groups) < len(requests):
      report = self._generator.step(inputs, None)
      groups.extend(report.outputs)
      inputs = []
    groups.sort(key=lambda group: group.request.admission_index)
    return list(self._reward.step(groups).outputs)

  def close(self) -> None:
    """Ends the scorer's processes."""
    self._reward.close()
    self._generator.close()


def mean_pass_at_k(groups: Sequence[types.Group], k: int) -> float:
  """Returns the mean over scored groups of pass@k; 0 for no groups."""
  values = []
  for group in groups:
    correct = [parts['correct'] == 1.0 for parts in group.rewards or ()]
    values.append(pass_at_k.pass_at_k(len(correct), sum(correct), k))
  return float(np.mean(values)) if values else 0.0

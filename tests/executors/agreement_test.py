"""The generator's log-probs against the trainer's, on equal parameters."""

import functools

from absl.testing import parameterized
import jax
import numpy as np
import pytest

from configs import smollm2_arithmetic
from llamarl_jax import types
from llamarl_jax.checkpoints import gguf
from llamarl_jax.controller import answering
from llamarl_jax.controller import problems
from llamarl_jax.executors import policy
from llamarl_jax.training import batching
from llamarl_jax.training import step
from tests.oracles import tiny


def _gaps(config, num_prompts, num_samples):
  """Returns |log pi - log mu| of every sampled token."""
  answerer = answering.Answerer(config)
  requests = [
    answerer.task.request(
      types.Stream.TRAIN,
      i,
      num_samples=num_samples,
      temperature=config.generator.temperature,
    )
    for i in range(num_prompts)
  ]
  groups = answerer.answer(requests)
  answerer.close()
  rows = batching.build_trajectories(
    groups,
    np.zeros((num_prompts, num_samples), np.float32),
    row_length=batching.row_length(groups, 8, share_prompts=True),
    pad_token=0,
    share_prompts=True,
  )
  source = problems.load_model(config).source
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  abstract = answerer.abstract_params
  params = policy.load(source, jax.tree.map(lambda _: device, abstract))
  log_probs, _ = jax.jit(
    functools.partial(
      step.policy_log_probs,
      source.model,
      temperature=config.generator.temperature,
      max_completion=num_samples * config.generator.max_new_tokens,
    )
  )(params, rows)
  mask = rows.completion_mask
  return np.abs(np.asarray(log_probs) - rows.behavior_log_probs)[mask]


class AgreementTest(parameterized.TestCase):
  @parameterized.parameters((1, 1, 1), (4, 8, 32), (4, 8, 8))
  def test_tiny_model(self, num_prompts, num_samples, num_slots):
    config = tiny.get_config(
      generator__num_slots=max(num_slots, 8), generator__temperature=0.7
    )
    gaps = _gaps(config, num_prompts, num_samples)
    self.assertNotEmpty(gaps)
    self.assertLess(gaps.max(), 2e-5)

  def test_smollm2_batch_of_one_and_of_32(self):
    try:
      gguf.find_smollm2()
    except FileNotFoundError as error:
      pytest.skip(str(error))
    config = smollm2_arithmetic.get_config()
    config.generator.num_slots = 32
    for num_prompts, num_samples in ((1, 1), (4, 8)):
      gaps = _gaps(config, num_prompts, num_samples)
      self.assertLess(gaps.max(), 1e-4)
      self.assertLess(gaps.mean(), 1e-5)

"""Whole runs whose generator samples from quantized weights."""

import io
import json

from absl.testing import parameterized
import numpy as np
import pytest

from experiments import evaluate
from experiments import train
from llamarl_jax.controller import checks
from tests.oracles import tiny

_WINDOW = 20


def _records(path):
  lines = (path / 'metrics.jsonl').read_text().splitlines()
  return [r for r in map(json.loads, lines) if 'loss' in r]


class QuantizedRunTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _workdir(self, tmp_path):
    self.path = tmp_path

  def test_int8_learns_and_its_gap_is_told_apart(self):
    """Also with adapters, which are merged before they are quantized."""
    # Sums of two numbers up to 3, guessed right by a random policy 1 time in
    # 30. One batch ahead, so that most tokens are stale.
    config = tiny.get_config(
      num_steps=3 * _WINDOW,
      max_staleness=1,
      problems__max_value=3,
      problems__held_out_fraction=0.3,
      trainer__lora_rank=4,
      trainer__lora_alpha=8.0,
      generator__quantization='int8',
    )
    summary = train.run(config, self.path, stream=io.StringIO())
    steps = _records(self.path)
    rewards = [record['reward_mean'] for record in steps]
    self.assertLess(np.mean(rewards[:_WINDOW]), 0.12)
    self.assertGreater(np.mean(rewards[-_WINDOW:]), 0.2)
    self.assertEqual(
      summary['replica_digests'], {'generator_0': summary['parameter_digest']}
    )
    # The first batch is sampled by the policy that is trained: all of its gap
    # is quantization, 100 times that of a float32 generator and small. Later
    # batches are stale, and have no gap of fresh tokens.
    first, second = steps[:2]
    self.assertEqual(first['fresh_fraction'], 1.0)
    self.assertEqual(first['log_prob_gap_fresh'], first['log_prob_gap'])
    self.assertBetween(first['log_prob_gap_fresh'], 1e-4, 2e-2)
    self.assertEqual(second['fresh_fraction'], 0.0)
    self.assertNotIn('log_prob_gap_fresh', second)
    # Trained in float32, the policy of the checkpoint is evaluated as it was
    # sampled from.
    self.assertIn('accuracy', evaluate.run(config, self.path))

  def test_an_unknown_kind_is_refused(self):
    config = tiny.get_config(generator__quantization='int4')
    with self.assertRaisesRegex(ValueError, "quantization='int4'.*int8.*fp8"):
      checks.check_config(config)

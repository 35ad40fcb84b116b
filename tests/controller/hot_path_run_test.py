"""The options of the training hot path, in whole runs of a tiny config."""

import io
import json

from absl.testing import parameterized
import numpy as np
import pytest

from experiments import train
from tests.oracles import tiny


class HotPathTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _workdir(self, tmp_path):
    self.path = tmp_path

  def _steps(self, name, **changes):
    config = tiny.get_config(num_steps=2, **changes)
    summary = train.run(config, self.path / name, stream=io.StringIO())
    self.assertEqual(summary['skipped_steps'], 0)
    lines = (self.path / name / 'metrics.jsonl').read_text().splitlines()
    return [r for r in map(json.loads, lines) if 'staleness_mean' in r]

  def test_packing_and_chunks_change_nothing_but_the_padding(self):
    shared = {'algorithm__kl_coefficient': 0.1, 'supervised__num_steps': 2}
    plain = self._steps('plain', **shared)
    packed = self._steps(
      'packed',
      **shared,
      trainer__pack_tokens=96,
      trainer__pack_rows=2,
      trainer__remat='dots',
      trainer__attention='xla',
      trainer__max_logits_bytes=256,
    )
    for ours, theirs in zip(packed, plain, strict=True):
      # The first update is made on equal weights, and samples of the second
      # batch are then equal too, but for rounding.
      for name in ('loss', 'entropy', 'grad_norm', 'reference_kl'):
        np.testing.assert_allclose(ours[name], theirs[name], atol=2e-5)
      for record in (ours, theirs):
        self.assertBetween(record['real_token_fraction'], 0.5, 1.0)

  def test_bfloat16_on_both_sides(self):
    steps = self._steps('low', trainer__compute_dtype='bfloat16')
    for record in steps:
      # See agreement_test for the bound.
      self.assertLess(record['log_prob_gap'], 0.01)
      self.assertLess(abs(record['effective_sample_size'] - 1), 1e-3)

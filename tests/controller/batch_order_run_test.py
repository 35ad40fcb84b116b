"""Runs in completion order, with long completions and draining."""

import io
import json

from absl.testing import parameterized
import pytest

from experiments import train
from llamarl_jax.checkpoints import run_state
from llamarl_jax.controller import builder
from llamarl_jax.controller import tails
from tests.oracles import interruption
from tests.oracles import tiny


class BatchOrderTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _workdir(self, tmp_path):
    self.path = tmp_path

  def test_orders_agree_bit_for_bit_where_each_update_is_waited_for(self):
    digests = []
    for order, swap in (('admission', 'in_flight'), ('completion', 'drain')):
      config = tiny.get_config(
        num_steps=2, batch_order=order, generator__swap=swap
      )
      summary = train.run(config, self.path / order, stream=io.StringIO())
      digests.append(summary['parameter_digest'])
    self.assertEqual(*digests)

  def test_stragglers_join_later_batches_also_of_a_run_that_was_cut(self):
    config = tiny.get_config(
      num_steps=6,
      max_staleness=1,
      max_token_age=1,
      batch_order='completion',
      # Of a third of the problems, completions are ten times longer.
      generator__tail_share=0.3,
      # All rows are as long as a group can be: one program.
      trainer__length_multiple=336,
      trainer__checkpoint_every=3,
    )
    path = self.path / 'run'
    stream = interruption.FailingStream('step 4/6')
    with pytest.raises(InterruptedError):
      train.run(config, path, stream=stream)
    middle = run_state.load_metadata(path / 'checkpoints', 3)['trained']
    # Some group was overtaken, so that the first 12 are not those trained on.
    self.assertNotEmpty(middle['beyond'])
    self.assertEqual(middle['below'] + len(middle['beyond']), 12)
    summary = train.run(config, path, stream=io.StringIO())
    self.assertEqual(summary['num_steps'], 6)
    self.assertEqual(summary['lost_groups'], 0)
    last = run_state.load_metadata(path / 'checkpoints', 6)['trained']
    self.assertEqual(last, {'below': 24, 'beyond': []})
    lines = (path / 'metrics.jsonl').read_text().splitlines()
    records = [r for r in map(json.loads, lines) if 'loss' in r]
    self._check_lengths(config, records)
    self._check_ages(records)

  def _check_lengths(self, config, records):
    """Lengths are forced as the tail says, and all are trained on."""
    plan = builder.build(config, self.path / 'unused')
    requests = [plan.make_request(i) for i in range(24)]
    forced = [r for r in requests if r.min_new_tokens]
    tail = tails.LongTail(config.seed, 0.3, 40)
    self.assertLen(forced, sum(tail.has(i) for i in range(24)))
    self.assertGreater(len(forced), 2)
    self.assertEqual({r.max_new_tokens for r in forced}, {40})
    self.assertLen(records, 6)
    tokens = sum(r['response_length_mean'] * 32 for r in records)
    least = len(forced) * 8 * 40
    self.assertBetween(tokens, least, least + (24 - len(forced)) * 8 * 4)
    self.assertAlmostEqual(records[-1]['length_ratio'], 1.0)

  def _check_ages(self, records):
    """Tokens that are too old are left out, and no others."""
    oldest = 0
    for record in records:
      ages = {int(a): n for a, n in record['staleness_counts'].items()}
      oldest = max(oldest, *ages)
      share = sum(n for age, n in ages.items() if age > 1) / sum(ages.values())
      self.assertAlmostEqual(record['too_old_fraction'], share)
    self.assertGreater(oldest, 1)

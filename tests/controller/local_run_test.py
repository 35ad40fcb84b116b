"""Whole runs under the local launcher against simpler programs."""

import io
import json

from absl.testing import parameterized
import jax
import numpy as np
import pytest

from experiments import train
from llamarl_jax.controller import builder
from llamarl_jax.controller import problems
from tests.oracles import interruption
from tests.oracles import plain_loop
from tests.oracles import tiny


def _run(config, workdir):
  stream = io.StringIO()
  summary = train.run(config, workdir, stream=stream)
  return summary, stream.getvalue()


def _records(workdir):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


def _first_digest(config, tmp_path):
  """Returns the digest of the parameters before any update."""
  plan = builder.build(config, tmp_path)
  node = plan.program.of_role('trainer')[0]
  executor = node.factory(devices=jax.devices()[:1], **node.arguments)
  try:
    return executor.digest()
  finally:
    executor.close()


class SynchronousTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _workdir(self, tmp_path):
    self.path = tmp_path

  def test_equals_a_plain_loop_bit_for_bit(self):
    config = tiny.get_config()
    summary, _ = _run(config, self.path / 'run')
    plan = builder.build(config, self.path / 'unused')
    expected = plain_loop.run(
      plan.program.of_role('trainer')[0].arguments['settings'],
      plan.program.of_role('generator')[0].arguments['settings'],
      plan.task,
      problems.reward_arguments(config)['reward_fn'],
      config.batch_size,
      config.num_steps,
    )
    self.assertEqual(summary['parameter_digest'], expected[-1])
    # Each step changed something: the equality is not that of standing still.
    first = _first_digest(config, self.path / 'first')
    self.assertLen({first, *expected}, config.num_steps + 1)
    self.assertEqual(summary['staleness_max'], 0)

  def test_zero_learning_rate_changes_no_bit(self):
    config = tiny.get_config(trainer__learning_rate=0.0)
    summary, _ = _run(config, self.path / 'run')
    self.assertEqual(
      summary['parameter_digest'], _first_digest(config, self.path / 'first')
    )
    self.assertEqual(summary['num_steps'], 3)
    self.assertEqual(summary['skipped_steps'], 0)

  def test_sampler_and_trainer_agree_at_staleness_zero(self):
    config = tiny.get_config()
    _run(config, self.path / 'run')
    gaps = [
      r['log_prob_gap'] for r in _records(self.path / 'run') if 'loss' in r
    ]
    self.assertLen(gaps, 3)
    self.assertLess(max(gaps), 2e-5)


class AsynchronousTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _workdir(self, tmp_path):
    self.path = tmp_path

  @parameterized.parameters(1, 2)
  def test_staleness_reaches_its_bound_and_not_more(self, bound):
    config = tiny.get_config(max_staleness=bound, num_steps=5)
    summary, _ = _run(config, self.path / 'run')
    self.assertEqual(summary['staleness_max'], bound)
    self.assertEqual(summary['lost_groups'], 0)
    self.assertEqual(summary['weight_publications'], 6)

  def test_two_runs_of_a_seed_are_equal(self):
    digests = []
    for name in ('a', 'b'):
      summary, _ = _run(tiny.get_config(max_staleness=1), self.path / name)
      digests.append(summary['parameter_digest'])
    self.assertEqual(digests[0], digests[1])

  def test_completions_go_on_under_new_weights(self):
    # Few slots and long completions: groups wait while versions come, so some
    # completions span two of them.
    config = tiny.get_config(
      max_staleness=2,
      num_steps=6,
      generator__num_slots=16,
      generator__segment_length=1,
      generator__num_replicas=2,
      batch_size=2,
      trainer__micro_batch_size=16,
    )
    summary, _ = _run(config, self.path / 'run')
    counts = {}
    for record in _records(self.path / 'run'):
      for staleness, count in record.get('staleness_counts', {}).items():
        counts[staleness] = counts.get(staleness, 0) + count
    self.assertGreater(len(counts), 1)
    self.assertLessEqual(summary['staleness_max'], 2)

  def test_every_loss_and_option_trains(self):
    for i, changes in enumerate(
      (
        {'algorithm__loss': 'decoupled_grpo', 'trainer__num_minibatches': 2},
        {
          'algorithm__loss': 'plain_ppo',
          'algorithm__advantage': 'leave_one_out',
        },
        {
          'algorithm__loss': 'grpo',
          'algorithm__kl_coefficient': 0.1,
          'algorithm__reduction': 'constant',
          'algorithm__normalize_advantage': True,
        },
      )
    ):
      config = tiny.get_config(
        num_steps=2, trainer__micro_batch_size=16, **changes
      )
      summary, _ = _run(config, self.path / str(i))
      records = [r for r in _records(self.path / str(i)) if 'loss' in r]
      self.assertTrue(all(np.isfinite(r['loss']) for r in records))
      self.assertEqual(summary['skipped_steps'], 0)
      if 'algorithm__kl_coefficient' in changes:
        # The reference is the first policy: no divergence yet, then some.
        self.assertLess(abs(records[0]['reference_kl']), 1e-6)
        self.assertGreater(records[1]['reference_kl'], 1e-6)


class ResumeTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _workdir(self, tmp_path):
    self.path = tmp_path

  def test_an_interrupted_run_ends_where_the_whole_one_does(self):
    whole, _ = _run(tiny.get_config(num_steps=4), self.path / 'whole')
    config = tiny.get_config(num_steps=4, trainer__checkpoint_every=2)
    # Stopped in the middle, as by the power going: by an error in the loop.
    stream = interruption.FailingStream('step 3/4')
    with pytest.raises(InterruptedError):
      train.run(config, self.path / 'cut', stream=stream)
    summary, text = _run(config, self.path / 'cut')
    self.assertIn('resumed after step 2', text)
    self.assertEqual(summary['parameter_digest'], whole['parameter_digest'])
    # The accuracy before is that of the first policy, not of the one resumed.
    self.assertEqual(summary['accuracy_before'], whole['accuracy_before'])
    self.assertEqual(summary['accuracy_after'], whole['accuracy_after'])
    self.assertEqual(text.count('evaluation'), 1)
    steps = [r['step'] for r in _records(self.path / 'cut') if 'loss' in r]
    self.assertEqual(steps, [0, 1, 2, 3])

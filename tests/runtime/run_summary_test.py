"""summary.json and the table at the end of a run."""

import json
import pathlib
import platform
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from llamarl_jax import types
from llamarl_jax.runtime import run_summary
from llamarl_jax.runtime import strict_json

Span = types.Span

# The keys that a summary is promised to have.
_REQUIRED = (
  'accuracy_before',
  'accuracy_after',
  'num_steps',
  'wall_seconds',
  'processes',
  'staleness_max',
  'staleness_mean',
  'overlap_fraction',
  'bubble',
  'weight_publications',
  'weight_bytes',
  'tokens_per_second',
  'log_prob_gap_mean',
  'lost_groups',
  'parameter_digest',
  'replica_digests',
  'versions',
  'seed',
  'config_name',
)


def _facts(**changes):
  values = {
    'config_name': 'configs/arithmetic.py',
    'seed': 1,
    'accuracy_before': 0.25,
    'accuracy_after': 0.75,
    'num_steps': 4,
    'wall_seconds': 61.0,
    'training_start': 100.0,
    'training_stop': 120.0,
    'num_tokens': 5000,
    'processes': [run_summary.Process('trainer/0', 11, 2)],
    'weight_publications': 4,
    'weight_bytes': 43_200_000_000,
    'lost_groups': 0,
    'parameter_digest': 'abc',
    'replica_digests': {'generator_0': 'abc'},
  }
  return run_summary.RunFacts(**{**values, **changes})


_RECORDS = [
  {'step': 0, 'eval_accuracy': 0.25},
  {
    'step': 1,
    'reward_mean': 0.1,
    'staleness_mean': 0.0,
    'staleness_max': 0,
    'staleness_counts': {'0': 30},
    'log_prob_gap': 0.01,
    'step_skipped': 0,
  },
  {
    'step': 2,
    'reward_mean': 0.3,
    'staleness_mean': 1.0,
    'staleness_max': 1,
    'staleness_counts': {'1': 10},
    'log_prob_gap': 0.03,
    'step_skipped': 1,
  },
  {'step': 3, 'reward_mean': 0.5, 'log_prob_gap': 'NaN'},
  {'step': 4, 'reward_mean': 0.9},
]

_TRACKS = {
  'trainer/0': [
    Span('train_step', 104, 108),
    Span('train_step', 110, 120),
  ],
  'generator/0': [
    Span('segment', 80, 90),  # An evaluation, before training.
    Span('segment', 100, 105),
    Span('fetch', 100, 120),
  ],
}


class SummaryTest(parameterized.TestCase):
  def test_numbers(self):
    summary = run_summary.build_summary(_facts(), _RECORDS, _TRACKS)
    for key in _REQUIRED:
      self.assertIn(key, summary)
    self.assertEqual(summary['staleness_max'], 1)
    # Over tokens: 10 of 40 have staleness 1.
    self.assertEqual(summary['staleness_mean'], 0.25)
    # The first of the two train steps shares [104, 105] with a segment.
    self.assertEqual(summary['overlap_fraction'], 0.5)
    # In [100, 120] the trainer works 14 s and the generator 5 s; fetching in
    # the background is not work.
    self.assertAlmostEqual(summary['bubble']['trainer/0'], 6 / 20)
    self.assertAlmostEqual(summary['bubble']['generator/0'], 15 / 20)
    self.assertEqual(summary['tokens_per_second'], 5000 / 20)
    self.assertAlmostEqual(summary['log_prob_gap_mean'], 0.02)
    self.assertEqual(summary['skipped_steps'], 1)
    self.assertEqual(
      summary['processes'], [{'name': 'trainer/0', 'pid': 11, 'num_devices': 2}]
    )
    versions = summary['versions']
    self.assertEqual(versions['python'], platform.python_version())
    self.assertContainsSubset(('jax', 'flax', 'ray'), versions)
    # What was built is what is read back.
    self.assertEqual(json.loads(strict_json.dumps(summary)), summary)

  def test_a_run_of_no_steps(self):
    facts = _facts(
      num_steps=0, accuracy_after=None, training_stop=100.0, num_tokens=0
    )
    summary = run_summary.build_summary(facts, [], {})
    self.assertContainsSubset(_REQUIRED, summary)
    self.assertIsNone(summary['staleness_max'])
    self.assertIsNone(summary['log_prob_gap_mean'])
    self.assertEqual(summary['tokens_per_second'], 0.0)

  def test_staleness_without_counts(self):
    records = [
      {'step': 1, 'staleness_mean': 0.5, 'staleness_max': 1},
      {'step': 2, 'staleness_mean': 1.0, 'staleness_max': 2},
    ]
    summary = run_summary.build_summary(_facts(), records, {})
    self.assertEqual(summary['staleness_mean'], 0.75)
    self.assertEqual(summary['staleness_max'], 2)


class TableTest(parameterized.TestCase):
  def test_first_against_last_steps(self):
    summary = run_summary.build_summary(_facts(), _RECORDS, _TRACKS)
    rows = run_summary.before_after_rows(summary, _RECORDS)
    # Two of the four steps on each side: means of (0.1, 0.3) and (0.5, 0.9).
    self.assertEqual(
      rows,
      [
        ('held-out accuracy, greedy', '0.250', '0.750'),
        ('mean reward', '0.200', '0.700'),
      ],
    )

  @parameterized.parameters((0, 1), (1, 1), (4, 2), (11, 5), (300, 5))
  def test_compared_steps(self, num_steps, expected):
    self.assertEqual(run_summary.compared_steps(num_steps), expected)

  def test_final_table(self):
    summary = run_summary.build_summary(_facts(), _RECORDS, _TRACKS)
    with tempfile.TemporaryDirectory() as folder:
      pathlib.Path(folder, 'report.html').write_text('')
      pathlib.Path(folder, 'checkpoints').mkdir()
      text = run_summary.final_table(summary, _RECORDS, folder)
      self.assertIn(folder, text)
    for line in (
      'held-out accuracy, greedy      0.250      0.750',
      'first and last 2 train steps',
      'steps      4 in 1:01, 250 tokens/s',
      'staleness  mean 0.25, max 1',
      'overlap    50% of the train steps',
      'bubble     trainer/0 30%, generator/0 75%',
      'weights    4 publications, 43.2 GB',
      '  report.html ',
      '  checkpoints ',
    ):
      self.assertIn(line, text)
    # What does not exist is not promised.
    self.assertNotIn('timeline.json', text)

  def test_final_table_of_nothing(self):
    text = run_summary.final_table({}, [], '/nowhere')
    self.assertIn('held-out accuracy, greedy          -          -', text)

  @parameterized.parameters(
    (0, '0 B'),
    (999, '999 B'),
    (999.7, '1 kB'),
    (538_060_032, '538 MB'),
    (4.3e13, '43 TB'),
    (None, '-'),
  )
  def test_form_bytes(self, size, expected):
    self.assertEqual(run_summary.form_bytes(size), expected)


if __name__ == '__main__':
  absltest.main()

"""What the terminal shows of a run."""

import io

from absl.testing import absltest
from absl.testing import parameterized

from llamarl_jax.runtime import progress

_METRICS = {
  'reward_mean': 0.53125,
  'accuracy': 0.5,
  'staleness_mean': 0.984,
  'staleness_max': 1,
  'tokens_per_second': 1234.4,
  'bubble_generator': 0.12,
  'bubble_trainer': 0.034,
}


class LineTest(parameterized.TestCase):
  def test_content(self):
    line = progress.progress_line(7, 40, _METRICS, 201.0)
    self.assertEqual(
      line,
      'step  7/40  reward  0.531  accuracy 0.500  stale 0.98/1'
      '   1234 tok/s  bubble generator  12% trainer   3%  left 3:21',
    )

  def test_columns_stay_aligned(self):
    other = {
      'reward_mean': -1.25,
      'accuracy': 1.0,
      'staleness_mean': 0.0,
      'staleness_max': 0,
      'tokens_per_second': 80.0,
      'bubble_generator': 1.0,
      'bubble_trainer': 0.0,
    }
    lines = [
      progress.progress_line(7, 100, _METRICS, 60.0),
      progress.progress_line(100, 100, other, 0.0),
      progress.progress_line(8, 100, dict.fromkeys(_METRICS), 6.0),
    ]
    self.assertLen({len(line) for line in lines}, 1)
    for word in ('reward', 'accuracy', 'stale', 'tok/s', 'trainer', 'left'):
      self.assertLen({line.index(word) for line in lines}, 1, word)

  @parameterized.parameters(0, 1, 2, 3, 5, 20)
  def test_width(self, num_executors):
    metrics = dict(_METRICS, tokens_per_second=1234567.0)
    metrics |= {f'bubble_executor{i}': 1.0 for i in range(num_executors)}
    line = progress.progress_line(9999, 9999, metrics, 360000.0)
    self.assertLessEqual(len(line), 120)
    self.assertEndsWith(line, 'left 100:00:00')

  def test_missing_and_unknown(self):
    line = progress.progress_line(1, 9, {'reward_mean': float('nan')}, None)
    self.assertIn('reward    nan', line)
    self.assertIn('accuracy     -', line)
    self.assertNotIn('bubble', line)
    self.assertEndsWith(line, 'left -')


class ProgressTest(parameterized.TestCase):
  def _warnings(self, steps, **options):
    stream = io.StringIO()
    shown = progress.Progress(stream, 100, **options)
    for number, metrics in enumerate(steps, start=1):
      shown.step(number, metrics, None)
    lines = stream.getvalue().splitlines()
    result = []
    for line in lines:
      if line.startswith('step'):
        step = int(line.split('/')[0].split()[-1])
      else:
        result.append((step, line))
    self.assertLen(lines, len(steps) + len(result))
    return result

  def test_one_line_a_step(self):
    self.assertEmpty(self._warnings([_METRICS] * 3))

  def test_truncation(self):
    cut = {'truncated_completions': 0.97}
    # At once, then every ten steps while it lasts.
    found = self._warnings([{'truncated_completions': 0.5}] + [cut] * 12)
    self.assertEqual([step for step, _ in found], [2, 12])
    self.assertStartsWith(found[0][1], 'WARNING: 97% of the completions')
    self.assertEmpty(self._warnings([cut] * 3, lengths_expected=True))

  def test_zero_advantage(self):
    equal = {'zero_advantage_fraction': 0.95}
    # Not before five steps in a row, and a good one starts the count again.
    self.assertEmpty(
      self._warnings([equal] * 4 + [{'zero_advantage_fraction': 0.9}] + [equal])
    )
    found = self._warnings([equal] * 6)
    self.assertEqual([step for step, _ in found], [5])
    self.assertIn('95% of the groups had equal rewards', found[0][1])

  def test_every_skipped_step_is_named(self):
    found = self._warnings(
      [{'step_skipped': 1}, {'step_skipped': 0}, {'step_skipped': 1.0}]
    )
    self.assertEqual([step for step, _ in found], [1, 3])
    self.assertIn('step 3 was skipped', found[1][1])

  def test_evaluation(self):
    stream = io.StringIO()
    progress.Progress(stream, 3).evaluation('before training', 0.21875, 12.0)
    self.assertEqual(
      stream.getvalue(),
      'evaluation before training: accuracy 0.219 (took 0:12)\n',
    )


if __name__ == '__main__':
  absltest.main()

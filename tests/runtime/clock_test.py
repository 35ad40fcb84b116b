"""Clocks and the estimate of the time left."""

import time

from absl.testing import absltest
from absl.testing import parameterized

from llamarl_jax.runtime import clock


class ClockTest(parameterized.TestCase):
  def test_system_clock_is_wall_time(self):
    before = time.time()
    now = clock.SystemClock().now()
    self.assertBetween(now, before, time.time())

  def test_manual_clock(self):
    manual = clock.ManualClock(100.0)
    self.assertEqual(manual.now(), 100.0)
    manual.advance(2.5)
    self.assertEqual(manual.now(), 102.5)
    with self.assertRaisesRegex(ValueError, 'cannot go back'):
      manual.advance(-1.0)

  @parameterized.parameters(
    (None, '-'),
    (0.4, '0:00'),
    (7.0, '0:07'),
    (723.0, '12:03'),
    (3599.6, '1:00:00'),
    (3723.0, '1:02:03'),
    (-3.0, '0:00'),
  )
  def test_format_seconds(self, seconds, expected):
    self.assertEqual(clock.format_seconds(seconds), expected)


class TimeLeftTest(parameterized.TestCase):
  def test_compilation_of_the_first_step_does_not_count(self):
    left = clock.TimeLeft(num_steps=10)
    self.assertIsNone(left.seconds())
    left.record(1, 1000.0)  # However long it took until here.
    self.assertIsNone(left.seconds())
    left.record(2, 1003.0)
    self.assertEqual(left.seconds(), 8 * 3.0)
    left.record(3, 1008.0)
    self.assertEqual(left.seconds(), 7 * 4.0)  # 8 s over two steps.

  def test_only_recent_steps_count(self):
    left = clock.TimeLeft(num_steps=100, window=2)
    for step, end in enumerate([0.0, 50.0, 100.0, 101.0, 102.0], start=1):
      left.record(step, end)
    self.assertEqual(left.seconds(), 95 * 1.0)

  def test_resumed_run(self):
    left = clock.TimeLeft(num_steps=20)
    left.record(16, 5.0)
    left.record(18, 9.0)
    self.assertEqual(left.seconds(), 2 * 2.0)
    left.record(20, 13.0)
    self.assertEqual(left.seconds(), 0.0)

  def test_needs_a_window(self):
    with self.assertRaisesRegex(ValueError, 'window = 0'):
      clock.TimeLeft(10, window=0)


if __name__ == '__main__':
  absltest.main()

"""The simulator against the formula, and against its own invariants."""

import dataclasses
import pathlib
import tempfile

from absl.testing import parameterized

from llamarl_jax.runtime import metrics as metrics_lib
from llamarl_jax.runtime import timeline as timeline_lib
from llamarl_jax.scheduling import timeline_records
from llamarl_jax.theory import lengths
from llamarl_jax.theory import schedule
from llamarl_jax.theory import simulator

# Without randomness: 64 steps of 10 ms generate a batch in one wave.
EVEN = simulator.Settings(
  num_steps=24,
  batch_size=8,
  group_size=4,
  lengths=lengths.Lengths(64, 0.0, 64),
  num_replicas=2,
  num_slots=16,
  segment_length=8,
  max_staleness=0,
  decode_seconds=lambda active: 0.01,
  train_seconds=lambda tokens: 0.4,
)
SKEWED = dataclasses.replace(
  EVEN, lengths=lengths.Lengths(64, 1.0, 512), num_steps=30, batch_size=16
)


class FormulaTest(parameterized.TestCase):
  @parameterized.product(
    staleness=(0, 1, 2, 3),
    train=(0.2, 0.64, 1.1),
    delay=(0.0, 0.3, 1.5),
  )
  def test_equals_the_formula(self, staleness, train, delay):
    settings = dataclasses.replace(
      EVEN,
      max_staleness=staleness,
      train_seconds=lambda tokens: train,
      # One publication at a time: it takes less than a step.
      reward_seconds=0.8 * delay,
      publish_seconds=0.2 * delay,
      segment_length=64,
      num_steps=48,
    )
    run = simulator.simulate(settings)
    expected = schedule.step_seconds(
      train, 0.64, delay, max_staleness=staleness
    )
    # Steps come in rounds of k + 1; whole rounds are averaged.
    found = run.step_seconds(24)
    self.assertLess(abs(found / expected - 1), 1e-3)
    # The window may cut a step of either side: 20 of them are in it. At the
    # end there is nothing left to generate.
    for track, busy in (('trainer', train), ('generator/0', 0.64)):
      self.assertAlmostEqual(
        run.bubble(track, 24, drain=4), 1 - busy / expected, delta=0.03
      )

  def test_shared_devices_take_turns(self):
    settings = dataclasses.replace(
      EVEN, colocated=True, swap_seconds=0.1, reward_seconds=0.05
    )
    run = simulator.simulate(settings)
    # Generate, score, hand over, train, hand over.
    self.assertAlmostEqual(run.step_seconds(2), 0.64 + 0.05 + 0.4 + 0.2)
    spans = [
      span
      for track in ('trainer', 'generator/0')
      for span in run.tracks[track]
      if span.name in ('segment', 'train_step', 'swap')
    ]
    total = sum(span.stop - span.start for span in spans)
    self.assertAlmostEqual(timeline_records.busy_seconds(spans, 0, 1e9), total)


class InvariantsTest(parameterized.TestCase):
  @parameterized.product(
    staleness=(0, 1, 3), order=(simulator.ADMISSION, simulator.COMPLETION)
  )
  def test_every_group_is_trained_on_once(self, staleness, order):
    settings = dataclasses.replace(
      SKEWED, max_staleness=staleness, batch_order=order
    )
    run = simulator.simulate(settings)
    self.assertLen(run.records, 30)
    scored = [span for span in run.tracks['reward'] if span.name == 'score']
    trained = [s for s in run.tracks['trainer'] if s.name == 'train_step']
    self.assertLen(trained, 30)
    self.assertGreaterEqual(len(scored), 30 * 16)
    if order == simulator.ADMISSION:
      oldest = max(record['staleness_max'] for record in run.records)
      self.assertLessEqual(oldest, staleness)
      tokens = sum(
        sum(record['staleness_counts'].values()) for record in run.records
      )
      # The lengths of a group depend on nothing but its index.
      base = simulator.simulate(dataclasses.replace(SKEWED, num_replicas=1))
      self.assertEqual(
        tokens,
        sum(sum(r['staleness_counts'].values()) for r in base.records),
      )

  def test_equal_settings_give_equal_runs(self):
    settings = dataclasses.replace(
      SKEWED, reward_seconds=0.5, reward_sigma=1.0, failure_seconds=20.0
    )
    self.assertEqual(simulator.simulate(settings), simulator.simulate(settings))

  def test_lost_groups_are_sampled_again(self):
    settings = dataclasses.replace(
      SKEWED, max_staleness=1, failure_seconds=5.0, repair_seconds=1.0
    )
    run = simulator.simulate(settings)
    self.assertLen(run.records, 30)
    self.assertGreater(run.num_lost_groups, 0)
    whole = simulator.simulate(dataclasses.replace(SKEWED, max_staleness=1))
    self.assertGreater(run.step_seconds(), whole.step_seconds())
    self.assertEqual(whole.num_lost_groups, 0)

  def test_stragglers_hold_up_admission_order_only(self):
    """Many slots, so that only waiting for the longest can cost."""
    settings = dataclasses.replace(SKEWED, num_slots=64, num_steps=40)
    times = {}
    for order in (simulator.ADMISSION, simulator.COMPLETION):
      run = simulator.simulate(
        dataclasses.replace(settings, max_staleness=1, batch_order=order)
      )
      times[order] = run.step_seconds(10)
    sync = simulator.simulate(settings).step_seconds(10)
    self.assertLess(times[simulator.ADMISSION], 0.8 * sync)
    self.assertLess(
      times[simulator.COMPLETION], 0.8 * times[simulator.ADMISSION]
    )

  def test_impossible_settings_are_refused(self):
    with self.assertRaisesRegex(ValueError, 'batch_order'):
      dataclasses.replace(EVEN, batch_order='random')
    with self.assertRaisesRegex(ValueError, 'num_slots is 0'):
      dataclasses.replace(EVEN, num_slots=0)


class FormatTest(parameterized.TestCase):
  def test_files_are_those_of_a_run(self):
    run = simulator.simulate(dataclasses.replace(SKEWED, max_staleness=1))
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder)
      timeline = timeline_lib.Timeline(0.0, run.tracks)
      timeline.write(path / 'timeline.json')
      _, tracks = timeline_lib.read_timeline(path / 'timeline.json')
      writer = metrics_lib.JsonlWriter(path / 'metrics.jsonl', run_start=0.0)
      for step, record in enumerate(run.records):
        writer.write(step, record)
      writer.close()
      self.assertLen((path / 'metrics.jsonl').read_text().splitlines(), 30)
    self.assertEqual(set(tracks), set(run.tracks))
    spans = [span for track in tracks.values() for span in track]
    self.assertGreater(timeline_records.overlap_fraction(spans, spans), 0.8)

"""Facts read off a timeline, against counts on a fine grid of time."""

import itertools

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from llamarl_jax import types
from llamarl_jax.scheduling import timeline_records

Span = types.Span


def _covered(spans, start, stop, num_cells):
  """The share of a window's cells that some span covers: no unions at all."""
  middles = start + (np.arange(num_cells) + 0.5) * (stop - start) / num_cells
  inside = np.zeros(num_cells, bool)
  for span in spans:
    inside |= (middles >= span.start) & (middles < span.stop)
  return inside.mean()


def _random_spans(rng, num_spans, names=('segment',)):
  """Spans with whole-number ends, so that a grid of halves is exact."""
  starts = rng.integers(0, 90, num_spans)
  lengths = rng.integers(0, 9, num_spans)
  return [
    Span(names[rng.integers(len(names))], float(a), float(a + n))
    for a, n in zip(starts, lengths, strict=True)
  ]


class OverlapTest(parameterized.TestCase):
  @parameterized.parameters(
    # Steps at [0, 2], [4, 6], [8, 10].
    ([(1, 5)], 2 / 3),
    ([(0, 10)], 1.0),
    ([(2, 4), (6, 8)], 0.0),  # Taking turns: ends touch, nothing is shared.
    ([(2, 4.5)], 1 / 3),
    ([(9, 9.5)], 1 / 3),
    ([(5, 5)], 0.0),  # Shares no positive time.
    ([(8.5, 9), (0.5, 1), (0, 0.2)], 2 / 3),  # Two in one step count once.
    ([], 0.0),
  )
  def test_by_hand(self, decoding, expected):
    train = [Span('train_step', s, s + 2) for s in (0.0, 4.0, 8.0)]
    segments = [Span('segment', a, b) for a, b in decoding]
    self.assertAlmostEqual(
      timeline_records.overlap_fraction(train, segments), expected, places=12
    )

  def test_against_every_pair(self):
    rng = np.random.default_rng(0)
    for _ in range(50):
      train = _random_spans(rng, 12, ('train_step',))
      segments = _random_spans(rng, 10)
      shared = [
        any(min(a.stop, b.stop) > max(a.start, b.start) for b in segments)
        for a in train
      ]
      self.assertAlmostEqual(
        timeline_records.overlap_fraction(train, segments),
        np.mean(shared),
        places=12,
      )

  def test_other_names_do_not_count(self):
    train = [Span('train_step', 0, 2), Span('publish', 2, 4)]
    generator = [Span('fetch', 0, 2), Span('segment', 2, 4)]
    self.assertEqual(timeline_records.overlap_fraction(train, generator), 0.0)

  def test_without_train_steps(self):
    segments = [Span('segment', 0, 2)]
    self.assertEqual(timeline_records.overlap_fraction([], segments), 0.0)


class BubbleTest(parameterized.TestCase):
  @parameterized.parameters(
    ([], 1.0),
    ([(0, 10)], 0.0),
    ([(-5, 20)], 0.0),  # Only what lies within the window counts.
    ([(2, 4), (3, 5)], 0.7),  # Overlapping spans count once.
    ([(2, 4), (2, 4)], 0.8),
    ([(9, 14)], 0.9),
    ([(11, 14)], 1.0),
  )
  def test_by_hand(self, busy, expected):
    spans = [Span('segment', a, b) for a, b in busy]
    self.assertAlmostEqual(
      timeline_records.bubble_fraction(spans, 0.0, 10.0), expected, places=12
    )

  def test_against_a_grid(self):
    rng = np.random.default_rng(1)
    for _ in range(50):
      spans = _random_spans(rng, 15)
      self.assertAlmostEqual(
        timeline_records.bubble_fraction(spans, 10.0, 80.0),
        1 - _covered(spans, 10.0, 80.0, 140),
        places=12,
      )

  def test_idle_names(self):
    spans = [Span('segment', 0, 4), Span('fetch', 3, 9)]
    idle = timeline_records.IDLE_NAMES
    self.assertAlmostEqual(
      timeline_records.bubble_fraction(spans, 0, 10, idle_names=idle), 0.6
    )

  def test_empty_window_has_no_bubble(self):
    self.assertEqual(timeline_records.bubble_fraction([], 5.0, 5.0), 0.0)


class LanesTest(parameterized.TestCase):
  def test_background_goes_to_its_own_lane(self):
    segments = [Span('segment', t, t + 2) for t in (0.0, 2.0, 4.0)]
    fetches = [Span('fetch', 1, 3), Span('fetch', 7, 8)]
    # The second fetch would fit beside the segments, but stays with the first.
    self.assertEqual(
      timeline_records.lanes([*fetches, *segments]), [segments, fetches]
    )

  def test_names_that_take_turns_share_a_lane(self):
    spans = [Span('a', 0, 2), Span('b', 2, 3), Span('a', 3, 5)]
    self.assertEqual(timeline_records.lanes(spans), [spans])

  def test_random_tracks(self):
    rng = np.random.default_rng(2)
    for _ in range(50):
      spans = _random_spans(rng, 20, ('segment', 'fetch', 'score'))
      lanes = timeline_records.lanes(spans)
      for lane in lanes:
        for before, after in itertools.pairwise(lane):
          self.assertLessEqual(before.stop, after.start)
      ends = [(s.start, s.stop, s.name) for lane in lanes for s in lane]
      self.assertCountEqual(ends, [(s.start, s.stop, s.name) for s in spans])

  def test_empty(self):
    self.assertEqual(timeline_records.lanes([]), [])


class StalenessTest(parameterized.TestCase):
  def test_count_staleness(self):
    counts = timeline_records.count_staleness(
      np.array([[3, 3, 4], [5, 5, 5]]), 5
    )
    self.assertEqual(counts, {0: 3, 1: 1, 2: 2})
    # (3 * 0 + 1 * 1 + 2 * 2) / 6
    self.assertAlmostEqual(timeline_records.staleness_mean(counts), 5 / 6)
    self.assertEqual(timeline_records.staleness_max(counts), 2)

  def test_newer_than_the_trainer_is_an_error(self):
    with self.assertRaisesRegex(ValueError, 'version 6 is newer'):
      timeline_records.count_staleness(np.array([4, 6]), 5)

  def test_merge_counts_reads_json_keys(self):
    merged = timeline_records.merge_counts([{'1': 2, '10': 1}, {1: 3, 0: 4}])
    self.assertEqual(merged, {0: 4, 1: 5, 10: 1})

  def test_nothing(self):
    counts = timeline_records.count_staleness(np.zeros(0, np.int32), 5)
    self.assertEqual(counts, {})
    self.assertEqual(timeline_records.staleness_mean(counts), 0.0)
    self.assertEqual(timeline_records.staleness_max({3: 0}), 0)


class TracksTest(absltest.TestCase):
  def test_spans_named(self):
    tracks = {
      'trainer': [Span('train_step', 4, 5), Span('publish', 5, 6)],
      'other': [Span('train_step', 1, 2)],
    }
    starts = [
      span.start for span in timeline_records.spans_named(tracks, 'train_step')
    ]
    self.assertEqual(starts, [1, 4])


if __name__ == '__main__':
  absltest.main()

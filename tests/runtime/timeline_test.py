"""The structure of timeline.json, as Perfetto requires it."""

import itertools
import json
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from llamarl_jax import types
from llamarl_jax.runtime import timeline

_START = 1.7e9
Span = types.Span


class TimelineTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.path = pathlib.Path(folder.name) / 'timeline.json'

  def _write(self, tracks, run_start=_START):
    run = timeline.Timeline(run_start)
    for name, spans in tracks.items():
      run.add(name, spans)
    run.write(self.path)
    return json.loads(self.path.read_text())

  def test_structure(self):
    trace = self._write(
      {
        'trainer/0': [
          Span('train_step', _START + 1, _START + 3.5, {'step': 1}),
          Span('publish', _START + 3.5, _START + 4),
        ],
        'generator/0': [],
      }
    )
    events = trace['traceEvents']
    names = {
      event['tid']: event['args']['name']
      for event in events
      if event['name'] == 'thread_name'
    }
    # An executor that did nothing has its track too.
    self.assertCountEqual(names.values(), ['trainer/0', 'generator/0'])
    complete = [event for event in events if event['ph'] == 'X']
    shown = [
      (names[e['tid']], e['name'], e['ts'], e['dur'], e['args'])
      for e in complete
    ]
    self.assertEqual(
      shown,
      [
        ('trainer/0', 'train_step', 1e6, 2.5e6, {'step': 1}),
        ('trainer/0', 'publish', 3.5e6, 0.5e6, {}),
      ],
    )
    # Perfetto takes a file for a trace of this format by these keys.
    self.assertEqual({event['ph'] for event in events}, {'M', 'X'})
    self.assertEqual({event['pid'] for event in events}, {1})

  def test_overlap_goes_to_a_sub_track(self):
    segments = [
      Span('segment', _START + t, _START + t + 0.1) for t in (0.1, 0.2, 0.3)
    ]
    fetch = Span('fetch', _START + 0.15, _START + 0.27)
    trace = self._write({'generator/0': [fetch, *segments]})
    events = trace['traceEvents']
    names = {
      event['tid']: event['args']['name']
      for event in events
      if event['name'] == 'thread_name'
    }
    where = {
      (event['name'], names[event['tid']])
      for event in events
      if event['ph'] == 'X'
    }
    self.assertEqual(
      where, {('segment', 'generator/0'), ('fetch', 'generator/0 (2)')}
    )
    for thread in names:
      spans = [e for e in events if e['ph'] == 'X' and e['tid'] == thread]
      for before, after in itertools.pairwise(spans):
        # In whole nanoseconds, as Perfetto counts: touching is not crossing.
        end = round(1000 * before['ts']) + round(1000 * before['dur'])
        self.assertLessEqual(end, round(1000 * after['ts']))

  def test_round_trip(self):
    tracks = {
      'trainer/0': [Span('train_step', _START + 2, _START + 3, {'step': 1})],
      'generator/0': [
        Span('segment', _START + 1, _START + 4),
        Span('fetch', _START + 2, _START + 3),
      ],
      'reward/0': [],
    }
    self._write(tracks)
    run_start, read = timeline.read_timeline(self.path)
    self.assertEqual(run_start, _START)
    self.assertEqual(list(read), list(tracks))
    for name, spans in tracks.items():
      for span, again in zip(spans, read[name], strict=True):
        self.assertEqual((span.name, span.details), (again.name, again.details))
        # Doubles since the epoch are 2.4e-7 s apart.
        self.assertAlmostEqual(span.start, again.start, delta=1e-6)
        self.assertAlmostEqual(span.stop, again.stop, delta=1e-6)
    resumed = timeline.Timeline(run_start, read)
    resumed.add('reward/0', [Span('score', _START + 5, _START + 6)])
    self.assertLen(resumed.tracks['reward/0'], 1)

  def test_no_time_is_negative(self):
    trace = self._write(
      {
        'generator/0': [
          Span('segment', _START - 2, _START - 1),  # Its host's clock is off.
          Span('segment', _START + 3, _START + 2.5),  # Its clock was set back.
        ]
      }
    )
    times = [
      (event['ts'], event['dur'])
      for event in trace['traceEvents']
      if event['ph'] == 'X'
    ]
    self.assertEqual(times, [(0, 1e6), (5e6, 0)])
    self.assertEqual(timeline.read_timeline(self.path)[0], _START)

  @parameterized.parameters('', '{}', '[]', '{"traceEvents": []}')
  def test_another_file_is_refused(self, text):
    self.path.write_text(text)
    with self.assertRaisesRegex(ValueError, 'timeline.json is not a timeline'):
      timeline.read_timeline(self.path)


if __name__ == '__main__':
  absltest.main()

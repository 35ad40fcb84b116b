"""What the writers leave on disk, read back without them."""

import json
import pathlib
import struct
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
from tensorboardX.proto import event_pb2

from llamarl_jax.runtime import clock
from llamarl_jax.runtime import metrics


def _refuse(word):
  raise AssertionError(f'{word} is not JSON')


def _read_strictly(path):
  return [
    json.loads(line, parse_constant=_refuse)
    for line in path.read_text().splitlines()
  ]


def _read_events(folder):
  """Events of all files, by the framing of TFRecord files.

  u64 length, u32 checksum of it, the data, u32 checksum of the data:
  https://www.tensorflow.org/tutorials/load_data/tfrecord
  """
  events = []
  for path in sorted(folder.iterdir()):
    data = path.read_bytes()
    while data:
      (length,) = struct.unpack('<Q', data[:8])
      events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
      data = data[16 + length :]
  return events


class _FolderTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)
    self.path = self.folder / 'metrics.jsonl'


class JsonlWriterTest(_FolderTestCase):
  def test_lines(self):
    now = clock.ManualClock(1000.0)
    writer = metrics.JsonlWriter(self.path, clock=now)
    now.advance(2.5)
    writer.write(1, {'loss': np.float32(0.5), 'staleness_counts': {0: 3, 1: 4}})
    # Flushed at once: there before the file is closed.
    self.assertLen(_read_strictly(self.path), 1)
    writer.write(2, {'loss': float('nan'), 'kl': -np.inf, 'time': 7.0})
    writer.close()
    writer.close()
    self.assertEqual(
      _read_strictly(self.path),
      [
        {
          'step': 1,
          'time': 2.5,
          'loss': 0.5,
          'staleness_counts': {'0': 3, '1': 4},
        },
        {'step': 2, 'time': 7.0, 'loss': 'NaN', 'kl': '-Infinity'},
      ],
    )

  @parameterized.parameters(
    ('', [0, 1, 2]),
    ('{"step": 5, "lo', [0, 1, 2]),  # Killed while writing.
    ('{"step": 2}', [0, 1, 2, 2]),  # Whole, but for the end of its line.
    ('\n\n', [0, 1, 2]),
  )
  def test_resume(self, tail, expected):
    lines = [json.dumps({'step': step}) for step in range(3)]
    self.path.write_text('\n'.join(lines) + '\n' + tail)
    with_all = metrics.JsonlWriter(self.path, resume_step=10)
    with_all.close()
    steps = [record['step'] for record in _read_strictly(self.path)]
    self.assertEqual(steps, expected)

    writer = metrics.JsonlWriter(self.path, resume_step=2)
    writer.write(2, {'again': True})
    writer.close()
    records = _read_strictly(self.path)
    self.assertEqual([record['step'] for record in records], [0, 1, 2])
    self.assertTrue(records[-1]['again'])

  def test_a_new_run_begins_anew(self):
    self.path.write_text('{"step": 0}\n')
    metrics.JsonlWriter(self.path).close()
    self.assertEqual(self.path.read_text(), '')

  @parameterized.parameters('nonsense', '[1]', '{"loss": 1}')
  def test_a_damaged_line_is_named(self, line):
    self.path.write_text('{"step": 0}\n' + line + '\n{"step": 2}\n')
    with self.assertRaisesRegex(ValueError, r'metrics.jsonl, line 2'):
      metrics.read_records(self.path)


class TensorBoardWriterTest(_FolderTestCase):
  def test_events(self):
    writer = metrics.TensorBoardWriter(self.folder, resume_step=3)
    writer.write(
      3,
      {
        'loss': 0.25,
        'text': 'left out',
        'nothing': None,
        'staleness_counts': {'0': 2, '2': 6},
      },
    )
    writer.write(4, {'loss': float('nan'), 'staleness_counts': {}})
    writer.close()
    events = _read_events(self.folder)
    values = {
      (event.step, value.tag): value
      for event in events
      for value in event.summary.value
    }
    self.assertCountEqual(
      values, [(3, 'loss'), (3, 'staleness_counts'), (4, 'loss')]
    )
    self.assertEqual(values[3, 'loss'].simple_value, 0.25)
    self.assertTrue(np.isnan(values[4, 'loss'].simple_value))
    histogram = values[3, 'staleness_counts'].histo
    self.assertEqual((histogram.num, histogram.sum), (8, 12))
    self.assertEqual(histogram.sum_squares, 24)
    # The count of 2 lies in (1.5, 2.5], that of 0 in (-0.5, 0.5].
    counts = dict(zip(histogram.bucket_limit, histogram.bucket, strict=True))
    self.assertEqual(counts, {-0.5: 0, 0.5: 2, 1.5: 0, 2.5: 6})
    # TensorBoard drops what an earlier life wrote from this step on.
    starts = [event.step for event in events if event.session_log.status == 1]
    self.assertEqual(starts, [3])


class MultiWriterTest(parameterized.TestCase):
  def test_writes_to_each_and_closes_each(self):
    class Recorder:
      def __init__(self, fails):
        self.fails, self.calls = fails, []

      def write(self, step, values):
        self.calls.append((step, dict(values)))

      def close(self):
        self.calls.append('close')
        if self.fails:
          raise OSError('disk full')

    recorders = [Recorder(True), Recorder(False), Recorder(True)]
    writer = metrics.MultiWriter([*recorders, metrics.NullMetricsWriter()])
    writer.write(1, {'loss': 2.0})
    with self.assertRaisesRegex(OSError, 'disk full'):
      writer.close()
    for recorder in recorders:
      self.assertEqual(recorder.calls, [(1, {'loss': 2.0}), 'close'])


if __name__ == '__main__':
  absltest.main()

"""The report: complete, self-contained, and inert whatever it is shown."""

import html.parser
import math
import pathlib
import re
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from llamarl_jax import types
from llamarl_jax.runtime import report
from llamarl_jax.runtime import report_plots
from llamarl_jax.runtime import report_style
from llamarl_jax.runtime import report_timeline

Span = types.Span

_SECTIONS = (
  'results',
  'learning',
  'off-policy',
  'agreement',
  'responses',
  'optimization',
  'timeline',
  'bubbles',
  'speed',
  'completions',
  'processes',
  'configuration',
)

_HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(2)> & $\\frac$'


def _record(step, **changes):
  record = {
    'step': step,
    'time': float(step),
    'reward_mean': 0.1 * step,
    'reward_answer': 0.1,
    'reward_$format': 0.2,
    'accuracy': 0.05 * step,
    'staleness_counts': {'0': 3, '1': 17},
    'importance_ratio': 1.0,
    'truncated_fraction': 0.0,
    'truncated_completions': 0.25,
    'zero_advantage_fraction': 0.0,
    'response_length_mean': 5.0,
    'loss': -0.1,
    'grad_norm': 1.0,
    'entropy': 0.5,
    'log_prob_gap': 1e-3,
    'effective_sample_size': 0.9,
    'tokens_per_second': 100.0,
    'train_seconds': 1.0,
    'bubble_trainer': 0.1,
    'bubble_generator': None,
  }
  return {**record, **changes}


def _tracks(num_steps):
  steps = [
    Span('train_step', 100 + 2 * k, 101.5 + 2 * k, {'step': k + 1})
    for k in range(num_steps)
  ]
  segments = [Span('segment', 99 + k, 99.9 + k) for k in range(2 * num_steps)]
  fetches = [Span('fetch', 101.5 + 2 * k, 102.2 + 2 * k) for k in range(3)]
  return {
    'trainer/0': steps,
    'generator/0': segments + fetches,
    'reward/$0_': [Span('custom_name', 100, 100)],
  }


class _Reader(html.parser.HTMLParser):
  """Collects what a browser would make of a page."""

  def __init__(self):
    super().__init__()
    self.tags, self.attributes, self.ids, self.text = [], [], [], []

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += [(tag, name, value) for name, value in attrs]
    if tag == 'section':
      self.ids += [value for name, value in attrs if name == 'id']

  def handle_data(self, data):
    self.text.append(data)


class ReportTest(parameterized.TestCase):
  def _write(self, **changes):
    arguments = {
      'records': [],
      'summary': {},
      'tracks': {},
      'samples': [],
      'config': {},
    }
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / 'report.html'
      report.write_report(path, **{**arguments, **changes})
      text = path.read_text(encoding='utf-8')
    reader = _Reader()
    reader.feed(text)
    return text, reader

  def test_whole_report_with_hostile_texts(self):
    records = [
      {'step': 0, 'eval_accuracy': 0.25},
      *[_record(step) for step in range(1, 4)],
      _record(4, loss=math.nan, grad_norm='Infinity', entropy=None),
    ]
    summary = {
      'config_name': _HOSTILE,
      'accuracy_before': 0.25,
      'accuracy_after': 0.75,
      'num_steps': 4,
      'bubble': {'trainer/0': 0.25, _HOSTILE: 0.5, 'x': None},
      'processes': [{'name': _HOSTILE, 'pid': 7, 'num_devices': 2}],
      'versions': {'jax': '1.2.3'},
    }
    samples = [
      {
        'question': _HOSTILE,
        'expected': '3',
        'completion_before': _HOSTILE,
        'completion_after': 'x' * 5000,
        'correct_before': False,
        'correct_after': True,
      }
    ]
    text, reader = self._write(
      records=records,
      summary=summary,
      tracks={**_tracks(4), _HOSTILE: [Span(_HOSTILE, 100, 102)]},
      samples=samples,
      config={'seed': 3, 'trainer': {'optimizer': {'b1': 0.9}}, 'x': _HOSTILE},
    )
    self.assertEqual(tuple(reader.ids), _SECTIONS)
    self.assertEqual(reader.tags.count('svg'), 8)
    # Nothing of the texts has become an element, and all of it can be read.
    self.assertNoCommonElements(reader.tags, ('script', 'img', 'iframe'))
    self.assertIn(_HOSTILE, reader.text)
    self.assertNotIn('x' * 2000, text)
    self.assertIn('optimizer.b1', reader.text)
    self.assertIn('✓', reader.text)
    self.assertIn('✗', reader.text)
    # The bubble of a share that is not known is not drawn as 0 %.
    self.assertIn('25 % idle', reader.text)
    self.assertNotIn('0 % idle', reader.text)

    self._assert_loads_nothing(text, reader)

  def _assert_loads_nothing(self, text, reader):
    for tag, name, value in reader.attributes:
      if name in ('src', 'href', 'xlink:href', 'action', 'data'):
        self.assertStartsWith(value, '#', (tag, name))
      self.assertFalse(name.startswith('on'), (tag, name))
    self.assertNotRegex(text, r'url\((?!#)|@import')

  @parameterized.parameters(0, 1)
  def test_short_runs(self, num_steps):
    _, reader = self._write(
      records=[_record(step + 1) for step in range(num_steps)],
      summary={'accuracy_before': 0.5, 'num_steps': num_steps},
      tracks=_tracks(num_steps) if num_steps else {'trainer/0': []},
    )
    self.assertEqual(tuple(reader.ids), _SECTIONS)
    if not num_steps:
      # 19 panels in all; only accuracy has its one evaluation.
      self.assertEqual(reader.text.count('no data'), 18)


class PlotsTest(parameterized.TestCase):
  def test_equal_runs_give_equal_figures(self):
    svgs = {report_plots.agreement([_record(1)]) for _ in range(2)}
    self.assertLen(svgs, 1)

  def test_points_leave_out_what_is_not_finite(self):
    records = [
      {'step': 1, 'loss': 0.5},
      {'step': 2, 'loss': 'NaN'},
      {'step': 3, 'loss': None},
      {'step': 4},
      {'step': 5, 'loss': 2},
    ]
    self.assertEqual(
      report_style.points(records, 'loss'), ([1.0, 5.0], [0.5, 2.0])
    )

  def test_running_mean(self):
    # By hand: (1+2)/2, (1+2+6)/3, (2+6+7)/3, (6+7)/2.
    self.assertEqual(
      report_style.running_mean([1, 2, 6, 7], 3), [1.5, 3.0, 5.0, 6.5]
    )

  @parameterized.parameters(
    (
      [],
      {'accuracy_before': 0.2, 'accuracy_after': 0.5, 'num_steps': 9},
      ([0.0, 9.0], [0.2, 0.5]),
    ),
    (
      [{'step': 0, 'eval_accuracy': 0.2}, {'step': 5, 'eval_accuracy': 0.4}],
      {'accuracy_before': 0.2, 'accuracy_after': 0.5, 'num_steps': 9},
      ([0.0, 5.0, 9.0], [0.2, 0.4, 0.5]),
    ),
    (
      [{'step': 9, 'eval_accuracy': 0.5}],
      {'accuracy_after': 0.5, 'num_steps': 9},
      ([9.0], [0.5]),
    ),
    ([], {}, ([], [])),
  )
  def test_evaluations(self, records, summary, expected):
    self.assertEqual(report_plots.evaluations(records, summary), expected)


class TimelineTest(parameterized.TestCase):
  def test_close_up_is_in_the_middle(self):
    tracks = {'t': [Span('train_step', k, k + 0.5) for k in range(20)]}
    # Four steps, 8 to 11: from 8 to 11.5, and 4 % on both sides.
    start, stop = report_timeline.close_up(tracks)
    self.assertAlmostEqual(start, 8 - 0.14)
    self.assertAlmostEqual(stop, 11.5 + 0.14)
    self.assertIsNone(report_timeline.close_up({'t': []}))

  def test_long_runs_stay_small(self):
    segments = [Span('segment', k, k + 0.999) for k in range(8000)]
    svg = report_timeline.timeline({'generator/0': segments}, 0.0)
    self.assertLess(len(svg), 60_000)
    # As one bar, since no gap between them could be seen.
    self.assertEqual(
      report_timeline.join_close(segments, 0.01), [(0, 7999.999)]
    )

  def test_every_kind_of_span_has_its_own_color(self):
    colors = [color for color, _ in report_timeline._KINDS.values()]
    self.assertLen(set(colors), len(colors))
    for color in colors:
      self.assertTrue(re.fullmatch('#[0-9A-Fa-f]{6}', color), color)


if __name__ == '__main__':
  absltest.main()

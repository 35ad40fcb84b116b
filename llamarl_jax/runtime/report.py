"""Builds report.html: a run on one page that needs nothing but a browser.

It reads only what a run leaves in its workdir, so that a report can be built
again at any time.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import os
from typing import Any

from llamarl_jax import types
from llamarl_jax.runtime import clock
from llamarl_jax.runtime import report_page as page
from llamarl_jax.runtime import report_plots
from llamarl_jax.runtime import report_timeline
from llamarl_jax.runtime import run_summary
from llamarl_jax.runtime import strict_json

# Longer texts are cut in the table of completions, not in the files.
_MAX_CHARACTERS = 1200
_MAX_SAMPLES = 24


def write_report(
  path: str | os.PathLike[str],
  *,
  records: list[dict[str, Any]],
  summary: dict[str, Any],
  tracks: dict[str, list[types.Span]],
  samples: list[dict[str, Any]],
  config: dict[str, Any],
  run_start: float | None = None,
) -> None:
  """Writes the report, whole or not at all.

  Args:
    path: of the page.
    records: of metrics.jsonl; any metric may be missing, None or not finite.
    summary: of summary.json; keys may be missing, as in a run that was cut.
    tracks: of timeline.json.
    samples: held-out problems answered before and after: question, expected,
      completion_before, completion_after, correct_before, correct_after.
    config: of config.json, nested.
    run_start: seconds since the epoch at which the timeline is 0; the first
      span's start if None.
  """
  starts = [span.start for spans in tracks.values() for span in spans]
  if run_start is None:
    run_start = min(starts, default=0.0)
  records = [strict_json.plain(record) for record in records]
  name = str(summary.get('config_name') or 'run')
  title = f'Reinforcement learning of a Llama policy: {name}'
  body = [
    f'<h1>{page.escape(title)}</h1>',
    f'<p class="lead">{page.escape(_lead(summary))}</p>',
    _tiles(summary),
    _results(summary, records),
    _figures(records, summary, tracks, run_start),
    _samples(samples),
    _processes(summary),
    page.section(
      'configuration', 'Configuration', page.settings(_groups(config))
    ),
  ]
  strict_json.write_text(path, page.page(title, body))


def flatten(
  settings: Mapping[str, Any], prefix: str = ''
) -> list[tuple[str, str]]:
  """Returns nested settings as ('a.b.c', value) texts, in their order."""
  items: list[tuple[str, str]] = []
  for key, value in settings.items():
    if isinstance(value, Mapping) and value:
      items.extend(flatten(value, f'{prefix}{key}.'))
    else:
      items.append((f'{prefix}{key}', _setting(value)))
  return items


def _setting(value: Any) -> str:
  """Returns a setting as text."""
  if isinstance(value, str):
    return value or "''"
  return strict_json.dumps(value)


def _groups(
  config: Mapping[str, Any],
) -> list[tuple[str, list[tuple[str, str]]]]:
  """Returns the settings by the section of the config they are in."""
  general = {k: v for k, v in config.items() if not isinstance(v, Mapping)}
  groups = [('general', flatten(general))] if general else []
  for key, value in config.items():
    if isinstance(value, Mapping):
      groups.append((str(key), flatten(value)))
  return groups


def _lead(summary: Mapping[str, Any]) -> str:
  """Returns the line below the title."""
  versions = summary.get('versions') or {}
  parts = [
    f'{package} {versions[package]}'
    for package in ('python', 'jax', 'flax', 'ray')
    if package in versions
  ]
  if summary.get('seed') is not None:
    parts.insert(0, f'seed {summary["seed"]}')
  return ' · '.join(parts)


def _tiles(summary: Mapping[str, Any]) -> str:
  """Returns the numbers to be seen first."""
  form = run_summary.form
  before = form(summary.get('accuracy_before'), '.3f')
  after = form(summary.get('accuracy_after'), '.3f')
  seconds = strict_json.number(summary.get('wall_seconds'))
  steps = form(summary.get('num_steps'), '.0f')
  return page.tiles(
    [
      (f'{before} → {after}', 'held-out accuracy'),
      (f'{steps} in {clock.format_seconds(seconds)}', 'train steps, wall time'),
      (form(summary.get('tokens_per_second'), ',.0f'), 'tokens a second'),
      (
        f'{form(summary.get("staleness_mean"), ".2f")} '
        f'(max {form(summary.get("staleness_max"), ".0f")})',
        'mean staleness of a token',
      ),
      (
        form(summary.get('overlap_fraction'), '.0%'),
        'train steps during decoding',
      ),
    ]
  )


def _results(
  summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
) -> str:
  """Returns the tables of outcome and run."""
  form = run_summary.form
  count = run_summary.compared_steps(
    len(run_summary.column(records, 'reward_mean'))
  )
  outcome = page.table(
    ('', 'before', 'after'),
    [
      tuple(page.escape(cell) for cell in row)
      for row in run_summary.before_after_rows(summary, records)
    ],
    'numbers',
  )
  facts = [
    (
      'weight publications',
      form(summary.get('weight_publications'), '.0f'),
    ),
    (
      'weights moved',
      run_summary.form_bytes(summary.get('weight_bytes')),
    ),
    (
      'mean log-prob gap [nats]',
      form(summary.get('log_prob_gap_mean'), '.2e'),
    ),
    ('steps skipped', form(summary.get('skipped_steps'), '.0f')),
    ('groups lost', form(summary.get('lost_groups'), '.0f')),
    ('parameter digest', str(summary.get('parameter_digest') or '-')[:24]),
  ]
  run = page.table(
    ('', 'run'),
    [tuple(page.escape(cell) for cell in row) for row in facts],
    'numbers',
  )
  note = (
    '<p class="none">The first row is greedy decoding of held-out problems; '
    f'the others are means over the first and last {count} train steps.</p>'
  )
  return page.section(
    'results',
    'Before and after',
    f'<div class="columns"><div>{outcome}{note}</div><div>{run}</div></div>',
  )


def _figures(
  records: list[dict[str, Any]],
  summary: Mapping[str, Any],
  tracks: Mapping[str, Sequence[types.Span]],
  run_start: float,
) -> str:
  """Returns all figures, each in its section."""
  shown = (
    (
      ('learning', 'Learning', report_plots.learning(records, summary)),
      'Reward and accuracy.',
      '(a) Mean reward of the trained completions. (b) Share of right answers '
      'among them, and on held-out problems under greedy decoding. In all '
      'figures of longer runs, thin lines are single steps and thick lines '
      'their running mean.',
    ),
    (
      ('off-policy', 'Off-policy data', report_plots.off_policy(records)),
      'Staleness and its correction.',
      '(a) Trained tokens by how many versions older than the trained policy '
      'the policy was that sampled them. (b) Mean importance ratio of the '
      'trained policy π to the sampling policy μ. (c) Share of tokens '
      'whose ratio was truncated.',
    ),
    (
      ('agreement', 'Agreement', report_plots.agreement(records)),
      'Sampler and trainer.',
      '(a) Mean absolute difference of the log-probabilities that trainer and '
      'sampler give a token; it includes the change of the policy over the '
      'staleness. (b) Effective sample size of the importance weights.',
    ),
    (
      ('responses', 'Responses', report_plots.completions(records)),
      'Length and information of the completions.',
      '(a) Mean length. (b) Share that reached the token limit. (c) Share of '
      'groups whose completions all earned the same, which teach nothing.',
    ),
    (
      ('optimization', 'Optimization', report_plots.optimization(records)),
      'The update.',
      'Loss, gradient norm before clipping, and entropy of the policy.',
    ),
    (
      ('timeline', 'Timeline', report_timeline.timeline(tracks, run_start)),
      'What each executor did.',
      'One row a process; what ran in the background of a row is drawn below '
      'it. (a) The whole run. (b) Train steps from its middle, numbered.',
    ),
    (
      ('bubbles', 'Bubbles', report_timeline.bubbles(summary)),
      'Idle time of each executor,',
      'from the first admission to the last train step.',
    ),
    (
      ('speed', 'Speed', report_plots.speed(records)),
      'Speed by train step.',
      '(a) Completion tokens a second. (b) Seconds of work in a step. (c) '
      'Share of that time in which an executor was starved or blocked.',
    ),
  )
  return '\n'.join(
    page.section(name, title, page.figure(svg, number, heading, caption))
    for number, ((name, title, svg), heading, caption) in enumerate(shown, 1)
  )


def _samples(samples: Sequence[Mapping[str, Any]]) -> str:
  """Returns the table of completions before and after."""
  if not samples:
    content = '<p class="none">No completions were kept.</p>'
    return page.section('completions', 'Completions', content)
  rows = [
    (
      _text(sample.get('question')),
      _text(sample.get('expected')),
      _answer(sample, 'before'),
      _answer(sample, 'after'),
    )
    for sample in samples[:_MAX_SAMPLES]
  ]
  header = ('question', 'expected', 'before training', 'after training')
  return page.section(
    'completions', 'Completions', page.table(header, rows, 'samples')
  )


def _answer(sample: Mapping[str, Any], when: str) -> str:
  """Returns a completion with a mark of right or wrong."""
  correct = sample.get(f'correct_{when}')
  mark = ''
  if correct is not None:
    kind, sign = ('right', '✓') if correct else ('wrong', '✗')
    mark = f'<span class="{kind}" title="{kind}">{sign}</span>'
  text = _text(sample.get(f'completion_{when}'))
  return f'<div class="answer">{mark}{text}</div>'


def _text(value: Any) -> str:
  """Returns text from outside, escaped and cut to a readable length."""
  if value is None:
    return '-'
  text = str(value)
  if len(text) > _MAX_CHARACTERS:
    text = f'{text[:_MAX_CHARACTERS]} … ({len(text)} characters)'
  return f'<pre>{page.escape(text)}</pre>'


def _processes(summary: Mapping[str, Any]) -> str:
  """Returns the table of processes."""
  rows = [
    tuple(
      page.escape(process.get(key, '-'))
      for key in ('name', 'pid', 'num_devices')
    )
    for process in summary.get('processes') or ()
  ]
  return page.section(
    'processes',
    'Processes',
    '<div class="columns">',
    page.table(('process', 'pid', 'devices'), rows, 'numbers'),
    '</div>',
  )

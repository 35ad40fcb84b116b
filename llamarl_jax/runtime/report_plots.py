"""The report's figures of metrics against the train step.

Each function takes the records of metrics.jsonl and returns SVG text. A metric
that a run did not record leaves its panel empty, and says so.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from llamarl_jax.runtime import report_style as style
from llamarl_jax.runtime import strict_json
from llamarl_jax.scheduling import timeline_records

Records = Sequence[dict[str, Any]]

_STEP = 'train step'


def learning(records: Records, summary: Mapping[str, Any]) -> str:
  """Returns reward (with its parts) and accuracy against the step."""
  with style.settings('learning'):
    figure = style.new_figure(3.1)
    reward, accuracy = figure.subplots(1, 2)
    drawn = style.draw_line(reward, records, 'reward_mean', 'total', style.BLUE)
    for part, color in zip(
      _reward_parts(records), style.CYCLE[1:], strict=False
    ):
      drawn |= style.draw_line(reward, records, f'reward_{part}', part, color)
    style.finish(
      reward, '(a) Reward', _STEP, 'mean over completions', has_data=drawn
    )
    drawn = style.draw_line(
      accuracy, records, 'accuracy', 'samples of the batch', style.SKY
    )
    steps, values = evaluations(records, summary)
    if steps:
      drawn = True
      accuracy.plot(
        steps,
        values,
        'D--',
        color=style.VERMILION,
        label='held out, greedy',
        markersize=6,
        linewidth=1.0,
      )
      for step, value in {steps[0]: values[0], steps[-1]: values[-1]}.items():
        accuracy.annotate(
          f'{value:.2f}',
          (step, value),
          xytext=(0, 7),
          textcoords='offset points',
          ha='center',
          color=style.VERMILION,
          fontsize=9,
        )
      accuracy.margins(x=0.07, y=0.15)
    style.finish(
      accuracy,
      '(b) Accuracy',
      _STEP,
      'share of right answers',
      has_data=drawn,
      floor=0.0,
    )
    return style.to_svg(figure)


def off_policy(records: Records) -> str:
  """Returns staleness histogram, importance ratio and truncated fraction."""
  with style.settings('off_policy'):
    figure = style.new_figure(2.9)
    histogram, ratio, truncated = figure.subplots(1, 3)
    counts = timeline_records.merge_counts(
      record.get('staleness_counts') or {} for record in records
    )
    total = sum(counts.values())
    if total:
      shares = [100 * count / total for count in counts.values()]
      bars = histogram.bar(list(counts), shares, color=style.BLUE, width=0.75)
      histogram.bar_label(
        bars, [f'{share:.1f}' for share in shares], fontsize=8.5, padding=1
      )
      histogram.xaxis.get_major_locator().set_params(integer=True)
      histogram.margins(y=0.12)
      histogram.set_xlim(min(counts) - 0.8, max(counts) + 0.8)
    style.finish(
      histogram,
      '(a) Staleness',
      'versions behind the trainer',
      'trained tokens [%]',
      has_data=bool(total),
      floor=0.0,
    )
    drawn = style.draw_line(
      ratio, records, 'importance_ratio', 'π / μ', style.BLUE
    )
    if drawn:
      ratio.axhline(1.0, color=style.GRAY, linewidth=0.9, linestyle=':')
    style.finish(
      ratio,
      '(b) Importance ratio',
      _STEP,
      'mean of π / μ',
      has_data=drawn,
      legend=False,
    )
    drawn = style.draw_line(
      truncated,
      records,
      'truncated_fraction',
      'above the bound',
      style.VERMILION,
      scale=100,
    )
    style.finish(
      truncated,
      '(c) Truncated ratios',
      _STEP,
      'tokens above the bound [%]',
      has_data=drawn,
      floor=0.0,
      legend=False,
    )
    return style.to_svg(figure)


def completions(records: Records) -> str:
  """Returns response length, cut-off completions and idle groups."""
  with style.settings('completions'):
    figure = style.new_figure(2.9)
    length, cut, equal = figure.subplots(1, 3)
    panels = (
      (length, 'response_length_mean', 1, style.BLUE),
      (cut, 'truncated_completions', 100, style.VERMILION),
      (equal, 'zero_advantage_fraction', 100, style.PURPLE),
    )
    labels = (
      ('(a) Response length', 'mean [tokens]'),
      ('(b) Cut off at the token limit', 'completions [%]'),
      ('(c) Groups with equal rewards', 'groups [%]'),
    )
    for (axes, key, scale, color), (title, unit) in zip(
      panels, labels, strict=True
    ):
      drawn = style.draw_line(axes, records, key, key, color, scale=scale)
      style.finish(
        axes, title, _STEP, unit, has_data=drawn, floor=0.0, legend=False
      )
    return style.to_svg(figure)


def optimization(records: Records) -> str:
  """Returns loss, gradient norm and entropy; and KL where it was measured."""
  panels = [
    ('loss', 'Loss', 'per completion token', style.BLUE, None),
    ('grad_norm', 'Gradient norm', 'before clipping', style.VERMILION, 0.0),
    ('entropy', 'Entropy', 'nats a token', style.GREEN, 0.0),
  ]
  if style.points(records, 'kl_reference')[0]:
    panels.append(
      ('kl_reference', 'KL to reference', 'nats a token', style.PURPLE, None)
    )
  return _row('optimization', records, panels)


def agreement(records: Records) -> str:
  """Returns how far sampler and trainer differ, and what that leaves."""
  return _row(
    'agreement',
    records,
    [
      (
        'log_prob_gap',
        'Log-prob gap',
        'mean |log π / μ| [nats]',
        style.BLUE,
        0.0,
      ),
      (
        'effective_sample_size',
        'Effective sample size',
        'share of tokens',
        style.GREEN,
        0.0,
      ),
    ],
  )


def speed(records: Records) -> str:
  """Returns throughput, the seconds of a step, and bubbles, by step."""
  with style.settings('speed'):
    figure = style.new_figure(2.9)
    tokens, seconds, bubble = figure.subplots(1, 3)
    drawn = style.draw_line(
      tokens, records, 'tokens_per_second', 'tokens/s', style.BLUE
    )
    style.finish(
      tokens,
      '(a) Throughput',
      _STEP,
      'completion tokens a second',
      has_data=drawn,
      floor=0.0,
      legend=False,
    )
    drawn = False
    for key, label, color in (
      ('generate_seconds', 'generate', style.SKY),
      ('train_seconds', 'train', style.VERMILION),
      ('publish_seconds', 'publish', style.ORANGE),
    ):
      drawn |= style.draw_line(seconds, records, key, label, color)
    style.finish(
      seconds,
      '(b) Work a step',
      _STEP,
      'seconds',
      has_data=drawn,
      floor=0.0,
    )
    drawn = False
    names = _names(records, 'bubble_')
    for name, color in zip(names, style.CYCLE, strict=False):
      drawn |= style.draw_line(
        bubble, records, f'bubble_{name}', name, color, scale=100
      )
    style.finish(
      bubble,
      '(c) Bubbles',
      _STEP,
      "idle share of the step's time [%]",
      has_data=drawn,
      floor=0.0,
    )
    return style.to_svg(figure)


def evaluations(
  records: Records, summary: Mapping[str, Any]
) -> tuple[list[float], list[float]]:
  """Returns (steps, accuracies) of the evaluations.

  Args:
    records: of metrics.jsonl; those with an eval_accuracy count.
    summary: gives the ends where the records do not have them.
  """
  steps, values = style.points(records, 'eval_accuracy')
  found = dict(zip(steps, values, strict=True))
  before = strict_json.number(summary.get('accuracy_before'))
  after = strict_json.number(summary.get('accuracy_after'))
  last = strict_json.number(summary.get('num_steps')) or 0.0
  if not found and before is not None:
    found[0.0] = before
  if after is not None and (not found or max(found) < last):
    found[last] = after
  steps = sorted(found)
  return steps, [found[step] for step in steps]


def _row(
  name: str,
  records: Records,
  panels: Sequence[tuple[str, str, str, str, float | None]],
) -> str:
  """Returns panels of one line each: (key, title, unit, color, floor)."""
  with style.settings(name):
    figure = style.new_figure(2.9)
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for letter, axes, (key, title, unit, color, floor) in zip(
      'abcd', row, panels, strict=False
    ):
      drawn = style.draw_line(axes, records, key, key, color)
      style.finish(
        axes,
        f'({letter}) {title}',
        _STEP,
        unit,
        has_data=drawn,
        floor=floor,
        legend=False,
      )
    return style.to_svg(figure)


def _names(records: Records, prefix: str) -> list[str]:
  """Returns what follows a prefix in the keys, in order of appearance."""
  found = {
    key.removeprefix(prefix): None
    for record in records
    for key in record
    if key.startswith(prefix)
  }
  return list(found)


def _reward_parts(records: Records) -> list[str]:
  """Returns the named parts of the reward; one alone is the total again."""
  parts = [
    part for part in _names(records, 'reward_') if part not in ('mean', 'total')
  ]
  return parts if len(parts) > 1 else []

"""The report's figures of the timeline: what ran when, and who was idle."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from llamarl_jax import types
from llamarl_jax.runtime import report_style as style
from llamarl_jax.runtime import strict_json
from llamarl_jax.scheduling import timeline_records

Tracks = Mapping[str, Sequence[types.Span]]

_KINDS = {
  'segment': (style.SKY, 'decode segment'),
  'prefill': (style.BLUE, 'prefill'),
  'train_step': (style.VERMILION, 'train step'),
  'publish': (style.ORANGE, 'publish weights'),
  'fetch': (style.PURPLE, 'fetch weights'),
  'commit': (style.BLACK, 'commit weights'),
  'score': (style.GREEN, 'score'),
  'wait': ('#E8E8E8', 'wait'),
}
# For spans with names of their own, in the order they are met.
_OTHER_COLORS = ('#44AA99', '#999933', '#882255', '#6699CC', '#AA4499', '#777')

# Train steps shown in the close-up.
_NUM_CLOSE = 4
# Parts of a row's width: what is closer than one of them is drawn as one bar,
# or a run of hours would make a page of many megabytes.
_RESOLUTION = 2000
_MAX_APART = 200
# Share of the width from which a bar has room for its number.
_LABEL_SHARE = 0.035


def timeline(tracks: Tracks, run_start: float) -> str:
  """Returns the whole run above a close-up of a few steady train steps.

  Args:
    tracks: executor process -> spans.
    run_start: seconds since the epoch that the axes count from.
  """
  tracks = {name: spans for name, spans in tracks.items() if spans}
  rows = max(1, len(tracks))
  with style.settings('timeline'):
    figure = style.new_figure(2 * (0.9 + 0.34 * rows) + 0.5)
    whole, close = figure.subplots(2, 1)
    figure.get_layout_engine().set(hspace=0.09)
    if not tracks:
      style.finish(whole, '(a) Whole run', '', '', has_data=False)
      style.finish(close, '(b) Close-up', '', '', has_data=False)
      return style.to_svg(figure)
    colors = _colors(tracks)
    window = (
      min(span.start for spans in tracks.values() for span in spans),
      max(span.stop for spans in tracks.values() for span in spans),
    )
    _draw(whole, tracks, window, run_start, colors)
    _finish_rows(whole, '(a) Whole run')
    near = close_up(tracks) or window
    _draw(close, tracks, near, run_start, colors, numbered=True)
    _finish_rows(close, '(b) Close-up of steady train steps')
    _add_legend(figure, colors)
    return style.to_svg(figure)


def close_up(tracks: Tracks) -> tuple[float, float] | None:
  """Returns a window on a few train steps in the middle of a run.

  The middle is past compilation and before the queues drain. None without a
  train step.
  """
  steps = timeline_records.spans_named(tracks, 'train_step')
  if not steps:
    return None
  first = max(0, (len(steps) - _NUM_CLOSE) // 2)
  shown = steps[first : first + _NUM_CLOSE]
  start, stop = shown[0].start, shown[-1].stop
  margin = 0.04 * (stop - start) or 0.5
  return start - margin, stop + margin


def bubbles(summary: Mapping[str, Any]) -> str:
  """Returns the busy and idle share of each executor, as bars."""
  shares = {
    name: strict_json.number(value)
    for name, value in (summary.get('bubble') or {}).items()
  }
  known = {name: value for name, value in shares.items() if value is not None}
  with style.settings('bubbles'):
    figure = style.new_figure(0.9 + 0.34 * max(1, len(known)))
    axes = figure.subplots()
    rows = range(len(known))
    idle = [100 * value for value in known.values()]
    busy = [100 - value for value in idle]
    axes.barh(rows, busy, color=style.BLUE, height=0.62, label='busy')
    axes.barh(
      rows, idle, left=busy, color='#D9D9D9', height=0.62, label='bubble'
    )
    for row, value in zip(rows, idle, strict=True):
      axes.text(101, row, f'{value:.0f} % idle', va='center', fontsize=9)
    style.finish(
      axes, '', 'share of the training time [%]', '', has_data=bool(known)
    )
    if known:
      axes.set_yticks(list(rows), list(known))
      axes.set_xlim(0, 100)
      axes.set_ylim(len(known) - 0.5, -0.5)
      axes.grid(visible=False, axis='y')
      axes.legend(
        loc='lower left', bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0.2
      )
    return style.to_svg(figure)


def join_close(
  spans: Sequence[types.Span], gap: float
) -> list[tuple[float, float]]:
  """Returns sorted spans as intervals, those closer than a gap made one.

  Args:
    spans: of one name and lane, sorted by start.
    gap: seconds that cannot be seen.
  """
  joined: list[tuple[float, float]] = []
  for span in spans:
    if joined and span.start - joined[-1][1] < gap:
      joined[-1] = (joined[-1][0], max(joined[-1][1], span.stop))
    else:
      joined.append((span.start, span.stop))
  return joined


def _draw(
  axes: Any,
  tracks: Tracks,
  window: tuple[float, float],
  run_start: float,
  colors: Mapping[str, str],
  *,
  numbered: bool = False,
) -> None:
  """Draws one row an executor, its lanes above one another within it."""
  start, stop = window
  length = max(stop - start, 1e-6)
  for row, spans in enumerate(tracks.values()):
    row_lanes = timeline_records.lanes(spans)
    height = 0.74 / len(row_lanes)
    for index, lane in enumerate(row_lanes):
      seen = [s for s in lane if s.stop >= start and s.start <= stop]
      top = row - 0.37 + index * height
      for name in dict.fromkeys(span.name for span in seen):
        group = [span for span in seen if span.name == name]
        # A few bars stay apart, so that a close-up shows each segment.
        gap = 0.0 if len(group) <= _MAX_APART else length / _RESOLUTION
        bars = join_close(group, gap)
        axes.broken_barh(
          [(left - run_start, right - left) for left, right in bars],
          (top, height * 0.94),
          facecolors=colors[name],
          # A hairline tells neighbors apart where there is room for it.
          edgecolors='white' if numbered else 'none',
          linewidth=0.5 if numbered else 0,
        )
      if numbered:
        _number(axes, seen, window, run_start, top + height * 0.47)
  axes.set_xlim(start - run_start, start + length - run_start)
  axes.set_ylim(len(tracks) - 0.5, -0.5)
  axes.set_yticks(range(len(tracks)), list(tracks))


def _number(
  axes: Any,
  spans: Sequence[types.Span],
  window: tuple[float, float],
  run_start: float,
  middle: float,
) -> None:
  """Writes the step into train steps that have room for it."""
  start, stop = window
  for span in spans:
    step = span.details.get('step', span.details.get('version'))
    wide = span.stop - span.start > _LABEL_SHARE * (stop - start)
    inside = start <= span.start and span.stop <= stop
    if span.name == 'train_step' and step is not None and wide and inside:
      axes.text(
        (span.start + span.stop) / 2 - run_start,
        middle,
        str(step),
        ha='center',
        va='center',
        color='white',
        fontsize=8.5,
      )


def _finish_rows(axes: Any, title: str) -> None:
  """Gives a timeline its title and its axis."""
  axes.set_title(title)
  axes.set_xlabel('time since the start of the run [s]')
  axes.grid(visible=False, axis='y')
  axes.spines['left'].set_visible(False)
  axes.tick_params(axis='y', length=0)


def _colors(tracks: Tracks) -> dict[str, str]:
  """Returns a color for each name of a span."""
  names = dict.fromkeys(
    span.name for spans in tracks.values() for span in spans
  )
  known = {name: _KINDS[name][0] for name in _KINDS if name in names}
  others = [name for name in names if name not in _KINDS]
  for index, name in enumerate(others):
    known[name] = _OTHER_COLORS[index % len(_OTHER_COLORS)]
  return known


def _add_legend(figure: Any, colors: Mapping[str, str]) -> None:
  """Adds one legend for both timelines."""
  from matplotlib import patches

  handles = [
    patches.Patch(
      color=color,
      label=_KINDS[name][1] if name in _KINDS else name.replace('_', ' '),
    )
    for name, color in colors.items()
  ]
  figure.legend(
    handles=handles, loc='outside lower center', ncols=min(8, len(handles))
  )

"""Collects what each executor did when, and writes it for Perfetto.

The file is in the Chrome trace event format: open it at ui.perfetto.dev.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import json
import os
import pathlib
from typing import Any

from llamarl_jax import types
from llamarl_jax.runtime import strict_json
from llamarl_jax.scheduling import timeline_records

_PROCESS_ID = 1


class Timeline:
  """The spans of a run, by the name of the executor process."""

  def __init__(
    self,
    run_start: float,
    tracks: timeline_records.Tracks | None = None,
  ):
    """Starts empty, or from what was recorded before a resume.

    Args:
      run_start: seconds since the epoch at which the timeline is 0.
      tracks: spans to begin with, such as `read_timeline` returns.
    """
    self.run_start = run_start
    self._tracks: dict[str, list[types.Span]] = {
      name: list(spans) for name, spans in (tracks or {}).items()
    }

  def add(self, track: str, spans: Iterable[types.Span]) -> None:
    """Adds spans to a track, which is made where it is new.

    Args:
      track: name of the executor process, such as 'generator/0'.
      spans: in any order. One that stops before it starts, as a corrected
        system clock can give, is taken to last no time.
    """
    row = self._tracks.setdefault(track, [])
    for span in spans:
      stop = max(span.start, span.stop)
      row.append(types.Span(span.name, span.start, stop, dict(span.details)))

  @property
  def tracks(self) -> dict[str, list[types.Span]]:
    """Track name -> its spans, tracks in the order they were first added."""
    return {name: list(spans) for name, spans in self._tracks.items()}

  def write(self, path: str | os.PathLike[str]) -> None:
    """Writes timeline.json, whole or not at all."""
    trace = trace_events(self._tracks, self.run_start)
    strict_json.write_text(path, strict_json.dumps(trace) + '\n')


def trace_events(
  tracks: timeline_records.Tracks, run_start: float
) -> dict[str, Any]:
  """Returns a trace in Chrome's format.

  Events on one thread of a trace may nest but not cross, so overlapping spans
  of a track are spread over threads: 'generator/0', 'generator/0 (2)', ...

  Args:
    tracks: track name -> spans.
    run_start: seconds since the epoch at which the trace is 0; moved back to
      the earliest span where that is earlier, since no event may be negative.
  """
  starts = [span.start for spans in tracks.values() for span in spans]
  origin = min([run_start, *starts])
  events: list[dict[str, Any]] = [
    _metadata('process_name', 0, {'name': 'llamarl_jax'})
  ]
  thread = 0
  for track, spans in tracks.items():
    # A track without spans is named all the same: idle is a finding too.
    for index, lane in enumerate(timeline_records.lanes(spans) or [[]]):
      thread += 1
      name = track if index == 0 else f'{track} ({index + 1})'
      events.append(
        _metadata('thread_name', thread, {'name': name, 'track': track})
      )
      events.append(
        _metadata('thread_sort_index', thread, {'sort_index': thread})
      )
      events.extend(_complete(span, track, thread, origin) for span in lane)
  return {
    'displayTimeUnit': 'ms',
    'otherData': {'run_start': run_start, 'origin': origin},
    'traceEvents': events,
  }


def read_timeline(
  path: str | os.PathLike[str],
) -> tuple[float, dict[str, list[types.Span]]]:
  """Returns (run start, tracks) of a file that `Timeline.write` wrote.

  Args:
    path: of timeline.json.

  Raises:
    ValueError: the file is not such a timeline.
  """
  try:
    trace = json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
    other = trace['otherData']
    run_start, origin = float(other['run_start']), float(other['origin'])
    events: Sequence[Mapping[str, Any]] = trace['traceEvents']
  except (json.JSONDecodeError, KeyError, TypeError) as error:
    raise ValueError(
      f'{path} is not a timeline of llamarl_jax ({error!r}); run again to '
      'write one.'
    ) from error
  tracks: dict[str, list[types.Span]] = {}
  for event in events:
    if event['ph'] == 'M' and event['name'] == 'thread_name':
      tracks.setdefault(event['args']['track'], [])
    elif event['ph'] == 'X':
      start = origin + event['ts'] / 1e6
      stop = origin + (event['ts'] + event['dur']) / 1e6
      tracks[event['cat']].append(
        types.Span(event['name'], start, stop, event['args'])
      )
  for spans in tracks.values():
    spans.sort(key=lambda span: (span.start, span.stop))
  return run_start, tracks


def _metadata(
  name: str, thread: int, arguments: dict[str, Any]
) -> dict[str, Any]:
  """Returns an event that names or orders a thread."""
  return {
    'name': name,
    'ph': 'M',
    'pid': _PROCESS_ID,
    'tid': thread,
    'args': arguments,
  }


def _complete(
  span: types.Span, track: str, thread: int, origin: float
) -> dict[str, Any]:
  """Returns a complete event, in microseconds from the origin."""
  # Both ends are rounded to nanoseconds before the difference is taken, so
  # that spans which touch still touch, and none crosses its neighbor.
  start = round((span.start - origin) * 1e9)
  stop = round((span.stop - origin) * 1e9)
  return {
    'name': span.name,
    'cat': track,
    'ph': 'X',
    'pid': _PROCESS_ID,
    'tid': thread,
    'ts': start / 1000,
    'dur': (stop - start) / 1000,
    'args': dict(span.details),
  }

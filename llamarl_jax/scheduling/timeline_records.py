"""Facts read off a timeline: overlap, bubbles, lanes and staleness counts.

Pure functions of recorded spans, so that the controller, the report and the
simulator of a schedule measure the same quantities in the same way.
"""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import itertools

import numpy as np

from llamarl_jax import types

# One executor process name -> what it did.
Tracks = Mapping[str, Sequence[types.Span]]

# Spans under which no work of the executor's own is done: it waits, or a
# transfer runs in the background of whatever else is on its track.
IDLE_NAMES = frozenset({'fetch', 'wait', 'starved', 'blocked'})


def spans_named(tracks: Tracks, name: str) -> list[types.Span]:
  """Returns the spans called `name` of all tracks, by start."""
  found = [
    span for spans in tracks.values() for span in spans if span.name == name
  ]
  return sorted(found, key=lambda span: (span.start, span.stop))


def merge_intervals(spans: Iterable[types.Span]) -> list[tuple[float, float]]:
  """Returns the union of the spans as disjoint intervals, by start.

  Touching intervals are joined; spans that last no time are left out.

  Args:
    spans: in any order, overlapping or not.
  """
  union: list[tuple[float, float]] = []
  for start, stop in sorted((span.start, span.stop) for span in spans):
    if stop <= start:
      continue
    if union and start <= union[-1][1]:
      union[-1] = (union[-1][0], max(union[-1][1], stop))
    else:
      union.append((start, stop))
  return union


def busy_seconds(
  spans: Iterable[types.Span], start: float, stop: float
) -> float:
  """Returns the seconds of [start, stop] that some span covers."""
  return sum(
    max(0.0, min(span_stop, stop) - max(span_start, start))
    for span_start, span_stop in merge_intervals(spans)
  )


def bubble_fraction(
  spans: Iterable[types.Span],
  start: float,
  stop: float,
  *,
  idle_names: Collection[str] = (),
) -> float:
  """Returns the share of a window in which an executor did nothing.

  bubble = 1 - |union of spans within the window| / |window|

  Wu et al. (2025), section 4: the idle time that asynchrony removes.

  Args:
    spans: of one executor; overlapping ones count once.
    start: of the window, seconds.
    stop: of the window, seconds.
    idle_names: names of spans not to be counted as work, such as IDLE_NAMES.

  Returns:
    A number in [0, 1]; 0 for an empty window, where nothing was lost.
  """
  if stop <= start:
    return 0.0
  work = [span for span in spans if span.name not in idle_names]
  busy = busy_seconds(work, start, stop)
  return min(1.0, max(0.0, 1.0 - busy / (stop - start)))


def overlap_fraction(
  train_spans: Iterable[types.Span],
  generator_spans: Iterable[types.Span],
  *,
  train_name: str = 'train_step',
  decode_name: str = 'segment',
) -> float:
  """Returns the share of train steps during which a generator was decoding.

  A train step counts where a decode segment of any generator shares a positive
  time with it: touching ends are not an overlap, as in a synchronous run.

  Args:
    train_spans: of the trainer; only those called `train_name` are counted.
    generator_spans: of all generators; only those called `decode_name` count.
    train_name: name of a train step's span.
    decode_name: name of a decode segment's span.

  Returns:
    A number in [0, 1]; 0 where there was no train step.
  """
  decoding = merge_intervals(
    span for span in generator_spans if span.name == decode_name
  )
  starts = np.array([start for start, _ in decoding])
  stops = np.array([stop for _, stop in decoding])
  steps = [span for span in train_spans if span.name == train_name]
  if not steps or not decoding:
    return 0.0
  overlapped = 0
  for span in steps:
    # Disjoint and sorted: only the last interval that starts before this step
    # stops can reach into it furthest.
    last = int(np.searchsorted(starts, span.stop, side='left')) - 1
    shared = last >= 0 and stops[last] > span.start
    overlapped += bool(shared and span.stop > span.start)
  return overlapped / len(steps)


def lanes(spans: Iterable[types.Span]) -> list[list[types.Span]]:
  """Splits one track into lanes without overlapping spans.

  Spans of one name stay together where they can: the name with most time comes
  first and any name that overlaps it goes to a further lane as a whole, so
  that a background fetch is always found in the same place.

  Args:
    spans: of one track, in any order.

  Returns:
    Lanes, each sorted by start; none for an empty track.
  """
  by_name: dict[str, list[types.Span]] = {}
  for span in sorted(spans, key=lambda span: (span.start, span.stop)):
    by_name.setdefault(span.name, []).append(span)
  seconds = {
    name: sum(span.stop - span.start for span in group)
    for name, group in by_name.items()
  }
  result: list[list[types.Span]] = []
  for name in sorted(by_name, key=lambda name: (-seconds[name], name)):
    for group in _without_overlap(by_name[name]):
      for index, lane in enumerate(result):
        joined = sorted(lane + group, key=lambda span: (span.start, span.stop))
        if _is_disjoint(joined):
          result[index] = joined
          break
      else:
        result.append(group)
  return result


def count_staleness(
  policy_versions: np.ndarray, trainer_version: int
) -> dict[int, int]:
  """Returns how many tokens have each staleness.

  staleness = trainer version - token version

  Args:
    policy_versions: i32[n], `Version.batches` under which tokens were sampled.
    trainer_version: `Version.batches` of the policy they are to train.

  Returns:
    staleness -> number of tokens, by staleness; absent where there are none.

  Raises:
    ValueError: a token is newer than the policy it is to train.
  """
  staleness = trainer_version - np.asarray(policy_versions).reshape(-1)
  if staleness.size and staleness.min() < 0:
    raise ValueError(
      f'A token of version {trainer_version - staleness.min()} is newer than '
      f'the trainer at {trainer_version}: pass the version that consumes it.'
    )
  values, counts = np.unique(staleness, return_counts=True)
  return {int(v): int(c) for v, c in zip(values, counts, strict=True)}


def merge_counts(
  histograms: Iterable[Mapping[int | str, int | float]],
) -> dict[int, int]:
  """Returns the sum of staleness histograms, by staleness.

  Args:
    histograms: staleness -> tokens; keys may be text, as JSON leaves them.
  """
  total: dict[int, int] = {}
  for histogram in histograms:
    for staleness, count in histogram.items():
      total[int(staleness)] = total.get(int(staleness), 0) + int(count)
  return dict(sorted(total.items()))


def staleness_mean(counts: Mapping[int, int]) -> float:
  """Returns the mean staleness of a token; 0 without tokens."""
  num_tokens = sum(counts.values())
  if not num_tokens:
    return 0.0
  return sum(value * count for value, count in counts.items()) / num_tokens


def staleness_max(counts: Mapping[int, int]) -> int:
  """Returns the largest staleness that any token has; 0 without tokens."""
  return max((value for value, count in counts.items() if count), default=0)


def _is_disjoint(spans: Sequence[types.Span]) -> bool:
  """Tells whether sorted spans follow one another."""
  return all(
    before.stop <= after.start for before, after in itertools.pairwise(spans)
  )


def _without_overlap(
  spans: Sequence[types.Span],
) -> list[list[types.Span]]:
  """Splits sorted spans into the fewest lanes, first fit."""
  result: list[list[types.Span]] = []
  for span in spans:
    for lane in result:
      if lane[-1].stop <= span.start:
        lane.append(span)
        break
    else:
      result.append([span])
  return result

"""What a run came to: summary.json, and the table at its end."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import importlib.metadata
import math
import os
import pathlib
import platform
from typing import Any

from llamarl_jax.runtime import clock
from llamarl_jax.runtime import strict_json
from llamarl_jax.scheduling import timeline_records

# What may lie in a workdir, in the order it is shown.
_CONTENTS = (
  ('report.html', 'plots, timeline and completions; open in a browser'),
  ('summary.json', 'the numbers above and more'),
  ('metrics.jsonl', 'one record a step'),
  ('timeline.json', 'open at ui.perfetto.dev'),
  ('tensorboard', 'tensorboard --logdir'),
  ('checkpoints', 'trainer state, to resume from or evaluate'),
  ('config.json', 'every setting of the run'),
)

_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'ray')

# (metric, label, format) of the rows that compare first and last train steps.
_COMPARED = (
  ('reward_mean', 'mean reward', '.3f'),
  ('accuracy', 'accuracy of the samples', '.3f'),
  ('response_length_mean', 'response length [tokens]', '.1f'),
  ('truncated_completions', 'cut off at the token limit', '.1%'),
  ('zero_advantage_fraction', 'groups with equal rewards', '.1%'),
  ('entropy', 'entropy [nats a token]', '.3f'),
)


@dataclasses.dataclass(frozen=True)
class Process:
  """One process of a run.

  Attributes:
    name: of the executor process, such as 'generator/0'.
    pid: of the operating system.
    num_devices: it computes on; 0 where it uses no JAX.
  """

  name: str
  pid: int
  num_devices: int


@dataclasses.dataclass(frozen=True)
class RunFacts:
  """What only the controller knows of a run.

  Attributes:
    config_name: of the config the run was started with.
    seed: of the run.
    accuracy_before: greedy, on held-out problems; None if not evaluated.
    accuracy_after: likewise.
    num_steps: train steps done, over all lives of the run.
    wall_seconds: from start to end, evaluations included.
    training_start: seconds since the epoch at which the first group was
      admitted; start of the window in which bubbles are measured.
    training_stop: seconds since the epoch at which the last train step ended.
    num_tokens: completion tokens generated within that window.
    processes: all of the run, the controller's among them.
    weight_publications: versions that generators committed, each once.
    weight_bytes: moved to generators in all.
    lost_groups: admitted and never trained on.
    parameter_digest: of the final parameters.
    replica_digests: of the parameters each generator replica ended with.
  """

  config_name: str
  seed: int
  accuracy_before: float | None
  accuracy_after: float | None
  num_steps: int
  wall_seconds: float
  training_start: float
  training_stop: float
  num_tokens: int
  processes: Sequence[Process]
  weight_publications: int
  weight_bytes: int
  lost_groups: int
  parameter_digest: str
  replica_digests: Mapping[str, str]


def build_summary(
  facts: RunFacts,
  records: Sequence[Mapping[str, Any]],
  tracks: timeline_records.Tracks,
) -> dict[str, Any]:
  """Returns what summary.json holds.

  Args:
    facts: what only the controller knows.
    records: of metrics.jsonl.
    tracks: of the timeline, by executor process.

  Returns:
    Plain values: fractions in [0, 1], seconds, bytes, tokens. The mean
    staleness is over tokens, where the records count them.
  """
  spans = [span for track in tracks.values() for span in track]
  window = (facts.training_start, facts.training_stop)
  seconds = facts.training_stop - facts.training_start
  staleness_mean, staleness_max = _staleness(records)
  summary = {
    'config_name': facts.config_name,
    'seed': facts.seed,
    'accuracy_before': facts.accuracy_before,
    'accuracy_after': facts.accuracy_after,
    'num_steps': facts.num_steps,
    'wall_seconds': facts.wall_seconds,
    'processes': [dataclasses.asdict(process) for process in facts.processes],
    'staleness_max': staleness_max,
    'staleness_mean': staleness_mean,
    'overlap_fraction': timeline_records.overlap_fraction(spans, spans),
    'bubble': {
      name: timeline_records.bubble_fraction(
        track, *window, idle_names=timeline_records.IDLE_NAMES
      )
      for name, track in tracks.items()
    },
    'weight_publications': facts.weight_publications,
    'weight_bytes': facts.weight_bytes,
    'tokens_per_second': facts.num_tokens / seconds if seconds > 0 else 0.0,
    'num_tokens': facts.num_tokens,
    'training_seconds': seconds,
    'log_prob_gap_mean': _mean(column(records, 'log_prob_gap')),
    'skipped_steps': int(sum(column(records, 'step_skipped'))),
    'lost_groups': facts.lost_groups,
    'parameter_digest': facts.parameter_digest,
    'replica_digests': dict(facts.replica_digests),
    'versions': versions(),
  }
  return strict_json.plain(summary)


def versions() -> dict[str, str]:
  """Returns the versions of Python and of the packages a run rests on."""
  found = {'python': platform.python_version()}
  for package in _PACKAGES:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      found[package] = 'not installed'
  return found


def column(records: Sequence[Mapping[str, Any]], key: str) -> list[float]:
  """Returns the finite values of a metric, in the order of the records."""
  values = [strict_json.number(record.get(key)) for record in records]
  return [v for v in values if v is not None and math.isfinite(v)]


def before_after_rows(
  summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, str]]:
  """Returns (what, before, after) as texts.

  The first row is the evaluation on held-out problems; the others compare the
  means over the first and the last train steps.

  Args:
    summary: as `build_summary` returns.
    records: of metrics.jsonl.
  """
  rows = [
    (
      'held-out accuracy, greedy',
      form(summary.get('accuracy_before'), '.3f'),
      form(summary.get('accuracy_after'), '.3f'),
    )
  ]
  for key, label, spec in _COMPARED:
    values = column(records, key)
    if values:
      count = compared_steps(len(values))
      first, last = _mean(values[:count]), _mean(values[-count:])
      rows.append((label, form(first, spec), form(last, spec)))
  return rows


def compared_steps(num_steps: int) -> int:
  """Returns how many first and last steps are compared: five at most."""
  return max(1, min(5, num_steps // 2))


def final_table(
  summary: Mapping[str, Any],
  records: Sequence[Mapping[str, Any]],
  workdir: str | os.PathLike[str],
) -> str:
  """Returns the text printed at the end of a run.

  Args:
    summary: as `build_summary` returns.
    records: of metrics.jsonl.
    workdir: of the run; what is listed is what lies in it.
  """
  count = compared_steps(len(column(records, 'reward_mean')))
  rows = before_after_rows(summary, records)
  width = max(len(label) for label, _, _ in rows)
  lines = [f'{"":{width}}  {"before":>9}  {"after":>9}']
  lines += [f'{label:{width}}  {a:>9}  {b:>9}' for label, a, b in rows]
  lines.append(
    f'(below the first row: means over the first and last {count} train steps)'
  )
  bubbles = ', '.join(
    f'{name} {form(value, ".0%")}'
    for name, value in (summary.get('bubble') or {}).items()
  )
  wall = clock.format_seconds(strict_json.number(summary.get('wall_seconds')))
  lines += [
    '',
    f'steps      {summary.get("num_steps")} in {wall}, '
    f'{form(summary.get("tokens_per_second"), ",.0f")} tokens/s',
    f'staleness  mean {form(summary.get("staleness_mean"), ".2f")}, '
    f'max {form(summary.get("staleness_max"), ".0f")}',
    f'overlap    {form(summary.get("overlap_fraction"), ".0%")} of the train '
    'steps ran while a generator was decoding',
    f'bubble     {bubbles or "-"}',
    f'weights    {summary.get("weight_publications")} publications, '
    f'{form_bytes(summary.get("weight_bytes"))}',
    '',
    f'{workdir}',
  ]
  folder = pathlib.Path(workdir)
  present = [item for item in _CONTENTS if (folder / item[0]).exists()]
  lines += [f'  {name:14} {meaning}' for name, meaning in present]
  return '\n'.join(lines)


def form(value: Any, spec: str) -> str:
  """Returns a number in a format such as '.3f', or '-' where there is none."""
  finite = strict_json.number(value)
  return '-' if finite is None else f'{finite:{spec}}'


def form_bytes(value: Any) -> str:
  """Returns a number of bytes for people, in powers of 1000."""
  size = strict_json.number(value)
  if size is None:
    return '-'
  for unit in ('B', 'kB', 'MB', 'GB'):
    if size < 999.5:  # What rounds to 1000 goes to the next unit.
      return f'{size:.3g} {unit}'
    size /= 1000
  return f'{size:.3g} TB'


def _mean(values: Sequence[float]) -> float | None:
  """Returns the mean, or None of nothing."""
  return sum(values) / len(values) if values else None


def _staleness(
  records: Sequence[Mapping[str, Any]],
) -> tuple[float | None, int | None]:
  """Returns (mean over tokens, maximum), or Nones before any train step."""
  counts = timeline_records.merge_counts(
    record.get('staleness_counts') or {} for record in records
  )
  means = column(records, 'staleness_mean')
  maxima = column(records, 'staleness_max')
  mean = timeline_records.staleness_mean(counts) if counts else _mean(means)
  largest = [timeline_records.staleness_max(counts)] if counts else []
  whole = [*largest, *(int(value) for value in maxima)]
  return mean, max(whole, default=None)

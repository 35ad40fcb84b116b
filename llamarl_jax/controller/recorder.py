"""Writes down what the controller sees: metrics, timeline, progress, samples.

It only looks on; nothing a run decides depends on it.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import pathlib
import time
from typing import Any
from typing import TextIO

from llamarl_jax import types
from llamarl_jax.runtime import clock as clock_lib
from llamarl_jax.runtime import metrics as metrics_lib
from llamarl_jax.runtime import progress as progress_lib
from llamarl_jax.runtime import strict_json
from llamarl_jax.runtime import timeline as timeline_lib
from llamarl_jax.scheduling import timeline_records


class Recorder:
  """The observer of a run with a workdir; see `observer.Observer`."""

  def __init__(
    self,
    workdir: pathlib.Path,
    stream: TextIO,
    *,
    num_steps: int,
    start_step: int,
    lengths_expected: bool,
  ):
    """Opens the files of the workdir.

    Args:
      workdir: an existing folder.
      stream: where progress is printed.
      num_steps: of the whole run.
      start_step: steps done before, in earlier lives of the run.
      lengths_expected: whether completions cut by their limit are normal.
    """
    self._path = workdir
    self._stream = stream
    self.start = time.time()
    timeline_path = workdir / 'timeline.json'
    if start_step and timeline_path.exists():
      self.timeline = timeline_lib.Timeline(
        *timeline_lib.read_timeline(timeline_path)
      )
    else:
      self.timeline = timeline_lib.Timeline(self.start)
    self._writer = metrics_lib.MultiWriter(
      [
        metrics_lib.JsonlWriter(
          workdir / 'metrics.jsonl',
          run_start=self.timeline.run_start,
          resume_step=start_step,
        ),
        metrics_lib.TensorBoardWriter(
          workdir / 'tensorboard', resume_step=start_step
        ),
      ]
    )
    self._progress = progress_lib.Progress(
      stream, num_steps, lengths_expected=lengths_expected
    )
    self._time_left = clock_lib.TimeLeft(num_steps)
    self._step = start_step
    self._window_start = self.start
    self._step_bytes = 0
    # By executor, spans that reach into the current step.
    self._recent: dict[str, list[types.Span]] = {}
    self.training_start = self.training_stop = self.start
    self.num_tokens = 0
    self.weight_bytes = 0
    self._versions: set[types.Version] = set()
    self._sampled = _Lengths()  # Of completed groups, since the last step.
    self._all_sampled, self._all_trained = _Lengths(), _Lengths()

  @property
  def num_publications(self) -> int:
    """Versions that a replica has fetched and verified."""
    return len(self._versions)

  def begin_training(self) -> None:
    """Opens the window in which speed and bubbles are measured."""
    now = time.time()
    self.training_start = self.training_stop = self._window_start = now
    self._time_left.record(self._step, now)

  def report(self, executor: str, report: types.StepReport) -> None:
    """Takes the report of any executor."""
    self.timeline.add(executor, report.spans)
    self._recent.setdefault(executor, []).extend(report.spans)
    for output in report.outputs:
      if _is_sampled(output):
        self._sampled.add(output)
        self._all_sampled.add(output)
    if report.fetched is not None and 'fetch_bytes' in report.metrics:
      self._versions.add(report.fetched)
      size = int(report.metrics['fetch_bytes'])
      self.weight_bytes += size
      self._step_bytes += size

  def train_step(
    self,
    groups: Sequence[types.Group],
    metrics: Mapping[str, Any],
    busy_since: Mapping[str, float],
  ) -> None:
    """Takes the facts of a train step.

    Args:
      groups: the batch.
      metrics: of the trainer.
      busy_since: by executor at work, when its command was sent; that work
        is not on the timeline yet.
    """
    now = time.time()
    tokens = sum(c.tokens.size for g in groups for c in g.completions)
    self.num_tokens += tokens
    seconds = max(now - self._window_start, 1e-9)
    for group in groups:
      self._all_trained.add(group)
    record = {
      **metrics,
      'step_seconds': seconds,
      'tokens_per_second': tokens / seconds,
      'generate_seconds': self._seconds('segment', now),
      'publish_seconds': self._seconds('publish', now),
      'weight_bytes': self._step_bytes,
      **self._lengths(),
      **self._bubbles(now, busy_since),
    }
    self._writer.write(self._step, record)
    self._step += 1
    self._time_left.record(self._step, now)
    self._progress.step(self._step, record, self._time_left.seconds())
    self._window_start = self.training_stop = now
    self._step_bytes = 0
    self._sampled = _Lengths()
    self._recent = {
      name: [span for span in spans if span.stop > now]
      for name, spans in self._recent.items()
    }

  def evaluation(
    self, name: str, step: int, accuracy: float, seconds: float
  ) -> None:
    """Takes the outcome of an evaluation."""
    self._writer.write(step, {'eval_accuracy': accuracy})
    self._progress.evaluation(name, accuracy, seconds)

  def say(self, text: str) -> None:
    """Prints a line."""
    print(text, file=self._stream, flush=True)

  def close(self) -> None:
    """Writes the timeline and closes the files."""
    self.timeline.write(self._path / 'timeline.json')
    self._writer.close()

  def _seconds(self, name: str, now: float) -> float:
    """Returns the time spans of that name took since the last train step."""
    spans = timeline_records.spans_named(self._recent, name)
    return timeline_records.busy_seconds(spans, self._window_start, now)

  def _lengths(self) -> dict[str, float]:
    """Returns mean lengths of what was sampled, and how training differs.

    Training that left out long completions would show in the ratio.
    """
    lengths = {}
    if self._sampled.count:
      lengths['sampled_length_mean'] = self._sampled.mean()
    if self._all_sampled.count:
      ratio = self._all_trained.mean() / self._all_sampled.mean()
      lengths['length_ratio'] = ratio
    return lengths

  def _bubbles(
    self, now: float, busy_since: Mapping[str, float]
  ) -> dict[str, float]:
    """Returns the idle share of each executor since the last train step."""
    bubbles = {}
    for name, spans in self._recent.items():
      recent = list(spans)
      if name in busy_since:
        recent.append(types.Span('under way', busy_since[name], now))
      bubbles[f'bubble_{name}'] = timeline_records.bubble_fraction(
        recent,
        self._window_start,
        now,
        idle_names=timeline_records.IDLE_NAMES,
      )
    return bubbles


@dataclasses.dataclass
class _Lengths:
  """The number of completions, and their tokens."""

  count: int = 0
  tokens: int = 0

  def add(self, group: types.Group) -> None:
    self.count += len(group.completions)
    self.tokens += sum(c.tokens.size for c in group.completions)

  def mean(self) -> float:
    return self.tokens / max(self.count, 1)


def _is_sampled(output: Any) -> bool:
  """Returns whether it is a training group as a generator completes it."""
  return (
    isinstance(output, types.Group)
    and output.request.stream == types.Stream.TRAIN
    and output.rewards is None
  )


@dataclasses.dataclass(frozen=True)
class Answer:
  """The first completion of an evaluated problem.

  Attributes:
    question: for people; the prompt where there is none.
    prompt: what the policy continued.
    expected: the right answer.
    completion: what the policy wrote.
    correct: whether it counts as right.
  """

  question: str
  prompt: str
  expected: str
  completion: str
  correct: bool


def answers(groups: Sequence[types.Group]) -> list[Answer]:
  """Returns the answers of scored groups of the evaluation stream."""
  return [
    Answer(
      question=group.request.problem.question or group.request.problem.prompt,
      prompt=group.request.problem.prompt,
      expected=group.request.problem.answer,
      completion=group.completions[0].text,
      correct=(group.rewards or ({},))[0].get('correct') == 1.0,
    )
    for group in groups
  ]


def write_answers(path: pathlib.Path, rows: Sequence[Answer]) -> None:
  """Writes answers as JSON, whole or not at all."""
  text = json.dumps([dataclasses.asdict(row) for row in rows], indent=2)
  strict_json.write_text(path, text + '\n')


def read_answers(path: pathlib.Path) -> list[Answer]:
  """Returns what `write_answers` wrote."""
  return [Answer(**row) for row in json.loads(path.read_text())]


def accuracy(rows: Sequence[Answer]) -> float:
  """Returns the share of right answers; 0 of none."""
  return sum(row.correct for row in rows) / max(len(rows), 1)


def samples(
  before: Sequence[Answer], after: Sequence[Answer], count: int
) -> list[dict[str, Any]]:
  """Returns completions of the same problems before and after training.

  Problems whose outcome changed come first, as they show what was learned.

  Args:
    before: answers of the first policy.
    after: of the same problems, in the same order.
    count: how many.
  """
  rows = [
    {
      'question': old.question,
      'prompt': old.prompt,
      'expected': old.expected,
      'completion_before': old.completion,
      'completion_after': new.completion,
      'correct_before': old.correct,
      'correct_after': new.correct,
    }
    for old, new in zip(before, after, strict=True)
  ]
  rows.sort(key=lambda row: row['correct_before'] == row['correct_after'])
  return rows[:count]

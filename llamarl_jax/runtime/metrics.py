"""Where the numbers of a run go: a JSON line a step, TensorBoard, or nowhere.

Writers are told the step and a mapping and know nothing of what it means.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import json
import os
import pathlib
from typing import Any
from typing import Protocol

from llamarl_jax.runtime import clock as clock_lib
from llamarl_jax.runtime import strict_json


class MetricsWriter(Protocol):
  """Takes the named numbers of steps."""

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Takes what is to be recorded of one step."""

  def close(self) -> None:
    """Makes everything written durable; may be called twice."""


class NullMetricsWriter:
  """Drops everything: for runs that keep no record."""

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Drops the metrics."""

  def close(self) -> None:
    """Does nothing."""


class MultiWriter:
  """Hands everything to each of several writers."""

  def __init__(self, writers: Sequence[MetricsWriter]):
    self._writers = tuple(writers)

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Writes to each, in order."""
    for writer in self._writers:
      writer.write(step, metrics)

  def close(self) -> None:
    """Closes each, also where another's close raises."""
    with contextlib.ExitStack() as stack:
      for writer in self._writers:
        stack.callback(writer.close)


class JsonlWriter:
  """Writes metrics.jsonl: one JSON object a line, {step, time, ...}."""

  def __init__(
    self,
    path: str | os.PathLike[str],
    *,
    clock: clock_lib.Clock | None = None,
    run_start: float | None = None,
    resume_step: int = 0,
  ):
    """Opens the file and drops what a resumed run will write again.

    Args:
      path: of the file; its folder is made where it is missing.
      clock: gives 'time' to records that come without it.
      run_start: seconds since the epoch that 'time' counts from; now if None.
      resume_step: records at this step and later are dropped, also a half
        written last line. 0 begins anew.
    """
    self._clock = clock or clock_lib.SystemClock()
    self._start = self._clock.now() if run_start is None else run_start
    self._path = pathlib.Path(path)
    kept = [
      record
      for record in (read_records(self._path) if self._path.exists() else [])
      if record['step'] < resume_step
    ]
    strict_json.write_text(
      self._path, ''.join(strict_json.dumps(record) + '\n' for record in kept)
    )
    self._file = open(self._path, 'ab')  # noqa: SIM115 (until `close`)

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Appends one line and flushes it, so that it survives a crash.

    Args:
      step: of the record.
      metrics: numbers, texts and nested mappings; a 'time' among them replaces
        the clock's.
    """
    record = {'step': int(step), 'time': self._clock.now() - self._start}
    record.update(
      {key: value for key, value in metrics.items() if key != 'step'}
    )
    self._file.write(strict_json.encode(strict_json.dumps(record) + '\n'))
    self._file.flush()

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


class TensorBoardWriter:
  """Writes TensorBoard events: scalars, and counts as histograms."""

  def __init__(self, folder: str | os.PathLike[str], *, resume_step: int = 0):
    """Opens a new events file.

    Args:
      folder: for the events files.
      resume_step: TensorBoard hides earlier events from this step on; 0 for
        a new run.
    """
    # Imported late: the command line's help should not wait for it.
    import tensorboardX

    self._writer = tensorboardX.SummaryWriter(
      str(folder), purge_step=resume_step or None
    )

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Adds a scalar for each number and a histogram for each mapping.

    Args:
      step: of the metrics.
      metrics: numbers; or counts by whole number, such as staleness_counts.
        Texts and nothing else are left out.
    """
    for key, value in metrics.items():
      value = strict_json.plain(value)
      if isinstance(value, Mapping):
        self._write_counts(key, value, step)
        continue
      scalar = strict_json.number(value)
      if scalar is not None:
        self._writer.add_scalar(key, scalar, step)

  def close(self) -> None:
    """Writes out what is buffered and closes the file."""
    self._writer.close()

  def _write_counts(
    self, key: str, counts: Mapping[str, Any], step: int
  ) -> None:
    """Adds a histogram with one bucket for each whole number."""
    numbers = {int(value): float(count) for value, count in counts.items()}
    if not numbers or sum(numbers.values()) <= 0:
      return
    low, high = min(numbers), max(numbers)
    # A bucket holds (previous limit, limit]: each whole number is its middle.
    self._writer.add_histogram_raw(
      key,
      min=low,
      max=high,
      num=sum(numbers.values()),
      sum=sum(value * count for value, count in numbers.items()),
      sum_squares=sum(value**2 * count for value, count in numbers.items()),
      bucket_limits=[value + 0.5 for value in range(low - 1, high + 1)],
      bucket_counts=[
        numbers.get(value, 0.0) for value in range(low - 1, high + 1)
      ],
      global_step=step,
    )


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Returns the records of a metrics.jsonl, in the order of the file.

  A last line that was cut off, as a killed run leaves it, is not a record.

  Args:
    path: of the file.

  Raises:
    ValueError: a line before the last is not a record, with its number.
  """
  lines = pathlib.Path(path).read_text(encoding='utf-8').split('\n')
  while lines and not lines[-1].strip():
    lines.pop()
  records = []
  for number, line in enumerate(lines, start=1):
    try:
      record = json.loads(line)
    except json.JSONDecodeError as error:
      if number == len(lines):
        break
      raise ValueError(
        f'{path}, line {number}: not JSON ({error}); remove that line.'
      ) from error
    if not isinstance(record, dict) or 'step' not in record:
      raise ValueError(
        f'{path}, line {number}: a record is an object with a "step", not '
        f'{line[:60]!r}; remove that line.'
      )
    records.append(record)
  return records

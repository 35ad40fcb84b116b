"""One line a train step for whoever watches the terminal, and loud warnings.

The warnings are for runs that look busy and learn nothing: completions cut
off at the limit, or groups whose rewards are all equal.
"""

from collections.abc import Mapping
from typing import Any
from typing import TextIO

from llamarl_jax.runtime import clock
from llamarl_jax.runtime import strict_json

MAX_COLUMNS = 120

_MAX_TRUNCATED = 0.5
_MAX_ZERO_ADVANTAGE = 0.9
# A single batch may be easy or hard by chance; this many in a row are not.
_ZERO_ADVANTAGE_STEPS = 5
_REPEAT_STEPS = 10


class Progress:
  """Prints the progress of a run."""

  def __init__(
    self,
    stream: TextIO,
    num_steps: int,
    *,
    lengths_expected: bool = False,
  ):
    """Prints nothing yet.

    Args:
      stream: to print to.
      num_steps: train steps of the whole run.
      lengths_expected: completions are expected to end at their token limit,
        as where an answer is shorter than what is asked for; no warning then.
    """
    self._stream = stream
    self._num_steps = num_steps
    self._lengths_expected = lengths_expected
    self._zero_advantage_steps = 0
    self._last_warned: dict[str, int] = {}

  def step(
    self,
    num_done: int,
    metrics: Mapping[str, Any],
    seconds_left: float | None,
  ) -> None:
    """Prints the line of a train step, and warnings below it.

    Args:
      num_done: steps done so far, this one included.
      metrics: of the step, by their names in metrics.jsonl.
      seconds_left: of the run; None while unknown.
    """
    self._print(progress_line(num_done, self._num_steps, metrics, seconds_left))
    self._warn_of_length(num_done, metrics)
    self._warn_of_zero_advantage(num_done, metrics)
    if strict_json.number(metrics.get('step_skipped')):
      # Never held back: each one is an update that was lost.
      self._print(
        f'WARNING: step {num_done} was skipped: its loss or gradient was not '
        'finite. Lower the learning rate if this returns.'
      )

  def evaluation(self, name: str, accuracy: float, seconds: float) -> None:
    """Prints the outcome of an evaluation.

    Args:
      name: when it was, such as 'before training'.
      accuracy: share of right answers.
      seconds: it took.
    """
    took = clock.format_seconds(seconds)
    self._print(f'evaluation {name}: accuracy {accuracy:.3f} (took {took})')

  def _warn_of_length(self, num_done: int, metrics: Mapping[str, Any]) -> None:
    """Warns where most completions were cut off."""
    truncated = strict_json.number(metrics.get('truncated_completions'))
    if self._lengths_expected or truncated is None:
      return
    if truncated > _MAX_TRUNCATED:
      self._warn(
        'length',
        num_done,
        f'{truncated:.0%} of the completions were cut off at max_new_tokens. '
        'Raise it, or check that the stop tokens are those of the model.',
      )

  def _warn_of_zero_advantage(
    self, num_done: int, metrics: Mapping[str, Any]
  ) -> None:
    """Warns where hardly a group taught anything for several steps."""
    fraction = strict_json.number(metrics.get('zero_advantage_fraction'))
    if fraction is None or not fraction > _MAX_ZERO_ADVANTAGE:
      self._zero_advantage_steps = 0
      return
    self._zero_advantage_steps += 1
    if self._zero_advantage_steps >= _ZERO_ADVANTAGE_STEPS:
      self._warn(
        'zero_advantage',
        num_done,
        f'{fraction:.0%} of the groups had equal rewards, and over '
        f'{_MAX_ZERO_ADVANTAGE:.0%} in {self._zero_advantage_steps} steps in '
        'a row: hardly anything is learned. Change the difficulty or the '
        'temperature, or sample more completions a prompt.',
      )

  def _warn(self, kind: str, num_done: int, text: str) -> None:
    """Prints a warning, and again only every few steps while it lasts."""
    last = self._last_warned.get(kind)
    if last is None or num_done - last >= _REPEAT_STEPS:
      self._last_warned[kind] = num_done
      self._print(f'WARNING: {text}')

  def _print(self, line: str) -> None:
    """Writes a line at once: the stream may be a pipe that is followed."""
    self._stream.write(line + '\n')
    self._stream.flush()


def progress_line(
  num_done: int,
  num_steps: int,
  metrics: Mapping[str, Any],
  seconds_left: float | None,
) -> str:
  """Returns the line of a train step, at most MAX_COLUMNS wide.

  Args:
    num_done: steps done so far, this one included.
    num_steps: of the whole run.
    metrics: by their names in metrics.jsonl; 'accuracy' is the mean over the
      batch's completions, 'bubble_<executor>' a share of the step's time.
      Staleness is shown as mean/max.
    seconds_left: of the run; None while unknown.
  """
  width = len(str(num_steps))
  staleness = (
    _text(metrics, 'staleness_mean', '4.2f')
    + '/'
    + _text(metrics, 'staleness_max', '.0f')
  )
  parts = [
    f'step {num_done:>{width}}/{num_steps}',
    f'reward {_text(metrics, "reward_mean", "6.3f")}',
    f'accuracy {_text(metrics, "accuracy", "5.3f")}',
    f'stale {staleness}',
    f'{_text(metrics, "tokens_per_second", "5.0f")} tok/s',
  ]
  left = f'left {clock.format_seconds(seconds_left)}'
  bubbles = [
    (key.removeprefix('bubble_'), _text(metrics, key, '4.0%'))
    for key in metrics
    if key.startswith('bubble_')
  ]
  # Room for hours whatever is left, so that the form does not change midway.
  used = len('  '.join([*parts, 'bubble', 'left 0:00:00']))
  room = MAX_COLUMNS - max(used, len('  '.join([*parts, 'bubble', left])))
  shown = _fit_bubbles(bubbles, room)
  if shown:
    parts.append(f'bubble{shown}')
  return '  '.join([*parts, left])[:MAX_COLUMNS]


def _fit_bubbles(bubbles: list[tuple[str, str]], room: int) -> str:
  """Returns as many bubbles as fit, names cut to three letters if need be."""
  text = ''.join(f' {name} {value}' for name, value in bubbles)
  if len(text) <= room:
    return text
  short = [f' {name[:3]} {value}' for name, value in bubbles]
  while short and len(''.join(short)) > room:
    short.pop()
  return ''.join(short)


def _text(metrics: Mapping[str, Any], key: str, form: str) -> str:
  """Returns a metric in a form such as '6.3f', or '-' as wide."""
  value = strict_json.number(strict_json.plain(metrics.get(key)))
  if value is None:
    return f'{"-":>{form.split(".")[0] or 1}}'
  return f'{value:{form}}'

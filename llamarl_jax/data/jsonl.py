"""Problems from a file with one JSON object a line.

Epochs are shuffled by a seeded permutation that is computed, not stored, so
index i of the training stream is found without walking there.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import json
import pathlib
import re
from typing import Any

from llamarl_jax.data import addressing
from llamarl_jax.data import chat
from llamarl_jax.data.addressing import Split
from llamarl_jax.types import Problem


@dataclasses.dataclass(frozen=True)
class _Row:
  """One line of the file: its fields, and the two that were asked for."""

  line: int
  fields: Mapping[str, Any]
  question: str
  answer: str


class JsonlSource:
  """Problems read from JSON lines, checked when the source is made.

  Held-out problems come from a file of their own, or are a fraction of the
  rows, chosen by a hash of the question: a question that stands in the file
  twice never falls into both splits, and every seed holds out the same.
  """

  def __init__(
    self,
    seed: int,
    *,
    path: str,
    held_out_path: str = '',
    held_out_fraction: float = 0.1,
    question_field: str = 'question',
    answer_field: str = 'answer',
    answer_pattern: str = '',
    prompt_format: chat.PromptFormat | None = None,
  ):
    r"""Reads the files.

    Args:
      seed: of the shuffling of the epochs.
      path: the file, UTF-8.
      held_out_path: file of the held-out split, or '' to split `path`.
      held_out_fraction: share of questions held out where there is no such
        file; 0 for none.
      question_field: name of the field with the question.
      answer_field: name of the field with the answer, a text or a number.
      answer_pattern: regular expression whose first group, in its last match,
        is the answer proper, such as '####\s*(.+)'; '' to take all of it.
      prompt_format: of any fields of the rows; the default is '{question}',
        of `question_field`.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if a line is not what it should be, naming file and line.
    """
    if not 0 <= held_out_fraction < 1:
      raise ValueError(
        f'held_out_fraction={held_out_fraction} must be in [0, 1).'
      )
    self._seed = seed
    default = chat.PlainPrompt('{' + question_field + '}')
    self._prompt_format = prompt_format or default
    reader = _Reader(
      question_field,
      answer_field,
      _compiled(answer_pattern),
      self._prompt_format.field_names(),
    )
    rows = list(reader.rows(path))
    if held_out_path:
      held_out = list(reader.rows(held_out_path))
    else:
      held_out = [
        row
        for row in rows
        if addressing.is_held_out(held_out_fraction, 'jsonl', row.question)
      ]
    # Distinct questions, the first of each.
    distinct = {row.question: row for row in reversed(held_out)}
    self._held_out = list(reversed(distinct.values()))
    self._train = [row for row in rows if row.question not in distinct]
    if not self._train:
      raise ValueError(
        f'{path}: none of its {len(rows)} problems is left to train on; lower '
        f'held_out_fraction={held_out_fraction} or add problems.'
      )
    if not self._held_out and held_out_fraction > 0:
      raise ValueError(
        f'{path}: held_out_fraction={held_out_fraction} of {len(rows)} '
        'problems holds out none; raise it, give held_out_path or set it to 0.'
      )

  def num_problems(self, split: Split | str) -> int | None:
    """Returns the number of problems, for training that of one epoch."""
    rows = self._train if Split(split) is Split.TRAIN else self._held_out
    return len(rows)

  def problem(self, split: Split | str, index: int) -> Problem:
    """Returns problem `index`; training goes on into the next epochs.

    Raises:
      ValueError: if there is no such problem.
    """
    if index < 0:
      raise ValueError(f'index={index} must not be negative.')
    if Split(split) is Split.TRAIN:
      epoch, place = divmod(index, len(self._train))
      row = self._train[
        addressing.permuted(place, len(self._train), self._seed, 'jsonl', epoch)
      ]
    elif index < len(self._held_out):
      epoch, row = 0, self._held_out[index]
    else:
      raise ValueError(
        f'There are {len(self._held_out)} held-out problems, index {index} was '
        'asked for: ask for fewer or raise held_out_fraction.'
      )
    return Problem(
      index=index,
      prompt=self._prompt_format.render(row.fields),
      answer=row.answer,
      question=row.question,
      metadata={'line': row.line, 'epoch': epoch},
    )


@dataclasses.dataclass(frozen=True)
class _Reader:
  """Reads and checks lines."""

  question_field: str
  answer_field: str
  answer_pattern: re.Pattern[str]
  prompt_fields: frozenset[str]

  def rows(self, path: str) -> Iterator[_Row]:
    """Yields the rows of a file; blank lines count but are not rows."""
    file = pathlib.Path(path)
    if not file.is_file():
      raise FileNotFoundError(
        f'{path}: no such file; give the path of a JSONL file with fields '
        f'{self.question_field!r} and {self.answer_field!r}.'
      )
    is_empty = True
    for i, data in enumerate(file.read_bytes().split(b'\n')):
      # A byte order mark may open the file and means nothing.
      data = data.removeprefix(b'\xef\xbb\xbf') if i == 0 else data
      if data.strip():
        is_empty = False
        yield self._row(f'{path}, line {i + 1}', i + 1, data)
    if is_empty:
      raise ValueError(
        f'{path}: the file is empty; it needs one JSON object a line.'
      )

  def _row(self, where: str, line: int, data: bytes) -> _Row:
    try:
      text = data.decode('utf-8')
    except UnicodeDecodeError as error:
      raise ValueError(
        f'{where}: not UTF-8 (byte {error.start + 1}: '
        f'0x{data[error.start]:02x}); convert the file to UTF-8.'
      ) from error
    try:
      fields = json.loads(text)
    except json.JSONDecodeError as error:
      raise ValueError(
        f'{where}: malformed JSON ({error.msg} at column {error.colno}); '
        'write one complete JSON object a line.'
      ) from error
    if not isinstance(fields, dict):
      raise ValueError(
        f'{where}: a JSON {type(fields).__name__}, not an object; write '
        f'{{"{self.question_field}": ..., "{self.answer_field}": ...}}.'
      )
    needed = {self.question_field, self.answer_field, *self.prompt_fields}
    missing = sorted(needed - fields.keys())
    if missing:
      raise ValueError(
        f'{where}: no field {", ".join(map(repr, missing))}; it has '
        f'{sorted(fields)}. Add it, or set question_field, answer_field or the '
        'prompt template to fields that are there.'
      )
    question = _text(where, self.question_field, fields)
    answer = _text(where, self.answer_field, fields)
    matches = self.answer_pattern.findall(answer)
    if not matches or not matches[-1].strip():
      raise ValueError(
        f'{where}: answer_pattern {self.answer_pattern.pattern!r} finds no '
        f'answer in {answer[-80:]!r}; correct the pattern or the line.'
      )
    return _Row(line, fields, question, matches[-1].strip())


def _compiled(answer_pattern: str) -> re.Pattern[str]:
  try:
    pattern = re.compile(answer_pattern or r'(?s)\A(.*)\Z')
  except re.error as error:
    raise ValueError(
      f'answer_pattern={answer_pattern!r} is no regular expression: {error}.'
    ) from error
  if pattern.groups != 1:
    raise ValueError(
      f'answer_pattern={answer_pattern!r} has {pattern.groups} groups; put '
      'one pair of parentheses, around the answer.'
    )
  return pattern


def _text(where: str, name: str, fields: Mapping[str, Any]) -> str:
  value = fields[name]
  # JSON's true is a Python int as well.
  if isinstance(value, bool) or not isinstance(value, str | int | float):
    raise ValueError(
      f'{where}: field {name!r} is {value!r}; it must be a text or a number.'
    )
  text = str(value)
  if not text.strip():
    raise ValueError(f'{where}: field {name!r} is empty; fill it in.')
  return text

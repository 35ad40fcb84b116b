"""Scorer of mathematical answers, by math-verify.

What is to be compared may take for ever to compute ('9^{9^{9^{9}}}'), and no
code inside the process can be relied on to stop it: run this scorer in worker
processes with a hard time limit. Its own time-outs, by signal, are off.
"""

from collections.abc import Mapping
import re
from typing import TYPE_CHECKING

import math_verify

if TYPE_CHECKING:
  from llamarl_jax.types import FinishReason
  from llamarl_jax.types import Problem

_ANSWER_TAG = re.compile(r'<answer>(.*?)</answer>', re.DOTALL | re.IGNORECASE)
_HASHES = re.compile(r'####[ \t]*([^\n]+)')
_BOXED = re.compile(r'\\(?:boxed|fbox)\s*\{')
# '2 1/2' is five halves; math-verify would read one, or three halves.
_MIXED_NUMBER = re.compile(
  r'(?<![\w.\\/^{-])(-?)\s*([0-9]{1,18})\s+([0-9]{1,18})\s*/\s*([0-9]{1,18})(?![\w.])'
)
# '18 dollars' in dollar signs would be 18 * d * o * l * ...
_UNIT_WORDS = re.compile(r'(?<=[0-9.%])\s+[A-Za-z]{3,}[A-Za-z .]*$')


def math_answer(
  problem: 'Problem',
  text: str,
  finish_reason: 'FinishReason',
  *,
  accept_truncated: bool = False,
  require_marker: bool = False,
) -> Mapping[str, float]:
  r"""Returns whether the final answer of `text` equals the expected one.

  The final answer is what the last marker says: <answer>...</answer>, a line
  after ####, or \boxed{...}. Without a marker it is the last mathematical
  expression that math-verify finds.

  Args:
    problem: what was asked.
    text: the completion.
    finish_reason: why it ended.
    accept_truncated: whether a completion cut by the length limit may count
      where no closed marker says that its answer is whole.
    require_marker: whether an answer without a marker counts for nothing.

  Returns:
    'correct': 1.0 or 0.0; 'parsed': whether there was an answer to compare.
  """
  marked = marked_answer(text)
  was_cut = finish_reason != 'stop' and not accept_truncated
  # A line after #### that runs to the very end may have gone on.
  is_open = marked is None or any(
    match.end() == len(text) for match in _HASHES.finditer(text)
  )
  if (was_cut and is_open) or (require_marker and marked is None):
    return {'correct': 0.0, 'parsed': 0.0}
  if marked is None:
    answer = _parse(_improper(text))
  else:
    answer = _parse(_wrapped(marked))
  expected = marked_answer(problem.answer) or problem.answer
  is_right = bool(answer) and math_verify.verify(
    _parse(_wrapped(expected)), answer, timeout_seconds=None
  )
  return {'correct': float(is_right), 'parsed': float(bool(answer))}


def marked_answer(text: str) -> str | None:
  """Returns what the last marker in `text` marks, or None if there is none."""
  spans = [match.span(1) for match in _ANSWER_TAG.finditer(text)]
  spans += [match.span(1) for match in _HASHES.finditer(text)]
  spans += _boxed_spans(text)
  # A span may hold another, as in <answer>\boxed{5}</answer>: the last to end
  # is the outer one, and the recursion opens it.
  if not spans:
    return None
  start, stop = max(spans, key=lambda span: span[1])
  inner = text[start:stop].strip()
  return marked_answer(inner) or inner


def _boxed_spans(text: str) -> list[tuple[int, int]]:
  r"""Returns the insides of \boxed{...}, braces counted; unclosed ones not."""
  spans = []
  stop = 0
  for match in _BOXED.finditer(text):
    if match.start() < stop:
      continue  # Inside the one before.
    depth = 1
    for i in range(match.end(), len(text)):
      depth += {'{': 1, '}': -1}.get(text[i], 0)
      if depth == 0:
        stop = i + 1
        spans.append((match.end(), i))
        break
  return spans


def _wrapped(answer: str) -> str:
  """Returns a bare answer in dollar signs, as math-verify needs it."""
  bare = answer.strip().strip('$').strip()
  bare = _UNIT_WORDS.sub('', bare)
  return f'${_improper(bare)}$'


def _improper(text: str) -> str:
  """Returns `text` with mixed numbers such as '2 1/2' as '5/2'."""

  def fraction(match: re.Match[str]) -> str:
    sign, whole, numerator, denominator = match.groups()
    total = int(whole) * int(denominator) + int(numerator)
    return f'{sign}{total}/{denominator}'

  return _MIXED_NUMBER.sub(fraction, text)


def _parse(text: str) -> list:
  return math_verify.parse(text, parsing_timeout=None)

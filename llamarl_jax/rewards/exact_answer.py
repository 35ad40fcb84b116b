"""Scorers that compare a completion with the expected answer as it stands.

A completion cut by the length limit may end in the middle of a number;
whether such a one can be right is said by `accept_truncated`.
"""

from collections.abc import Mapping
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from llamarl_jax.types import FinishReason
  from llamarl_jax.types import Problem

# An integer, perhaps with thousands separators, perhaps with decimals. The
# second minus is the typographic one. [0-9], as \d matches other scripts too.
_NUMBER = re.compile(
  '(?P<sign>[-\N{MINUS SIGN}+]?)'
  '(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)'
  r'(?P<decimals>\.[0-9]+)?'
)


def first_number(
  problem: 'Problem',
  text: str,
  finish_reason: 'FinishReason',
  *,
  accept_truncated: bool = True,
) -> Mapping[str, float]:
  """Returns whether the first number in `text` is the answer.

  Args:
    problem: with an integer as its answer.
    text: the completion.
    finish_reason: why it ended.
    accept_truncated: whether a number may count that runs to the very end of a
      completion cut by the length limit, and so might have gone on. True suits
      prompts to which any short answer is the whole answer.

  Returns:
    'correct': 1.0 or 0.0.

  Raises:
    ValueError: if the expected answer is not an integer.
  """
  expected = _NUMBER.fullmatch(problem.answer.strip())
  if expected is None or _integer(expected) is None:
    raise ValueError(
      f'Problem {problem.index}: the answer {problem.answer!r} is not an '
      "integer; use the reward 'exact' or 'math'."
    )
  found = _NUMBER.search(text)
  if found is None:
    return {'correct': 0.0}
  was_cut = finish_reason != 'stop' and found.end() == len(text)
  is_right = _integer(found) == _integer(expected)
  return {'correct': float(is_right and (accept_truncated or not was_cut))}


def exact(
  problem: 'Problem',
  text: str,
  finish_reason: 'FinishReason',
  *,
  accept_truncated: bool = False,
) -> Mapping[str, float]:
  """Returns whether `text` is the answer, white space around it aside.

  Args:
    problem: what was asked.
    text: the completion.
    finish_reason: why it ended.
    accept_truncated: whether a completion cut by the length limit may count.

  Returns:
    'correct': 1.0 or 0.0.
  """
  is_whole = accept_truncated or finish_reason == 'stop'
  return {'correct': float(is_whole and text.strip() == problem.answer.strip())}


def _integer(number: re.Match[str]) -> str | None:
  """Returns the canonical digits of an integer, None for a true fraction.

  Compared as digits: a completion may hold more of them than int() accepts.
  """
  if (number['decimals'] or '.').strip('.0'):
    return None
  digits = number['whole'].replace(',', '').lstrip('0')
  is_negative = number['sign'] not in ('', '+')
  return ('-' if is_negative and digits else '') + (digits or '0')

"""Scorer of the form of a completion, whatever its answer."""

from collections.abc import Mapping
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from llamarl_jax.types import FinishReason
  from llamarl_jax.types import Problem


def matches_format(
  problem: 'Problem',
  text: str,
  finish_reason: 'FinishReason',
  *,
  pattern: str,
  prefix: str = '',
) -> Mapping[str, float]:
  """Returns whether the completion has the wanted form.

  Args:
    problem: what was asked.
    text: the completion.
    finish_reason: why it ended; the pattern judges cut completions too.
    pattern: regular expression that the prefix and the completion together
      must match from end to end; a dot matches line ends.
    prefix: start of the answer that was part of the prompt, such as a
      prefilled '<think>': the completion does not repeat it.

  Returns:
    'format': 1.0 or 0.0.
  """
  del problem, finish_reason  # The form is a matter of the text alone.
  match = re.fullmatch(pattern, prefix + text, re.DOTALL)
  return {'format': float(match is not None)}

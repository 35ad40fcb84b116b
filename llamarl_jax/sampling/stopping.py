"""Stop strings: where the text of a completion ends it.

A stop string may begin and end inside tokens, so it is looked for in text, and
a token at a time: where a completion ends depends on its tokens alone, not on
the segments they came in.
"""

from collections.abc import Callable
from collections.abc import Sequence

# Tokens to ids' text; special tokens give none.
Decode = Callable[[Sequence[int]], str]

# A character may take so many tokens, one a byte; and some give no text.
_TOKENS_A_CHARACTER = 4
_SLACK = 16


def find_stop(
  tokens: Sequence[int],
  stop_strings: Sequence[str],
  decode: Decode,
  *,
  first: int,
) -> int | None:
  """Returns how many tokens there are when a stop string is complete.

  Args:
    tokens: of the completion.
    stop_strings: not empty strings.
    decode: gives the text of tokens.
    first: the least answer, at least 1; strings that are complete before are
      passed over.

  Returns:
    The first such number, at least `first`, or None.
  """
  longest = max(map(len, stop_strings), default=0)
  window = _TOKENS_A_CHARACTER * longest + _SLACK
  for count in range(first, len(tokens) + 1):
    recent = tokens[max(0, count - window) : count]
    text = decode(recent)
    found = [stop for stop in stop_strings if stop in text]
    if found:
      before = decode(recent[:-1])
      if any(text.count(stop) > before.count(stop) for stop in found):
        return count
  return None


def cut_text(
  tokens: Sequence[int], stop_strings: Sequence[str], decode: Decode
) -> str:
  """Returns the text of a completion, up to the stop string that ended it.

  Args:
    tokens: of the completion; the last completes a stop string.
    stop_strings: of its request; none for a completion that ended otherwise.
    decode: gives the text of tokens.
  """
  text = decode(tokens)
  if not stop_strings:
    return text
  before = decode(tokens[:-1])
  starts = [
    _find(text, stop, before.count(stop))
    for stop in stop_strings
    if text.count(stop) > before.count(stop)
  ]
  return text[: min(starts, default=len(text))]


def _find(text: str, part: str, index: int) -> int:
  """Returns where an occurrence of `part` begins, the first having index 0."""
  start = text.find(part)
  for _ in range(index):
    start = text.find(part, start + len(part))
  return start

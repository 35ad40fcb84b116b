"""Seeded arithmetic problems such as '12 + 34', answer '46'.

Training and held-out operands are disjoint, whatever the seed and the order of
the operands: neither 12 + 34 nor 34 - 12 is trained on if (12, 34) is held out.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import itertools
import math

from llamarl_jax.data import addressing
from llamarl_jax.data import chat
from llamarl_jax.data.addressing import Split
from llamarl_jax.types import Problem

_OPERATORS = ('+', '-', '*')
# Spaces of at most so many operand tuples are enumerated when a source is made.
_ENUMERATED = 20_000
_MAX_ATTEMPTS = 10_000

QUESTION_FORMATS = {'spaced': ' ', 'compact': ''}


# Operands, and the operators between them.
_Expression = tuple[tuple[int, ...], tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class _Space:
  """All expressions over given operands and operators, numbered."""

  ranges: tuple[range, ...]
  operators: tuple[str, ...]

  @property
  def num_tuples(self) -> int:
    """Number of operand tuples."""
    return math.prod(map(len, self.ranges))

  @property
  def size(self) -> int:
    """Number of expressions."""
    return self.num_tuples * len(self.operators) ** (len(self.ranges) - 1)

  def at(self, place: int) -> _Expression:
    """Returns the expression of a number in [0, size)."""
    operands = []
    for values in self.ranges:
      place, digit = divmod(place, len(values))
      operands.append(values[digit])
    operators = []
    for _ in self.ranges[1:]:
      place, digit = divmod(place, len(self.operators))
      operators.append(self.operators[digit])
    return tuple(operands), tuple(operators)


class ArithmeticSource:
  """Sums, differences and products of random integers.

  Training problems are drawn with replacement, endlessly. Held-out problems
  are distinct and the same for every seed.
  """

  def __init__(
    self,
    seed: int,
    *,
    operators: Sequence[str] = ('+', '-'),
    num_operands: int = 2,
    min_value: int | Sequence[int] = 0,
    max_value: int | Sequence[int] = 99,
    prompt_format: chat.PromptFormat | None = None,
    question_format: str = 'spaced',
    held_out_fraction: float = 0.1,
    uniform_digits: bool = False,
    non_negative: bool = False,
  ):
    """Makes a source.

    Args:
      seed: of the training stream.
      operators: subset of + - *; each place draws one of them.
      num_operands: operands a problem, at least 2.
      min_value: least operand, one for all or one for each.
      max_value: greatest operand, likewise; 99 for two digits.
      prompt_format: of field 'question'; the default is '{question} ='.
      question_format: 'spaced' ('12 + 34') or 'compact' ('12+34').
      held_out_fraction: share of operand tuples kept from training.
      uniform_digits: whether each operand's number of digits is drawn first,
        then its value. Otherwise values are uniform, and with 0 .. 99 nine
        operands of ten have two digits. Held-out problems take the numbers of
        digits in turn, as long as there are distinct ones.
      non_negative: leave out problems whose answer is below 0.

    Raises:
      ValueError: if an argument is out of range, or the operands are so few
        that one of the splits would be empty.
    """
    _check(operators, num_operands, question_format, held_out_fraction)
    self._seed = seed
    lows = _per_operand('min_value', min_value, num_operands)
    highs = _per_operand('max_value', max_value, num_operands)
    if any(low > high for low, high in zip(lows, highs, strict=True)):
      raise ValueError(
        f'min_value={min_value} is above max_value={max_value}: swap them.'
      )
    ranges = [range(a, b + 1) for a, b in zip(lows, highs, strict=True)]
    choices = [_by_digits(r) if uniform_digits else [r] for r in ranges]
    # One, or one for each combination of numbers of digits; equally likely.
    self._spaces = [
      _Space(combination, tuple(operators))
      for combination in itertools.product(*choices)
    ]
    self._separator = QUESTION_FORMATS[question_format]
    self._prompt_format = prompt_format or chat.PlainPrompt('{question} =')
    self._held_out_fraction = held_out_fraction
    self._non_negative = non_negative
    self._num_held_out: int | None = None
    if sum(space.num_tuples for space in self._spaces) <= _ENUMERATED:
      self._num_held_out = self._count_held_out()
    # A cache of the walk over the held-out problems, not a state: it gives the
    # same problems in whatever order they are asked for.
    self._held_out: list[_Expression] = []
    self._walk = self._walk_held_out()

  def num_problems(self, split: Split | str) -> int | None:
    """Returns how many problems there are, None for endless or too many."""
    return None if Split(split) is Split.TRAIN else self._num_held_out

  def problem(self, split: Split | str, index: int) -> Problem:
    """Returns problem `index` of a split.

    Raises:
      ValueError: if there is no such problem.
    """
    if index < 0:
      raise ValueError(f'index={index} must not be negative.')
    if Split(split) is Split.TRAIN:
      operands, operators = self._train(index)
    else:
      operands, operators = self._held_out_at(index)
    question = self._question(operands, operators)
    return Problem(
      index=index,
      prompt=self._prompt_format.render({'question': question}),
      answer=str(evaluate(operands, operators)),
      question=question,
    )

  def _train(self, index: int) -> _Expression:
    for attempt in range(_MAX_ATTEMPTS):
      place = addressing.draw(self._seed, 'arithmetic', index, attempt)
      place, choice = divmod(place, len(self._spaces))
      space = self._spaces[choice]
      expression = space.at(place % space.size)
      if self._is_asked(expression) and not self._is_held_out(expression[0]):
        return expression
    raise ValueError(
      f'No training problem in {_MAX_ATTEMPTS} draws: lower '
      f'held_out_fraction={self._held_out_fraction}.'
    )

  def _held_out_at(self, index: int) -> _Expression:
    while len(self._held_out) <= index:
      expression = next(self._walk, None)
      if expression is None:
        raise ValueError(
          f'There are {len(self._held_out)} held-out problems, index {index} '
          'was asked for: ask for fewer, widen the operands or raise '
          f'held_out_fraction={self._held_out_fraction}.'
        )
      self._held_out.append(expression)
    return self._held_out[index]

  def _walk_held_out(self) -> Iterator[_Expression]:
    """Yields each held-out problem once, from the spaces in turn."""
    walks = [self._walk_space(i) for i in range(len(self._spaces))]
    for expressions in itertools.zip_longest(*walks):
      yield from (e for e in expressions if e is not None)

  def _walk_space(self, choice: int) -> Iterator[_Expression]:
    space = self._spaces[choice]
    for i in range(space.size):
      place = addressing.permuted(i, space.size, 'arithmetic', choice)
      expression = space.at(place)
      if self._is_asked(expression) and self._is_held_out(expression[0]):
        yield expression

  def _is_asked(self, expression: _Expression) -> bool:
    return not self._non_negative or evaluate(*expression) >= 0

  def _is_held_out(self, operands: Sequence[int]) -> bool:
    return addressing.is_held_out(
      self._held_out_fraction, 'arithmetic', *sorted(operands)
    )

  def _count_held_out(self) -> int:
    num_tuples = num_held_out = count = 0
    for space in self._spaces:
      held = sum(map(self._is_held_out, itertools.product(*space.ranges)))
      num_held_out += held
      num_tuples += space.num_tuples
      if self._non_negative:
        walk = self._walk_space(self._spaces.index(space))
        count += sum(1 for _ in walk)
      else:
        count += held * (space.size // space.num_tuples)
    if num_held_out == num_tuples or (
      num_held_out == 0 and self._held_out_fraction > 0
    ):
      empty = 'training' if num_held_out else 'held-out'
      raise ValueError(
        f'held_out_fraction={self._held_out_fraction} of {num_tuples} operand '
        f'tuples leaves no {empty} problem: widen min_value..max_value or '
        'change the fraction.'
      )
    return count

  def _question(self, operands: Sequence[int], operators: Sequence[str]) -> str:
    parts = [str(operands[0])]
    for operator, operand in zip(operators, operands[1:], strict=True):
      # '3 - -4' would be hard to read, and '3--4' is ambiguous.
      parts += [operator, f'({operand})' if operand < 0 else str(operand)]
    return self._separator.join(parts)


def evaluate(operands: Sequence[int], operators: Sequence[str]) -> int:
  """Returns the value of the expression; products bind first.

  Args:
    operands: at least one.
    operators: those between the operands, one fewer.
  """
  terms = [operands[0]]
  for operator, operand in zip(operators, operands[1:], strict=True):
    if operator == '*':
      terms[-1] *= operand
    else:
      terms.append(operand if operator == '+' else -operand)
  return sum(terms)


def _check(
  operators: Sequence[str],
  num_operands: int,
  question_format: str,
  held_out_fraction: float,
) -> None:
  if not operators or not set(operators) <= set(_OPERATORS):
    raise ValueError(f'operators={operators!r} must be some of {_OPERATORS}.')
  if len(set(operators)) < len(operators):
    raise ValueError(f'operators={operators!r} must not repeat one.')
  if num_operands < 2:
    raise ValueError(f'num_operands={num_operands} must be at least 2.')
  if question_format not in QUESTION_FORMATS:
    raise ValueError(
      f'question_format={question_format!r} must be one of '
      f'{sorted(QUESTION_FORMATS)}.'
    )
  if not 0 <= held_out_fraction < 1:
    raise ValueError(
      f'held_out_fraction={held_out_fraction} must be in [0, 1).'
    )


def _per_operand(
  name: str, value: int | Sequence[int], num_operands: int
) -> tuple[int, ...]:
  if isinstance(value, int):
    return (value,) * num_operands
  if len(value) != num_operands:
    raise ValueError(
      f'{name}={value!r} must be one integer or {num_operands} of them, one '
      'for each operand.'
    )
  return tuple(value)


def _by_digits(values: range) -> list[range]:
  """Returns the parts of a range with 1, 2, ... digits, those not empty."""
  if values.start < 0:
    raise ValueError(
      f'uniform_digits is for operands from 0 on, not from {values.start}: '
      'raise min_value.'
    )
  parts = []
  for num_digits in range(1, len(str(values.stop - 1)) + 1):
    first = 10 ** (num_digits - 1) if num_digits > 1 else 0
    part = range(max(first, values.start), min(10**num_digits, values.stop))
    if part:
      parts.append(part)
  return parts

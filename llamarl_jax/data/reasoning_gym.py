"""Problems and scores of reasoning-gym, an optional extra.

Its generators are seeded; training and held-out problems are told apart by a
hash of the question, so that both draw from one distribution and none is in
both.
"""

from collections.abc import Mapping
import functools
import importlib
import importlib.util
import json
import logging
from typing import TYPE_CHECKING
from typing import Any

from llamarl_jax.data import addressing
from llamarl_jax.data import chat
from llamarl_jax.data.addressing import Split
from llamarl_jax.types import Problem

if TYPE_CHECKING:
  from llamarl_jax.types import FinishReason

_MAX_ATTEMPTS = 1_000
_NUM_PLACES = 2**31 - 1


class ReasoningGymSource:
  """Endless problems of one of its generators."""

  def __init__(
    self,
    seed: int,
    *,
    dataset: str,
    options: Mapping[str, Any] | None = None,
    prompt_format: chat.PromptFormat | None = None,
    held_out_fraction: float = 0.1,
  ):
    """Makes a source.

    Args:
      seed: of the training stream; held-out problems are the same for all.
      dataset: name of the generator, such as 'chain_sum'.
      options: of the generator, without seed and size.
      prompt_format: of field 'question'; the default is '{question}'.
      held_out_fraction: share of questions kept from training.

    Raises:
      ImportError: if reasoning-gym is not installed.
      ValueError: if the generator does not exist or refuses its options.
    """
    if not 0 <= held_out_fraction < 1:
      raise ValueError(
        f'held_out_fraction={held_out_fraction} must be in [0, 1).'
      )
    self._seed = seed
    self._dataset = dataset
    self._options = dict(options or {})
    self._generator = _generator(dataset, json.dumps(self._options))
    self._prompt_format = prompt_format or chat.PlainPrompt('{question}')
    self._held_out_fraction = held_out_fraction
    # Caches of the walk to the held-out problems.
    self._held_out: dict[str, Mapping[str, Any]] = {}
    self._walked = 0

  def num_problems(self, split: Split | str) -> int | None:
    """Returns None: generators have no end."""
    Split(split)
    return None

  def problem(self, split: Split | str, index: int) -> Problem:
    """Returns problem `index` of a split.

    Raises:
      ValueError: if the generator has too few different questions.
    """
    if index < 0:
      raise ValueError(f'index={index} must not be negative.')
    if Split(split) is Split.TRAIN:
      entry = self._train(index)
    else:
      entry = self._walk_held_out(index)
    return Problem(
      index=index,
      prompt=self._prompt_format.render({'question': entry['question']}),
      answer=str(entry['answer']),
      question=entry['question'],
      metadata={
        'dataset': self._dataset,
        'options': json.dumps(self._options),
        'entry': entry,
      },
    )

  def _train(self, index: int) -> Mapping[str, Any]:
    for attempt in range(_MAX_ATTEMPTS):
      entry = self._entry(self._seed, index, attempt)
      if not self._is_held_out(entry):
        return entry
    raise ValueError(
      f'{self._dataset}: no training problem in {_MAX_ATTEMPTS} draws; lower '
      f'held_out_fraction={self._held_out_fraction}.'
    )

  def _walk_held_out(self, index: int) -> Mapping[str, Any]:
    misses = 0
    while len(self._held_out) <= index:
      entry = self._entry('held_out', self._walked)
      self._walked += 1
      if self._is_held_out(entry) and entry['question'] not in self._held_out:
        self._held_out[entry['question']] = entry
        misses = 0
      else:
        misses += 1
      if misses == _MAX_ATTEMPTS:
        raise ValueError(
          f'{self._dataset}: {len(self._held_out)} held-out problems, then '
          f'none in {misses} draws, but index {index} was asked for: ask for '
          f'fewer or raise held_out_fraction={self._held_out_fraction}.'
        )
    return list(self._held_out.values())[index]

  def _entry(self, *address: int | str) -> Mapping[str, Any]:
    place = addressing.draw('reasoning_gym', *address) % _NUM_PLACES
    return self._generator[place]

  def _is_held_out(self, entry: Mapping[str, Any]) -> bool:
    return addressing.is_held_out(
      self._held_out_fraction, 'reasoning_gym', entry['question']
    )


def score_reasoning_gym(
  problem: Problem,
  text: str,
  finish_reason: 'FinishReason',
  *,
  accept_truncated: bool = False,
) -> Mapping[str, float]:
  """Returns whether reasoning-gym gives the answer its full score.

  It gives wrong answers partial credit, which is not counted. Some of its
  scorers raise on junk or never return: run this in workers with a time limit;
  what they raise is logged and counted by the reward executor.

  Args:
    problem: of a ReasoningGymSource.
    text: the completion; where it holds <answer>...</answer>, the inside of
      the last one is the answer.
    finish_reason: why it ended.
    accept_truncated: whether a completion cut by the length limit may count.

  Returns:
    'correct': 1.0 or 0.0.
  """
  if finish_reason != 'stop' and not accept_truncated:
    return {'correct': 0.0}
  generator = _generator(
    problem.metadata['dataset'], problem.metadata['options']
  )
  answer = text.rpartition('<answer>')[2].partition('</answer>')[0].strip()
  score = generator.score_answer(answer, problem.metadata['entry'])
  return {'correct': float(score == 1.0)}


@functools.lru_cache(maxsize=16)
def _generator(dataset: str, options: str) -> Any:
  """Returns the generator; made once a process, options as JSON."""
  if importlib.util.find_spec('reasoning_gym') is None:
    raise ImportError(
      'reasoning-gym is not installed: run '
      "pip install 'llamarl_jax[reasoning-gym]' (it needs a C compiler)."
    )
  module = importlib.import_module('reasoning_gym')
  logging.getLogger(__name__).debug('Generator %s(%s)', dataset, options)
  try:
    # The place carries our seed, so theirs is fixed.
    return module.create_dataset(
      dataset, seed=0, size=_NUM_PLACES, **json.loads(options)
    )
  except (AssertionError, TypeError, ValueError) as error:
    raise ValueError(
      f'reasoning-gym refuses dataset={dataset!r} with options {options}: '
      f'{error}'
    ) from error

"""The reward executor: scores completions, in order, within a time limit.

Cheap scorers run inline. Those that hostile text can keep busy for ever run in
worker processes, each of which is killed and replaced when one completion
takes longer than its limit.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import concurrent.futures
import dataclasses
import logging
import multiprocessing
import time
from typing import Any

import pebble

from llamarl_jax.executors import scoring_worker
from llamarl_jax.executors.scoring_worker import Outcome
from llamarl_jax.types import Completion
from llamarl_jax.types import FinishReason
from llamarl_jax.types import Group
from llamarl_jax.types import Problem
from llamarl_jax.types import RewardFn
from llamarl_jax.types import Span
from llamarl_jax.types import Status
from llamarl_jax.types import StepReport
from llamarl_jax.types import Version

_TIMEOUT = 'timeout'
_FAILURE = 'failure'
_NUM_LOGGED_FAILURES = 5


class RewardExecutor:
  """Scores groups; implements `types.Executor`."""

  def __init__(
    self,
    reward_fn: RewardFn,
    *,
    num_workers: int = 0,
    time_limit_seconds: float = 5.0,
    worker_imports: Sequence[str] = ('math_verify',),
  ):
    """Starts the workers, if any.

    Args:
      reward_fn: gives the named parts, 'total' among them. With workers it is
        pickled, and sees problems and finish reasons with the fields and values
        of `types.Problem` and `types.FinishReason`, not the classes.
      num_workers: processes; 0 scores inline, without a time limit.
      time_limit_seconds: for scoring one completion, from when a worker takes
        it up: waiting for a worker does not count.
      worker_imports: modules a worker imports before it takes up anything.

    Raises:
      ValueError: if an argument is out of range.
    """
    if num_workers < 0:
      raise ValueError(f'num_workers={num_workers} must be 0 or more.')
    if time_limit_seconds <= 0:
      raise ValueError(
        f'time_limit_seconds={time_limit_seconds} must be positive.'
      )
    self._reward_fn = reward_fn
    self._scorer: _InlineScorer | _PoolScorer
    if num_workers:
      self._scorer = _PoolScorer(
        reward_fn, num_workers, time_limit_seconds, tuple(worker_imports)
      )
    else:
      self._scorer = _InlineScorer(reward_fn)
    self._counts = {'scored': 0, 'timeouts': 0, 'failures': 0}

  def step(
    self, inputs: Sequence[Group], commit_version: Version | None = None
  ) -> StepReport:
    """Scores groups.

    Args:
      inputs: groups with their completions.
      commit_version: of no meaning here, there being no weights.

    Returns:
      The groups in the same order, with rewards. A completion that could not be
      scored has 'total' 0 and 'timeout' or 'failure' 1.

    Raises:
      RuntimeError: if every completion of the step makes the scorer raise.
      ValueError: if the scorer gives no part 'total'.
    """
    del commit_version
    if not inputs:
      return StepReport(Status.STARVED)
    start = time.time()
    jobs = [
      (group.request.problem, completion)
      for group in inputs
      for completion in group.completions
    ]
    outcomes = list(self._scorer.score(jobs))
    rewards = self._rewards(jobs, outcomes)
    outputs = []
    first = 0
    for group in inputs:
      last = first + len(group.completions)
      outputs.append(
        dataclasses.replace(group, rewards=tuple(rewards[first:last]))
      )
      first = last
    metrics = _metrics(outputs)
    span = Span(
      'score',
      start,
      time.time(),
      {'completions': len(jobs), 'timeouts': int(metrics['timeouts'])},
    )
    return StepReport(Status.PROGRESSED, outputs, metrics, (span,))

  def state(self) -> Mapping[str, Any]:
    """Returns the counts so far."""
    return dict(self._counts)

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continues counting from `state`."""
    self._counts = {name: int(state[name]) for name in self._counts}

  def close(self) -> None:
    """Stops the workers; may be called twice."""
    self._scorer.close()

  def _rewards(
    self,
    jobs: Sequence[tuple[Problem, Completion]],
    outcomes: Sequence[Outcome],
  ) -> list[Mapping[str, float]]:
    """Returns the parts of each completion, every part named in all."""
    failures = [o.failure for o in outcomes if o.failure]
    raised = [failure for failure in failures if failure != _TIMEOUT]
    if len(raised) == len(outcomes):
      raise RuntimeError(
        f'The scorer fails on all {len(raised)} completions of a step, first '
        f'with {raised[0]}: correct the reward or the problem source.'
      )
    for (problem, completion), outcome in zip(jobs, outcomes, strict=True):
      if outcome.failure and self._counts['failures'] < _NUM_LOGGED_FAILURES:
        logging.getLogger(__name__).warning(
          'Scored 0: problem %d, completion %r: %s',
          problem.index,
          completion.text[:200],
          outcome.failure,
        )
      is_timeout = outcome.failure == _TIMEOUT
      self._counts['scored'] += 1
      self._counts['timeouts'] += is_timeout
      self._counts['failures'] += bool(outcome.failure) and not is_timeout
    names = dict.fromkeys(name for o in outcomes for name in o.parts)
    if len(failures) < len(outcomes) and 'total' not in names:
      raise ValueError(
        f'The reward gives the parts {list(names)} and no total: put it into a '
        'rewards.combine.WeightedSum.'
      )
    zeros = dict.fromkeys([*names, 'total', _TIMEOUT, _FAILURE], 0.0)
    return [_with_failure(zeros, outcome) for outcome in outcomes]


def _with_failure(
  zeros: Mapping[str, float], outcome: Outcome
) -> Mapping[str, float]:
  parts = {**zeros, **{k: float(v) for k, v in outcome.parts.items()}}
  if outcome.failure:
    parts[_TIMEOUT if outcome.failure == _TIMEOUT else _FAILURE] = 1.0
  return parts


def _metrics(groups: Sequence[Group]) -> Mapping[str, float]:
  """Returns means of the parts, and what tells that something is wrong."""
  parts = [reward for group in groups for reward in group.rewards or ()]
  completions = [c for group in groups for c in group.completions]
  metrics = {
    f'reward/{name}': sum(p[name] for p in parts) / len(parts)
    for name in parts[0]
    if name not in (_TIMEOUT, _FAILURE)
  }
  cut = [c.finish_reason is not FinishReason.STOP for c in completions]
  equal = [len({r['total'] for r in g.rewards or ()}) == 1 for g in groups]
  return {
    **metrics,
    'timeouts': sum(p[_TIMEOUT] for p in parts),
    'scorer_failures': sum(p[_FAILURE] for p in parts),
    'truncated_fraction': sum(cut) / len(cut),
    'completion_tokens': sum(len(c.tokens) for c in completions) / len(cut),
    # Such groups teach nothing: all their advantages are zero.
    'equal_reward_fraction': sum(equal) / len(equal),
  }


class _InlineScorer:
  """Scores in this process, without a time limit."""

  def __init__(self, reward_fn: RewardFn):
    self._reward_fn = reward_fn

  def score(
    self, jobs: Sequence[tuple[Problem, Completion]]
  ) -> Iterator[Outcome]:
    """Yields the outcomes in order."""
    for problem, completion in jobs:
      yield scoring_worker.score(
        self._reward_fn,
        _fields(problem),
        completion.text,
        completion.finish_reason.value,
      )

  def close(self) -> None:
    """Has nothing to release."""


class _PoolScorer:
  """Scores in worker processes with a hard time limit."""

  def __init__(
    self,
    reward_fn: RewardFn,
    num_workers: int,
    time_limit_seconds: float,
    worker_imports: tuple[str, ...],
  ):
    self._reward_fn = reward_fn
    self._time_limit_seconds = time_limit_seconds
    # Spawned, not forked: this process may hold jax threads and Ray sockets.
    self._pool = pebble.ProcessPool(
      max_workers=num_workers,
      initializer=scoring_worker.prepare,
      initargs=(worker_imports,),
      context=multiprocessing.get_context('spawn'),
    )
    # The workers start with the first thing scheduled; let them start now.
    self._pool.schedule(scoring_worker.imported_modules)

  def score(
    self, jobs: Sequence[tuple[Problem, Completion]]
  ) -> Iterator[Outcome]:
    """Yields the outcomes in order."""
    # pebble's clock starts when a worker acknowledges that it took the job.
    futures = [
      self._pool.schedule(
        scoring_worker.score,
        args=(
          self._reward_fn,
          _fields(problem),
          completion.text,
          completion.finish_reason.value,
        ),
        timeout=self._time_limit_seconds,
      )
      for problem, completion in jobs
    ]
    for future in futures:
      try:
        yield future.result()
      except concurrent.futures.TimeoutError:
        yield Outcome({}, _TIMEOUT)
      except pebble.ProcessExpired as error:
        yield Outcome({}, f'worker died with exit code {error.exitcode}')

  def close(self) -> None:
    """Kills the workers."""
    self._pool.stop()
    self._pool.join()


def _fields(problem: Problem) -> Mapping[str, Any]:
  return {
    field.name: getattr(problem, field.name)
    for field in dataclasses.fields(problem)
  }

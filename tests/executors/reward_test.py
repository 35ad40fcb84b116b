import os
import pickle
import subprocess
import sys
import time

from absl.testing import absltest
import numpy as np

from llamarl_jax.executors import reward
from llamarl_jax.executors import scoring_worker
from llamarl_jax.rewards import catalog
from llamarl_jax.rewards import combine
from llamarl_jax.types import Completion
from llamarl_jax.types import FinishReason
from llamarl_jax.types import Group
from llamarl_jax.types import Problem
from llamarl_jax.types import Request
from llamarl_jax.types import Status
from llamarl_jax.types import Stream

HOSTILE = r'\boxed{9^{9^{9^{9}}}}'
LIMIT_SECONDS = 1.5


def _group(index, answer, *texts, reasons=None):
  problem = Problem(index, 'p', answer, metadata={'line': index})
  request = Request(index, Stream.TRAIN, problem, (1,), len(texts), 1.0, 4)
  reasons = reasons or [FinishReason.STOP] * len(texts)
  completions = tuple(
    Completion(
      index,
      i,
      np.zeros(i + 1, np.int32),
      np.zeros(i + 1, np.float32),
      np.zeros(i + 1, np.int32),
      reason,
      text,
    )
    for i, (text, reason) in enumerate(zip(texts, reasons, strict=True))
  )
  return Group(request, completions)


def _weighted(name):
  return combine.WeightedSum((catalog.make_reward(name),), {'correct': 1.0})


def _totals(report):
  return [[r['total'] for r in group.rewards] for group in report.outputs]


def _sleep(problem, text, finish_reason):
  time.sleep(float(text))
  return {'total': 1.0}


def _crash(problem, text, finish_reason):
  if text == 'crash':
    os._exit(7)
  if text == 'raise':
    raise ValueError('junk')
  return {'total': 1.0}


class InlineTest(absltest.TestCase):
  def test_scores_stay_with_their_completions(self):
    executor = reward.RewardExecutor(_weighted('first_number'))
    groups = [
      _group(4, '1', '1', '2', '1'),
      _group(2, '2', '1', '2'),
      _group(3, '3', '3'),
    ]
    report = executor.step(groups, None)
    self.assertEqual(report.status, Status.PROGRESSED)
    self.assertEqual(_totals(report), [[1, 0, 1], [0, 1], [1]])
    for given, scored in zip(groups, report.outputs, strict=True):
      self.assertIs(scored.request, given.request)
      self.assertIs(scored.completions, given.completions)

  def test_metrics(self):
    executor = reward.RewardExecutor(_weighted('first_number'))
    cut = [FinishReason.LENGTH, FinishReason.STOP]
    report = executor.step(
      [_group(0, '1', '1', '2', reasons=cut), _group(1, '1', '1', '1')], None
    )
    # Three of four right; one of four cut; one group of two without contrast;
    # completions of one and two tokens.
    self.assertEqual(
      report.metrics,
      {
        'reward/correct': 0.75,
        'reward/total': 0.75,
        'timeouts': 0.0,
        'scorer_failures': 0.0,
        'truncated_fraction': 0.25,
        'completion_tokens': 1.5,
        'equal_reward_fraction': 0.5,
      },
    )
    (span,) = report.spans
    self.assertEqual(span.name, 'score')
    self.assertLessEqual(span.start, span.stop)

  def test_starved(self):
    executor = reward.RewardExecutor(_weighted('exact'))
    self.assertEqual(executor.step((), None).status, Status.STARVED)

  def test_scorer_that_raises_scores_zero_and_is_counted(self):
    executor = reward.RewardExecutor(_crash)
    with self.assertLogs('llamarl_jax.executors.reward', 'WARNING') as logs:
      report = executor.step([_group(5, '1', 'fine', 'raise')], None)
    self.assertEqual(
      report.outputs[0].rewards,
      (
        {'total': 1.0, 'timeout': 0.0, 'failure': 0.0},
        {'total': 0.0, 'timeout': 0.0, 'failure': 1.0},
      ),
    )
    self.assertEqual(report.metrics['scorer_failures'], 1)
    self.assertIn("problem 5, completion 'raise': ValueError", logs.output[0])

  def test_scorer_that_always_raises_is_an_error(self):
    executor = reward.RewardExecutor(_crash)
    with self.assertRaisesRegex(RuntimeError, 'all 2 .* ValueError: junk'):
      executor.step([_group(0, '1', 'raise', 'raise')], None)

  def test_reward_without_total(self):
    executor = reward.RewardExecutor(catalog.make_reward('exact'))
    with self.assertRaisesRegex(ValueError, 'no total'):
      executor.step([_group(0, '1', '1')], None)

  def test_state(self):
    executor = reward.RewardExecutor(_weighted('exact'))
    executor.step([_group(0, '1', '1', '2')], None)
    other = reward.RewardExecutor(_weighted('exact'))
    other.restore(pickle.loads(pickle.dumps(executor.state())))
    self.assertEqual(other.state(), {'scored': 2, 'timeouts': 0, 'failures': 0})

  def test_bad_arguments(self):
    with self.assertRaisesRegex(ValueError, 'num_workers=-1'):
      reward.RewardExecutor(_weighted('exact'), num_workers=-1)
    with self.assertRaisesRegex(ValueError, 'time_limit_seconds=0'):
      reward.RewardExecutor(_weighted('exact'), time_limit_seconds=0)


class PoolTest(absltest.TestCase):
  def _executor(self, reward_fn, num_workers, limit=LIMIT_SECONDS):
    executor = reward.RewardExecutor(
      reward_fn, num_workers=num_workers, time_limit_seconds=limit
    )
    self.addCleanup(executor.close)
    return executor

  def test_hostile_answer_is_killed_and_its_neighbors_scored(self):
    executor = self._executor(_weighted('math'), 2)
    groups = [
      _group(0, '1/2', r'\boxed{0.5}', HOSTILE, '#### 3'),
      _group(1, '7', HOSTILE, '#### 7', '7'),
    ]
    with self.assertLogs('llamarl_jax.executors.reward', 'WARNING'):
      report = executor.step(groups, None)
    self.assertEqual(_totals(report), [[1, 0, 0], [0, 1, 1]])
    timeouts = [[r['timeout'] for r in g.rewards] for g in report.outputs]
    self.assertEqual(timeouts, [[0, 1, 0], [1, 0, 0]])
    self.assertEqual(report.metrics['timeouts'], 2)
    names = {tuple(r) for group in report.outputs for r in group.rewards}
    self.assertLen(names, 1)
    # The workers were replaced.
    report = executor.step([_group(2, '7', '#### 7', '#### 8')], None)
    self.assertEqual(_totals(report), [[1, 0]])
    executor.close()
    executor.close()

  def test_waiting_for_a_worker_does_not_count(self):
    # One worker; the last of five waits for 2 s, longer than its limit.
    executor = self._executor(_sleep, 1)
    report = executor.step([_group(0, '', *['0.5'] * 5)], None)
    self.assertEqual(_totals(report), [[1] * 5])

  def test_worker_that_dies_scores_zero(self):
    executor = self._executor(_crash, 1)
    with self.assertLogs('llamarl_jax.executors.reward', 'WARNING') as logs:
      report = executor.step(
        [_group(0, '', 'fine', 'crash', 'fine', 'raise')], None
      )
    self.assertEqual(_totals(report), [[1, 0, 1, 0]])
    self.assertEqual(report.metrics['scorer_failures'], 2)
    self.assertIn('exit code 7', logs.output[0])

  def test_workers_do_not_need_jax(self):
    # A worker unpickles the scorer and the function that calls it.
    reward_fn = _weighted('math')
    job = pickle.dumps((scoring_worker.score, reward_fn))
    program = (
      f'import pickle, sys; pickle.loads({job!r}); '
      "sys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, '-c', program], check=True)

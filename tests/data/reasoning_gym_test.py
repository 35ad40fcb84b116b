import importlib.util
import pickle

from absl.testing import absltest
import pytest

from llamarl_jax.data import reasoning_gym
from llamarl_jax.data import sources
from llamarl_jax.types import FinishReason
from llamarl_jax.types import Problem

IS_INSTALLED = importlib.util.find_spec('reasoning_gym') is not None


class _Generator:
  """Stands in for one of the package: partial credit, and a fit on junk."""

  def __getitem__(self, place):
    return {
      'question': f'{place % 97}?',
      'answer': str(place % 97),
      'metadata': {'place': place},
    }

  def score_answer(self, answer, entry):
    return 1.0 if int(answer) == int(entry['answer']) else 0.5


class ReasoningGymTest(absltest.TestCase):
  @pytest.fixture(autouse=True)
  def _fake(self, monkeypatch):
    self.monkeypatch = monkeypatch

  def _source(self, seed=0):
    self.monkeypatch.setattr(
      reasoning_gym, '_generator', lambda dataset, options: _Generator()
    )
    return reasoning_gym.ReasoningGymSource(seed, dataset='fake')

  def test_splits_are_disjoint(self):
    source = self._source()
    train = {source.problem('train', i).question for i in range(500)}
    held_out = [source.problem('held_out', i).question for i in range(5)]
    self.assertLen(set(held_out), 5)
    self.assertEmpty(train & set(held_out))
    # Of 97 questions there are no 50 held out at a tenth.
    with self.assertRaisesRegex(ValueError, 'index 50 was asked for'):
      source.problem('held_out', 50)

  def test_addressed_by_index(self):
    first = self._source().problem('train', 20)
    self.assertEqual(self._source().problem('train', 20), first)
    self.assertEqual(pickle.loads(pickle.dumps(first)), first)

  def test_partial_credit_counts_for_nothing(self):
    self._source()
    problem = Problem(
      0,
      '',
      '7',
      metadata={'dataset': 'fake', 'options': '{}', 'entry': {'answer': '7'}},
    )
    for text, finish_reason, expected in (
      ('7', FinishReason.STOP, 1.0),
      ('so <answer> 7 </answer>', FinishReason.STOP, 1.0),
      ('8', FinishReason.STOP, 0.0),
      ('7', FinishReason.LENGTH, 0.0),
    ):
      parts = reasoning_gym.score_reasoning_gym(problem, text, finish_reason)
      self.assertEqual(parts, {'correct': expected})
    with self.assertRaisesRegex(ValueError, 'invalid literal'):
      reasoning_gym.score_reasoning_gym(problem, 'junk', FinishReason.STOP)

  @pytest.mark.skipif(IS_INSTALLED, reason='reasoning-gym is installed.')
  def test_absent_package(self):
    with self.assertRaisesRegex(
      ImportError, r"pip install 'llamarl_jax\[reasoning-gym\]'"
    ):
      sources.SOURCES['reasoning_gym'](0, dataset='chain_sum')

  @pytest.mark.skipif(
    not IS_INSTALLED, reason='reasoning-gym, an optional extra, is missing.'
  )
  def test_real_package(self):
    source = reasoning_gym.ReasoningGymSource(0, dataset='chain_sum')
    problem = source.problem('train', 3)
    parts = reasoning_gym.score_reasoning_gym(
      problem, problem.answer, FinishReason.STOP
    )
    self.assertEqual(parts, {'correct': 1.0})
    with self.assertRaisesRegex(ValueError, 'refuses'):
      reasoning_gym.ReasoningGymSource(0, dataset='no such generator')

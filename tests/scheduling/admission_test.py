"""Admission order, by itself and in a simulation with random delays."""

import heapq
import random

from absl.testing import parameterized
import pytest

from llamarl_jax.scheduling import admission


def _simulate(seed: int) -> tuple[int, int]:
  """Runs admission order against random delays of every part.

  Generating, training and publishing each take a random time; replicas commit
  a version only when its publication has reached them.

  Returns:
    The number of batches trained and the largest staleness of any group.
  """
  rng = random.Random(seed)
  rule = admission.AdmissionRule(
    batch_size=rng.randint(1, 4),
    num_batches=rng.randint(1, 6),
    max_staleness=rng.randint(0, 3),
  )
  capacities = [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]
  held = [0] * len(capacities)
  free = list(capacities)
  assembler: admission.BatchAssembler[int] = admission.BatchAssembler(rule)
  next_index = trained = worst = 0
  training = False
  events: list[tuple[float, int, str, tuple[int, ...]]] = []
  clock, ticket = 0.0, 0

  def after(kind: str, *facts: int) -> None:
    nonlocal ticket
    ticket += 1
    delay = rng.lognormvariate(0.0, 1.5)
    heapq.heappush(events, (clock + delay, ticket, kind, facts))

  while trained < rule.num_batches:
    for replica, version in enumerate(held):
      count = rule.num_admissible(next_index, version, free[replica])
      for index in range(next_index, next_index + count):
        assert rule.may_start(index, version)
        after('generated', replica, index, version)
      next_index += count
      free[replica] -= count
    if not training and assembler.ready():
      training = True
      worst = max([worst, *(trained - version for version in assembler.take())])
      after('trained')
    if not events:
      break  # Nothing is under way and nothing may start: a deadlock.
    clock, _, kind, facts = heapq.heappop(events)
    if kind == 'generated':
      replica, index, version = facts
      free[replica] += 1
      assembler.add(index, version)
    elif kind == 'trained':
      training = False
      trained += 1
      for replica in range(len(held)):
        after('published', replica, trained)
    else:
      replica, version = facts
      held[replica] = max(held[replica], version)
  assert trained == rule.num_batches, 'deadlock'
  assert next_index == rule.num_groups
  return trained, worst - rule.max_staleness


class AdmissionTest(parameterized.TestCase):
  def test_thousand_random_runs_neither_deadlock_nor_exceed_the_bound(self):
    excess = [_simulate(seed)[1] for seed in range(1000)]
    self.assertLessEqual(max(excess), 0)
    # The bound is reached, so the simulation does exercise staleness.
    self.assertIn(0, excess)

  @parameterized.parameters(
    # next, version, capacity -> admissible; N = 2, 3 batches, k = 1.
    (0, 0, 10, 4),
    (0, 0, 3, 3),
    (4, 0, 10, 0),
    (4, 1, 10, 2),
    (6, 9, 10, 0),
  )
  def test_counts(self, next_index, version, capacity, expected):
    rule = admission.AdmissionRule(batch_size=2, num_batches=3, max_staleness=1)
    self.assertEqual(
      rule.num_admissible(next_index, version, capacity), expected
    )

  def test_batches_come_in_order_whatever_the_order_of_completion(self):
    rule = admission.AdmissionRule(batch_size=2, num_batches=2, max_staleness=0)
    assembler = admission.BatchAssembler(rule)
    for index in (3, 1, 2):
      assembler.add(index, f'group {index}')
    self.assertFalse(assembler.ready())
    with pytest.raises(ValueError, match=r'batch 0 lacks groups \[0\]'):
      assembler.take()
    assembler.add(0, 'group 0')
    self.assertEqual(assembler.take(), ['group 0', 'group 1'])
    self.assertEqual(assembler.take(), ['group 2', 'group 3'])

  def test_a_group_completed_twice_is_refused(self):
    rule = admission.AdmissionRule(batch_size=1, num_batches=2, max_staleness=0)
    assembler = admission.BatchAssembler(rule)
    assembler.add(0, 'a')
    with pytest.raises(ValueError, match='group 0 was completed twice'):
      assembler.add(0, 'a')
    assembler.take()
    with pytest.raises(ValueError, match='group 0 was completed twice'):
      assembler.add(0, 'a')

  @parameterized.parameters(
    ({'batch_size': 0}, 'batch_size is 0'),
    ({'num_batches': -1}, 'num_batches is -1'),
    ({'max_staleness': -1}, 'max_staleness is -1'),
  )
  def test_bad_sizes_are_named(self, change, message):
    sizes = {'batch_size': 1, 'num_batches': 1, 'max_staleness': 0}
    with pytest.raises(ValueError, match=message):
      admission.AdmissionRule(**{**sizes, **change})

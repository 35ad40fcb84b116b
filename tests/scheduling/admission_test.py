"""Admission order by itself; controller/simulation_test.py has it at work."""

import json

from absl.testing import parameterized
import pytest

from llamarl_jax.scheduling import admission


class AdmissionTest(parameterized.TestCase):
  @parameterized.parameters(
    # index, version -> may start; N = 2, 3 batches, k = 1.
    (0, 0, True),
    (3, 0, True),
    (4, 0, False),
    (4, 1, True),
    (5, 1, True),
    (6, 9, False),
  )
  def test_may_start(self, index, version, expected):
    rule = admission.AdmissionRule(batch_size=2, num_batches=3, max_staleness=1)
    self.assertEqual(rule.may_start(index, version), expected)

  @parameterized.parameters(
    # index, replica, trainer, outstanding -> may start; N = 2, 3 batches,
    # k = 1.
    (0, 0, 0, 0, True),
    (3, 0, 0, 3, True),
    # Two batches are outstanding.
    (4, 0, 0, 4, False),
    (5, 1, 1, 3, True),
    # Two versions behind.
    (5, 0, 2, 0, False),
    # The replica may be ahead of what the controller has heard.
    (5, 3, 2, 0, True),
    (6, 3, 3, 0, False),
  )
  def test_may_start_in_completion_order(
    self, index, replica, trainer, outstanding, expected
  ):
    rule = admission.make_rule('completion', 2, 3, 1)
    started = rule.may_start(
      index, replica, trainer_version=trainer, num_outstanding=outstanding
    )
    self.assertEqual(started, expected)

  def test_an_unknown_order_is_refused(self):
    with pytest.raises(ValueError, match=r"'best'.*'admission', 'completion'"):
      admission.make_rule('best', 2, 3, 1)

  def test_batches_are_the_first_groups_to_complete(self):
    rule = admission.make_rule('completion', 2, 3, 1)
    assembler = admission.BatchAssembler(rule)
    assembler.add(3, 'd')
    self.assertFalse(assembler.ready())
    with pytest.raises(ValueError, match='batch 0 lacks groups that are'):
      assembler.take()
    for index, item in ((1, 'b'), (0, 'a'), (2, 'c')):
      assembler.add(index, item)
    self.assertEqual(assembler.take(), ['b', 'd'])
    with pytest.raises(ValueError, match='group 3 was completed twice'):
      assembler.add(3, 'd')
    self.assertEqual(assembler.take(), ['a', 'c'])
    self.assertFalse(assembler.ready())

  def test_what_was_trained_on(self):
    trained = admission.Trained()
    everything = set()
    for indices in ((1, 4), (0, 2), (3, 7)):
      trained = trained.add(indices)
      everything |= set(indices)
      self.assertLen(trained, len(everything))
      found = {i for i in range(10) if i in trained}
      self.assertEqual(found, everything)
      again = admission.Trained.restore(json.loads(json.dumps(trained.state())))
      self.assertEqual(again, trained)
    self.assertEqual(trained.below, 5)
    missing = [trained.first_missing(i) for i in range(9)]
    self.assertEqual(missing, [5, 5, 5, 5, 5, 5, 6, 8, 8])
    with pytest.raises(ValueError, match='group 7 was trained on twice'):
      trained.add([5, 7])

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

"""Admission order by itself; controller/simulation_test.py has it at work."""

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

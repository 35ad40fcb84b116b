"""Eight simulated devices compute what one does, under every kind of mesh."""

import itertools

import pytest

from tests.oracles import device_program
from tests.sharding import eight_devices as program

# Float32 sums in another order: each of the few hundred terms of a sum may be
# rounded once more or less, by 6e-8 of the largest. A wrong collective (a sum
# left out, a mean for a sum) is off by a factor.
_ROUNDING = 1e-5


@pytest.fixture(scope='module')
def results():
  return device_program.run(program.__file__, 8)


@pytest.mark.parametrize('case', program.CASES)
def test_forward_gradients_and_step_equal_one_device(results, case):
  assert results.keys() == set(program.CASES)
  difference = results[case]['difference']
  assert difference.keys() == {'log_probs', 'gradients', 'params'}
  for kind, error in difference.items():
    assert error < _ROUNDING, kind


@pytest.mark.parametrize('case', [c for c in program.CASES if 'fsdp' in c])
def test_fsdp_shares_the_batch(results, case):
  # Whatever is computed of tokens is [rows, tokens, ...], or has them merged.
  rows, length = program.ROWS, program.LENGTH
  whole = [
    shape
    for shape in results[case]['shapes']
    if rows * length in shape
    or (rows, length) in itertools.pairwise(shape[:-1])
  ]
  assert not whole


@pytest.mark.parametrize('case', [c for c in program.CASES if 'tensor' in c])
def test_tensor_never_gathers_the_vocabulary(results, case):
  shapes = results[case]['shapes']
  assert not [s for s in shapes if program.VOCABULARY in s]


@pytest.mark.parametrize('case', [c for c in program.CASES if 'sequence' in c])
def test_sequence_shares_the_queries(results, case):
  # Scores of attention are [..., queries, keys]: keys of a whole row, and
  # queries of half of it.
  shapes = results[case]['shapes']
  length = program.LENGTH
  assert [s for s in shapes if s[-2:] == [length // 2, length]]
  assert not [s for s in shapes if s.count(length) > 1]


def test_what_does_not_divide_is_reported(results):
  notes = results['indivisible, fsdp 2 x sequence 2 x tensor 2']['notes']
  assert (
    'layers/attention/query: heads of 9 does not divide over tensor=2; embed of'
    ' 48 is sharded instead'
  ) in notes
  assert not results['divisible, tensor 8']['notes']

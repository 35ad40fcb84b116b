"""Forced lengths: how many, which, and what they ask of the engine."""

import math

from absl.testing import absltest

from llamarl_jax import types
from llamarl_jax.controller import tails


def _request(index):
  return types.Request(
    admission_index=index,
    stream=types.Stream.TRAIN,
    problem=types.Problem(index, '', ''),
    prompt_tokens=(1,),
    num_samples=2,
    temperature=1.0,
    max_new_tokens=5,
    stop_strings=('stop',),
  )


class LongTailTest(absltest.TestCase):
  def test_the_share_is_that_of_independent_draws(self):
    count = 20_000
    for share in (0.0, 0.02, 0.3, 1.0):
      tail = tails.LongTail(0, share, 50)
      found = sum(tail.has(index) for index in range(count))
      deviation = math.sqrt(share * (1 - share) * count)
      self.assertLessEqual(abs(found - share * count), 4 * deviation)

  def test_which_ones_depends_on_the_seed(self):
    one, other = (tails.LongTail(seed, 0.5, 50) for seed in (0, 1))
    agreed = sum(one.has(i) == other.has(i) for i in range(1000))
    self.assertBetween(agreed, 400, 600)

  def test_lengths_are_forced_in_the_tail_alone(self):
    tail = tails.LongTail(0, 0.5, 50)
    for index in range(20):
      request = tail.apply(_request(index))
      if tail.has(index):
        self.assertEqual(request.min_new_tokens, 50)
        self.assertEqual(request.max_new_tokens, 50)
        self.assertEqual(request.stop_strings, ())
      else:
        self.assertEqual(request, _request(index))


if __name__ == '__main__':
  absltest.main()

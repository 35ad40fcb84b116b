"""pass@k against enumeration and closed form."""

import itertools

from absl.testing import parameterized
import pytest

from llamarl_jax.rewards import pass_at_k


class PassAtKTest(parameterized.TestCase):
  @parameterized.parameters((5, 2, 1), (5, 2, 3), (6, 1, 2), (4, 0, 2))
  def test_equals_the_share_of_subsets_with_a_right_one(self, n, c, k):
    outcomes = [True] * c + [False] * (n - c)
    subsets = list(itertools.combinations(outcomes, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    self.assertAlmostEqual(pass_at_k.pass_at_k(n, c, k), expected, places=12)

  def test_one_sample_is_plain_accuracy(self):
    self.assertEqual(pass_at_k.pass_at_k(8, 2, 1), 0.25)

  @parameterized.parameters((4, 1, 0), (4, 1, 5))
  def test_k_out_of_range_is_named(self, n, c, k):
    with pytest.raises(ValueError, match=f'k={k}'):
      pass_at_k.pass_at_k(n, c, k)

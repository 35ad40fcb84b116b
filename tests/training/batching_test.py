from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from llamarl_jax.training import batching
from llamarl_jax.training import facts
from tests.oracles import groups as groups_lib

_PAD = 9


class BatchingTest(parameterized.TestCase):
  @parameterized.parameters(
    # Versions of the completions: 3 3 4 | 4 | 2 | 4 4, at version 5.
    (1, [[0, 0, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0], [0] * 6, [0, 1, 1, 0, 0, 0]]),
    (
      2,
      [[0, 0, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0], [0] * 6, [0, 1, 1, 0, 0, 0]],
    ),
  )
  def test_old_tokens_are_left_out(self, age, expected):
    advantages = np.float32([[0.75, -0.75], [0.25, -0.25]])
    whole = batching.build_trajectories(
      groups_lib.literal_groups(), advantages, row_length=6, pad_token=_PAD
    )
    rows, left_out = batching.mask_old_tokens(whole, version=5, max_age=age)
    mask = np.array(expected, bool)
    np.testing.assert_array_equal(rows.completion_mask, mask)
    np.testing.assert_array_equal(rows.advantages, whole.advantages * mask)
    np.testing.assert_array_equal(rows.tokens, whole.tokens)
    # Of 7 tokens.
    self.assertAlmostEqual(left_out, 1 - mask.sum() / 7)

  def test_rows_are_the_literal_ones(self):
    advantages = np.float32([[0.75, -0.75], [0.25, -0.25]])
    rows = batching.build_trajectories(
      groups_lib.literal_groups(), advantages, row_length=6, pad_token=_PAD
    )

    np.testing.assert_array_equal(
      rows.tokens,
      [
        [7, 8, 1, 2, 3, 9],
        [7, 8, 5, 9, 9, 9],
        [6, 1, 9, 9, 9, 9],
        [6, 2, 4, 9, 9, 9],
      ],
    )
    mask = np.array(
      [
        [0, 0, 1, 1, 1, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
      ],
      bool,
    )
    np.testing.assert_array_equal(rows.completion_mask, mask)
    np.testing.assert_array_equal(
      rows.segment_ids,
      [
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
      ],
    )
    np.testing.assert_array_equal(
      rows.positions,
      [
        [0, 1, 2, 3, 4, 0],
        [0, 1, 2, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [0, 1, 2, 0, 0, 0],
      ],
    )
    np.testing.assert_array_equal(
      rows.behavior_log_probs, np.where(mask, -rows.tokens / 10, 0).astype('f4')
    )
    np.testing.assert_array_equal(
      rows.policy_version,
      [
        [0, 0, 3, 3, 4, 0],
        [0, 0, 4, 0, 0, 0],
        [0, 2, 0, 0, 0, 0],
        [0, 4, 4, 0, 0, 0],
      ],
    )
    np.testing.assert_array_equal(
      rows.advantages, np.where(mask, advantages.reshape(4, 1), 0)
    )
    np.testing.assert_array_equal(
      rows.reference_log_probs[mask], [-1, -2, -3, -4, -5, -6, -7]
    )
    self.assertIsNone(rows.proximal_log_probs)
    for name in ('tokens', 'segment_ids', 'positions', 'policy_version'):
      self.assertEqual(getattr(rows, name).dtype, np.int32)
    for name in ('behavior_log_probs', 'advantages', 'reference_log_probs'):
      self.assertEqual(getattr(rows, name).dtype, np.float32)

  def test_a_missing_completion_is_a_row_of_padding(self):
    first, second = groups_lib.literal_groups()
    only = second.completions[1:]
    groups = [
      first,
      groups_lib.group(5, [6], only, rewards=({'total': 2.0},), reference=None),
    ]
    rewards, valid = facts.group_rewards(groups)
    np.testing.assert_array_equal(rewards, [[1.5, 0], [0, 2]])
    np.testing.assert_array_equal(valid, [[True, True], [False, True]])

    rows = batching.build_trajectories(
      groups, np.ones((2, 2), np.float32), row_length=5, pad_token=_PAD
    )
    np.testing.assert_array_equal(rows.tokens[2], [9, 9, 9, 9, 9])
    self.assertEqual(rows.segment_ids[2].sum(), 0)
    np.testing.assert_array_equal(rows.tokens[3], [6, 2, 4, 9, 9])
    # One group without them is enough for none to be there.
    self.assertIsNone(rows.reference_log_probs)

  @parameterized.parameters((1, 5), (4, 8), (5, 5), (16, 16))
  def test_row_length(self, multiple, expected):
    self.assertEqual(
      batching.row_length(groups_lib.literal_groups(), multiple), expected
    )

  def test_bad_input_is_named(self):
    groups = groups_lib.literal_groups()
    ones = np.ones((2, 2), np.float32)
    build = batching.build_trajectories
    with self.assertRaisesRegex(ValueError, 'needs 5 tokens .* hold 4'):
      build(groups, ones, row_length=4, pad_token=_PAD)
    with self.assertRaisesRegex(ValueError, r'\(1, 2\).*2 groups of 2'):
      build(groups, ones[:1], row_length=8, pad_token=_PAD)
    with self.assertRaisesRegex(ValueError, 'empty prompt'):
      build(
        [groups_lib.group(0, [], groups[0].completions)],
        ones[:1],
        row_length=8,
        pad_token=_PAD,
      )
    with self.assertRaisesRegex(ValueError, 'multiple must be'):
      batching.row_length(groups, 0)


if __name__ == '__main__':
  absltest.main()

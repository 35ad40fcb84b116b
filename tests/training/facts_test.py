from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from llamarl_jax.training import facts
from tests.oracles import groups as groups_lib


class FactsTest(parameterized.TestCase):
  def test_an_empty_completion_is_not_valid(self):
    group = groups_lib.group(
      0,
      [6],
      [
        groups_lib.completion(0, 0, [], []),
        groups_lib.completion(0, 1, [2], [0]),
      ],
      rewards=({'total': 5.0}, {'total': np.nan}),
    )
    rewards, valid = facts.group_rewards([group])
    # What is not a number stays: the train step skips and counts it.
    np.testing.assert_array_equal(rewards, [[0, np.nan]])
    np.testing.assert_array_equal(valid, [[False, True]])

  def test_facts(self):
    advantages = np.float32([[0.75, -0.75], [0, 0]])
    values = facts.batch_facts(
      groups_lib.literal_groups(), advantages, version=5
    )
    # Token versions 3 3 4 | 4 | 2 | 4 4 under a trainer at 5.
    self.assertEqual(
      facts.staleness_counts(groups_lib.literal_groups(), 5), {1: 4, 2: 2, 3: 1}
    )
    self.assertEqual(
      values,
      {
        'reward_mean': 0.5,
        'reward_correct': 0.25,
        'accuracy': 0.25,
        'response_length_mean': 7 / 4,
        'response_length_max': 3.0,
        'truncated_completions': 0.25,
        'zero_advantage_fraction': 0.5,
        'staleness_mean': (4 * 1 + 2 * 2 + 1 * 3) / 7,
        'staleness_max': 3.0,
      },
    )

  def test_bad_input_is_named(self):
    groups = groups_lib.literal_groups()
    with self.assertRaisesRegex(ValueError, 'group 4 has no rewards'):
      facts.group_rewards([groups_lib.group(4, [7], groups[0].completions)])
    with self.assertRaisesRegex(ValueError, '1 rewards for 2 completions'):
      facts.group_rewards(
        [groups_lib.group(4, [7], groups[0].completions, ({'total': 1.0},))]
      )
    with self.assertRaisesRegex(ValueError, "without 'total'"):
      facts.group_rewards(
        [
          groups_lib.group(
            4, [7], groups[0].completions, ({'format': 1.0},) * 2
          )
        ]
      )
    with self.assertRaisesRegex(ValueError, r'sizes \[\]'):
      facts.group_size([])


if __name__ == '__main__':
  absltest.main()

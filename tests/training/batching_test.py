from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from llamarl_jax import types
from llamarl_jax.training import batching

_PAD = 9


def _completion(admission, sample, tokens, versions, reason='stop'):
  return types.Completion(
    admission_index=admission,
    sample_index=sample,
    tokens=np.array(tokens, np.int32),
    log_probs=-np.array(tokens, np.float32) / 10,
    versions=np.array(versions, np.int32),
    finish_reason=types.FinishReason(reason),
    text='',
  )


def _group(admission, prompt, completions, rewards=None, reference=None):
  return types.Group(
    request=types.Request(
      admission_index=admission,
      stream=types.Stream.TRAIN,
      problem=types.Problem(admission, '', ''),
      prompt_tokens=tuple(prompt),
      num_samples=2,
      temperature=1.0,
      max_new_tokens=3,
    ),
    completions=tuple(completions),
    rewards=rewards,
    reference_log_probs=reference,
  )


def _groups():
  """Two groups of two; unequal lengths, and a completion of one token."""
  return [
    _group(
      4,
      [7, 8],
      [
        _completion(4, 0, [1, 2, 3], [3, 3, 4], 'length'),
        _completion(4, 1, [5], [4]),
      ],
      ({'total': 1.5, 'correct': 1.0}, {'total': 0.0, 'correct': 0.0}),
      (np.float32([-1, -2, -3]), np.float32([-4])),
    ),
    _group(
      5,
      [6],
      [_completion(5, 0, [1], [2]), _completion(5, 1, [2, 4], [4, 4])],
      ({'total': 0.5, 'correct': 0.0}, {'total': 0.0, 'correct': 0.0}),
      (np.float32([-5]), np.float32([-6, -7])),
    ),
  ]


class BatchingTest(parameterized.TestCase):
  def test_rows_are_the_literal_ones(self):
    advantages = np.float32([[0.75, -0.75], [0.25, -0.25]])
    rows = batching.build_trajectories(
      _groups(), advantages, row_length=6, pad_token=_PAD
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
    first, second = _groups()
    only = second.completions[1:]
    groups = [
      first,
      _group(5, [6], only, rewards=({'total': 2.0},), reference=None),
    ]
    rewards, valid = batching.group_rewards(groups)
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

  def test_an_empty_completion_is_not_valid(self):
    group = _group(
      0,
      [6],
      [_completion(0, 0, [], []), _completion(0, 1, [2], [0])],
      rewards=({'total': 5.0}, {'total': np.nan}),
    )
    rewards, valid = batching.group_rewards([group])
    # What is not a number stays: the train step skips and counts it.
    np.testing.assert_array_equal(rewards, [[0, np.nan]])
    np.testing.assert_array_equal(valid, [[False, True]])

  @parameterized.parameters((1, 5), (4, 8), (5, 5), (16, 16))
  def test_row_length(self, multiple, expected):
    self.assertEqual(batching.row_length(_groups(), multiple), expected)

  def test_facts(self):
    advantages = np.float32([[0.75, -0.75], [0, 0]])
    facts = batching.batch_facts(_groups(), advantages, version=5)
    # Token versions 3 3 4 | 4 | 2 | 4 4 under a trainer at 5.
    self.assertEqual(
      batching.staleness_counts(_groups(), 5), {1: 4, 2: 2, 3: 1}
    )
    self.assertEqual(
      facts,
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
    groups = _groups()
    ones = np.ones((2, 2), np.float32)
    build = batching.build_trajectories
    with self.assertRaisesRegex(ValueError, 'needs 5 tokens .* hold 4'):
      build(groups, ones, row_length=4, pad_token=_PAD)
    with self.assertRaisesRegex(ValueError, r'\(1, 2\).*2 groups of 2'):
      build(groups, ones[:1], row_length=8, pad_token=_PAD)
    with self.assertRaisesRegex(ValueError, 'empty prompt'):
      build(
        [_group(0, [], groups[0].completions)],
        ones[:1],
        row_length=8,
        pad_token=_PAD,
      )
    with self.assertRaisesRegex(ValueError, 'group 4 has no rewards'):
      batching.group_rewards([_group(4, [7], groups[0].completions)])
    with self.assertRaisesRegex(ValueError, '1 rewards for 2 completions'):
      batching.group_rewards(
        [_group(4, [7], groups[0].completions, ({'total': 1.0},))]
      )
    with self.assertRaisesRegex(ValueError, "without 'total'"):
      batching.group_rewards(
        [_group(4, [7], groups[0].completions, ({'format': 1.0},) * 2)]
      )
    with self.assertRaisesRegex(ValueError, 'multiple must be'):
      batching.row_length(groups, 0)
    with self.assertRaisesRegex(ValueError, r'sizes \[\]'):
      batching.group_size([])


if __name__ == '__main__':
  absltest.main()

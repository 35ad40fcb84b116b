"""Finished groups, small enough to lay out by hand."""

import numpy as np

from llamarl_jax import types


def completion(admission, sample, tokens, versions, reason='stop'):
  """Returns a completion whose log-probs are - token / 10."""
  return types.Completion(
    admission_index=admission,
    sample_index=sample,
    tokens=np.array(tokens, np.int32),
    log_probs=-np.array(tokens, np.float32) / 10,
    versions=np.array(versions, np.int32),
    finish_reason=types.FinishReason(reason),
    text='',
  )


def group(admission, prompt, completions, rewards=None, reference=None):
  """Returns a group of two requested completions."""
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


def literal_groups():
  """Two groups of two; unequal lengths, and a completion of one token."""
  return [
    group(
      4,
      [7, 8],
      [
        completion(4, 0, [1, 2, 3], [3, 3, 4], 'length'),
        completion(4, 1, [5], [4]),
      ],
      ({'total': 1.5, 'correct': 1.0}, {'total': 0.0, 'correct': 0.0}),
      (np.float32([-1, -2, -3]), np.float32([-4])),
    ),
    group(
      5,
      [6],
      [completion(5, 0, [1], [2]), completion(5, 1, [2, 4], [4, 4])],
      ({'total': 0.5, 'correct': 0.0}, {'total': 0.0, 'correct': 0.0}),
      (np.float32([-5]), np.float32([-6, -7])),
    ),
  ]

"""What is known of the groups of a batch, beside their tokens."""

from collections.abc import Sequence

import numpy as np

from llamarl_jax.types import Completion
from llamarl_jax.types import FinishReason
from llamarl_jax.types import Group

# Names of reward parts that have a meaning here; any other is only reported.
TOTAL_PART = 'total'
CORRECT_PART = 'correct'


def group_size(groups: Sequence[Group]) -> int:
  """Returns G, the completions asked for of each group.

  Args:
    groups: the groups of a batch, at least one.

  Raises:
    ValueError: if there is no group, or if they differ in size.
  """
  sizes = sorted({group.request.num_samples for group in groups})
  if len(sizes) != 1:
    raise ValueError(
      f'a batch needs groups of one size, got sizes {sizes}: ask for the same '
      'num_samples in every request'
    )
  return sizes[0]


def group_rewards(groups: Sequence[Group]) -> tuple[np.ndarray, np.ndarray]:
  """Returns total rewards f32[N, G] and which of them exist, bool[N, G].

  A completion that is missing from its group, or has no tokens, is not valid
  and has reward 0. A reward that is not finite stays as it is: the update it
  leads to is skipped and counted.

  Args:
    groups: N scored groups of G requested completions.

  Raises:
    ValueError: if a group has not been scored, or not completely.
  """
  shape = (len(groups), group_size(groups))
  rewards = np.zeros(shape, np.float32)
  valid = np.zeros(shape, bool)
  for n, group in enumerate(groups):
    parts = _scored_parts(group)
    for completion, part in zip(group.completions, parts, strict=True):
      if completion.tokens.size > 0:
        rewards[n, completion.sample_index] = part[TOTAL_PART]
        valid[n, completion.sample_index] = True
  return rewards, valid


def batch_facts(
  groups: Sequence[Group], advantages: np.ndarray, version: int
) -> dict[str, float]:
  """Returns what is to be reported of a batch, as plain floats.

  Keys: reward_mean; reward_PART for each other named part; accuracy, where
  there is a part 'correct'; response_length_mean and _max in tokens;
  truncated_completions, the fraction that ended at a limit;
  zero_advantage_fraction, of groups that teach nothing as all their advantages
  are 0; staleness_mean and _max, over completion tokens.

  Args:
    groups: N scored groups.
    advantages: f32[N, G].
    version: `Version.batches` of the trainer that is about to use the batch.
  """
  completions = _completions(groups)
  lengths = np.array([c.tokens.size for c in completions] or [0])
  truncated = sum(c.finish_reason != FinishReason.STOP for c in completions)
  silent = np.all(np.asarray(advantages) == 0, axis=1)
  facts = _reward_means(groups)
  facts['response_length_mean'] = float(lengths.mean())
  facts['response_length_max'] = float(lengths.max())
  facts['truncated_completions'] = truncated / max(len(completions), 1)
  facts['zero_advantage_fraction'] = float(silent.mean())
  counts = staleness_counts(groups, version)
  num_tokens = max(sum(counts.values()), 1)
  facts['staleness_mean'] = sum(s * n for s, n in counts.items()) / num_tokens
  facts['staleness_max'] = float(max(counts, default=0))
  return facts


def staleness_counts(groups: Sequence[Group], version: int) -> dict[int, int]:
  """Returns how many completion tokens have each staleness, in order.

  staleness = version of the trainer - version that sampled the token

  Args:
    groups: the groups of a batch.
    version: `Version.batches` of the trainer.
  """
  versions = [c.versions for c in _completions(groups)]
  if not versions:
    return {}
  values, counts = np.unique(
    version - np.concatenate(versions), return_counts=True
  )
  return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _completions(groups: Sequence[Group]) -> list[Completion]:
  return [c for group in groups for c in group.completions if c.tokens.size]


def _scored_parts(group: Group) -> Sequence:
  """Returns the rewards of a group, checked to be there."""
  index = group.request.admission_index
  if group.rewards is None:
    raise ValueError(f'group {index} has no rewards: score it first')
  if len(group.rewards) != len(group.completions):
    raise ValueError(
      f'group {index} has {len(group.rewards)} rewards for '
      f'{len(group.completions)} completions'
    )
  for parts in group.rewards:
    if TOTAL_PART not in parts:
      raise ValueError(
        f'group {index} has rewards {sorted(parts)} without {TOTAL_PART!r}'
      )
  return group.rewards


def _reward_means(groups: Sequence[Group]) -> dict[str, float]:
  """Returns the mean of each reward part over the completions that have it."""
  values: dict[str, list[float]] = {}
  for group in groups:
    for completion, parts in zip(
      group.completions, _scored_parts(group), strict=True
    ):
      if completion.tokens.size == 0:
        continue
      for name, value in parts.items():
        values.setdefault(name, []).append(float(value))
  means = {name: float(np.mean(v)) for name, v in sorted(values.items())}
  facts = {'reward_mean': means.pop(TOTAL_PART, 0.0)}
  if CORRECT_PART in means:
    facts['accuracy'] = means[CORRECT_PART]
  return facts | {f'reward_{name}': value for name, value in means.items()}

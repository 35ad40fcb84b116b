"""From finished groups to the rows of a train step, and facts about them.

Everything is numpy on the host: groups are ragged, a train step is not. A row
holds one sequence (row n * G + g is completion g of group n) or one group.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from llamarl_jax.types import Completion
from llamarl_jax.types import FinishReason
from llamarl_jax.types import Group
from llamarl_jax.types import Trajectories

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


def row_length(
  groups: Sequence[Group], multiple: int, *, share_prompts: bool = False
) -> int:
  """Returns the tokens of the longest row, rounded up to `multiple`.

  Rounding bounds the number of shapes that the train step is compiled for.

  Args:
    groups: the groups of a batch, at least one.
    multiple: what the length shall be a multiple of, at least 1.
    share_prompts: as for `build_trajectories`.
  """
  if multiple < 1:
    raise ValueError(f'multiple must be at least 1, got {multiple}')
  combine = sum if share_prompts else _longest
  longest = max(
    len(group.request.prompt_tokens)
    + combine(c.tokens.size for c in group.completions)
    for group in groups
  )
  return -(-longest // multiple) * multiple


def _longest(lengths: Iterable[int]) -> int:
  return max(lengths, default=0)


def empty_rows(num_rows: int, length: int, pad_token: int) -> Trajectories:
  """Returns rows of nothing but padding: numpy arrays of [num_rows, length]."""
  shape = (num_rows, length)
  # Declared as device arrays, which they become when they are put there.
  full: Any = np.full
  return Trajectories(
    tokens=full(shape, pad_token, np.int32),
    completion_mask=full(shape, False),
    segment_ids=full(shape, 0, np.int32),
    positions=full(shape, 0, np.int32),
    behavior_log_probs=full(shape, 0, np.float32),
    policy_version=full(shape, 0, np.int32),
    advantages=full(shape, 0, np.float32),
  )


def place_sequence(
  rows: Trajectories,
  row: int,
  prompt: Sequence[int] | np.ndarray,
  completion: Sequence[int] | np.ndarray,
) -> slice:
  """Writes one sequence to the start of a row of `rows`, in place.

  Args:
    rows: from `empty_rows`.
    row: the row to write to.
    prompt: tokens given, at least one: the first has no log-prob.
    completion: tokens to train on.

  Returns:
    Where the completion stands in its row.

  Raises:
    ValueError: if the prompt is empty, or if the row is too short.
  """
  _place_prompt(rows, row, prompt)
  return _place_completion(rows, row, len(prompt), len(prompt), completion, 1)


def _place_prompt(
  rows: Trajectories, row: int, prompt: Sequence[int] | np.ndarray
) -> None:
  """Writes a prompt to the start of a row, as segment 1."""
  stop = len(prompt)
  if stop < 1:
    raise ValueError(f'row {row} has an empty prompt: it needs one token')
  _check_room(rows, row, stop)
  rows.tokens[row, :stop] = prompt
  rows.segment_ids[row, :stop] = 1
  rows.positions[row, :stop] = np.arange(stop)


def _place_completion(
  rows: Trajectories,
  row: int,
  start: int,
  position: int,
  completion: Sequence[int] | np.ndarray,
  segment_id: int,
) -> slice:
  """Writes a completion whose first token is at `position` of its sequence."""
  stop = start + len(completion)
  _check_room(rows, row, stop)
  where = slice(start, stop)
  rows.tokens[row, where] = completion
  rows.completion_mask[row, where] = True
  rows.segment_ids[row, where] = segment_id
  rows.positions[row, where] = position + np.arange(stop - start)
  return where


def _check_room(rows: Trajectories, row: int, stop: int) -> None:
  length = rows.tokens.shape[1]
  if stop > length:
    raise ValueError(
      f'row {row} needs {stop} tokens but rows hold {length}: raise row_length'
    )


def build_trajectories(
  groups: Sequence[Group],
  advantages: np.ndarray,
  *,
  row_length: int,
  pad_token: int,
  share_prompts: bool = False,
) -> Trajectories:
  """Returns the rows of a batch, in group order.

  By default a row holds one sequence. With `share_prompts` it holds one group:
  the prompt once, as segment 1, then its completions as segments 2, 3, ...,
  each of which reads the prompt and itself. The loss is the same, and the
  prompt is computed once instead of G times.

  Completions that are missing or empty leave padding, so that the shape depends
  on N, G and `row_length` alone. Reference log-probs are there where every
  group has them.

  Args:
    groups: N groups of G requested completions.
    advantages: f32[N, G], one for each completion.
    row_length: T, tokens a row.
    pad_token: token id of padding.
    share_prompts: one row a group instead of one a sequence.

  Raises:
    ValueError: if shapes disagree or a sequence does not fit.
  """
  size = group_size(groups)
  if advantages.shape != (len(groups), size):
    raise ValueError(
      f'advantages have shape {advantages.shape}, but the batch has '
      f'{len(groups)} groups of {size}'
    )
  num_rows = len(groups) if share_prompts else len(groups) * size
  rows = empty_rows(num_rows, row_length, pad_token)
  more: dict[str, Any] = {}
  if share_prompts:
    before = np.maximum(np.arange(row_length, dtype=np.int32) - 1, 0)
    more['prefix_ids'] = np.zeros_like(rows.tokens)
    more['predecessors'] = np.tile(before, (num_rows, 1))
  if all(group.reference_log_probs is not None for group in groups):
    more['reference_log_probs'] = np.zeros_like(rows.advantages)
  rows = dataclasses.replace(rows, **more)
  for n, group in enumerate(groups):
    places = (_place_group if share_prompts else _place_rows)(
      rows, n, group, size
    )
    for i, (row, where) in places.items():
      completion = group.completions[i]
      rows.behavior_log_probs[row, where] = completion.log_probs
      rows.policy_version[row, where] = completion.versions
      rows.advantages[row, where] = advantages[n, completion.sample_index]
      if rows.reference_log_probs is not None:
        reference = (group.reference_log_probs or ())[i]
        rows.reference_log_probs[row, where] = reference
  return rows


def _place_rows(
  rows: Trajectories, n: int, group: Group, size: int
) -> dict[int, tuple[int, slice]]:
  """Writes group n as one row a completion; returns row and place of each."""
  places = {}
  for i, completion in enumerate(group.completions):
    if completion.tokens.size:
      row = n * size + completion.sample_index
      where = place_sequence(
        rows, row, group.request.prompt_tokens, completion.tokens
      )
      places[i] = (row, where)
  return places


def _place_group(
  rows: Trajectories, n: int, group: Group, size: int
) -> dict[int, tuple[int, slice]]:
  """Writes group n as one row; returns row and place of each completion."""
  del size
  prompt = group.request.prompt_tokens
  prefix_ids, predecessors = rows.prefix_ids, rows.predecessors
  assert isinstance(prefix_ids, np.ndarray)
  assert isinstance(predecessors, np.ndarray)
  _place_prompt(rows, n, prompt)
  places = {}
  start = len(prompt)
  for i, completion in enumerate(group.completions):
    if completion.tokens.size:
      where = _place_completion(
        rows, n, start, len(prompt), completion.tokens, i + 2
      )
      prefix_ids[n, where] = 1
      predecessors[n, start] = len(prompt) - 1
      places[i] = (n, where)
      start = where.stop
  return places


def batch_facts(
  groups: Sequence[Group], advantages: np.ndarray, version: int
) -> dict[str, float]:
  """Returns what is to be reported of a batch, as plain floats.

  Keys: reward_mean; reward_PART for each other named part; accuracy, where
  there is a part 'correct'; response_length_mean and _max in tokens;
  truncated_completions, the fraction that ended at its length limit;
  zero_advantage_fraction, of groups that teach nothing as all their advantages
  are 0; staleness_mean and _max, over completion tokens.

  Args:
    groups: N scored groups.
    advantages: f32[N, G].
    version: `Version.batches` of the trainer that is about to use the batch.
  """
  completions = _completions(groups)
  lengths = np.array([c.tokens.size for c in completions] or [0])
  truncated = sum(c.finish_reason == FinishReason.LENGTH for c in completions)
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

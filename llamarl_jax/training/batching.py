"""From finished groups to the rows of a train step.

Everything is numpy on the host: groups are ragged, a train step is not. A row
holds one sequence, one group, or what `packing` puts together.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from llamarl_jax.training import facts
from llamarl_jax.training import packing
from llamarl_jax.types import Group
from llamarl_jax.types import Trajectories

# (group, place in its completions) -> row, and where in the row it stands
Places = dict[tuple[int, int], tuple[int, slice]]


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
  *,
  start: int = 0,
  segment_id: int = 1,
) -> slice:
  """Writes one sequence into a row of `rows`, in place.

  Args:
    rows: from `empty_rows`.
    row: the row to write to.
    prompt: tokens given, at least one: the first has no log-prob.
    completion: tokens to train on.
    start: place of its first token in the row.
    segment_id: of the sequence, unique in the row.

  Returns:
    Where the completion stands in its row.

  Raises:
    ValueError: if the prompt is empty, or if the row is too short.
  """
  stop = _place_prompt(rows, row, start, prompt, segment_id)
  position = len(prompt)
  return _place_completion(rows, row, stop, position, completion, segment_id)


def _place_prompt(
  rows: Trajectories,
  row: int,
  start: int,
  prompt: Sequence[int] | np.ndarray,
  segment_id: int,
) -> int:
  """Writes a prompt; returns where it ends."""
  stop = start + len(prompt)
  if not len(prompt):
    raise ValueError(f'row {row} has an empty prompt: it needs one token')
  _check_room(rows, row, stop)
  where = slice(start, stop)
  rows.tokens[row, where] = prompt
  rows.segment_ids[row, where] = segment_id
  rows.positions[row, where] = np.arange(len(prompt))
  return stop


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


def lay_out(
  groups: Sequence[Group],
  plan: packing.Plan,
  *,
  row_length: int,
  pad_token: int,
  share_prompts: bool = False,
) -> tuple[Trajectories, Places]:
  """Returns rows with tokens and layout alone, and the place of completions.

  Args:
    groups: N groups.
    plan: what stands in each row.
    row_length: T, tokens a row.
    pad_token: token id of padding.
    share_prompts: whether the completions of a part read one copy of their
      prompt, a segment of its own, rather than a copy each.

  Raises:
    ValueError: if a row is too short for what it is to hold.
  """
  rows = empty_rows(len(plan), row_length, pad_token)
  if share_prompts:
    before = np.maximum(np.arange(row_length, dtype=np.int32) - 1, 0)
    more: dict[str, Any] = {
      'prefix_ids': np.zeros_like(rows.tokens),
      'predecessors': np.tile(before, (len(plan), 1)),
    }
    rows = dataclasses.replace(rows, **more)
  places: Places = {}
  for row, parts in enumerate(plan):
    start, segment_id = 0, 1
    for part in parts:
      place = _place_shared if share_prompts else _place_apart
      found = place(rows, row, groups[part.group], part, start, segment_id)
      places |= {(part.group, i): (row, where) for i, where in found.items()}
      start = max(where.stop for where in found.values())
      segment_id += len(found) + share_prompts
  return rows, places


def _place_apart(
  rows: Trajectories,
  row: int,
  group: Group,
  part: packing.Part,
  start: int,
  segment_id: int,
) -> dict[int, slice]:
  """Writes sequences one after the other; returns where completions stand."""
  places: dict[int, slice] = {}
  for i in part.completions:
    places[i] = place_sequence(
      rows,
      row,
      group.request.prompt_tokens,
      group.completions[i].tokens,
      start=start,
      segment_id=segment_id + len(places),
    )
    start = places[i].stop
  return places


def _place_shared(
  rows: Trajectories,
  row: int,
  group: Group,
  part: packing.Part,
  start: int,
  segment_id: int,
) -> dict[int, slice]:
  """Writes a prompt and its completions; returns where these stand."""
  prompt = group.request.prompt_tokens
  prefix_ids, predecessors = rows.prefix_ids, rows.predecessors
  assert isinstance(prefix_ids, np.ndarray)
  assert isinstance(predecessors, np.ndarray)
  start = _place_prompt(rows, row, start, prompt, segment_id)
  last = start - 1
  places = {}
  for own_id, i in enumerate(part.completions, segment_id + 1):
    where = _place_completion(
      rows, row, start, len(prompt), group.completions[i].tokens, own_id
    )
    prefix_ids[row, where] = segment_id
    predecessors[row, start] = last
    places[i] = where
    start = where.stop
  return places


def mask_old_tokens(
  rows: Trajectories, version: int, max_age: int
) -> tuple[Trajectories, float]:
  """Leaves tokens of too old a policy out of the loss.

  They stay where they are, as what later ones were sampled after. A group that
  took long loses its first tokens; it is trained on all the same.

  Args:
    rows: of a batch, as host arrays.
    version: `Version.batches` of the trainer that is about to use them.
    max_age: versions that a token may be behind.

  Returns:
    the rows, and the fraction of completion tokens that are left out.
  """
  mask = np.asarray(rows.completion_mask)
  old = mask & (version - np.asarray(rows.policy_version) > max_age)
  keep: Any = mask & ~old
  advantages: Any = np.where(keep, np.asarray(rows.advantages), 0)
  rows = dataclasses.replace(rows, completion_mask=keep, advantages=advantages)
  return rows, float(old.sum() / max(mask.sum(), 1))


def plan_rows(
  groups: Sequence[Group], layout: packing.Layout
) -> tuple[packing.Plan, int]:
  """Returns what stands in each row, and T, the tokens of a row.

  Unpacked, row n * G + g is completion g of group n, or row n is group n with
  its prompt shared. Completions that are missing or empty leave padding, so
  that the number of rows depends on N and G alone.

  Args:
    groups: the groups of a batch, at least one.
    layout: see `packing.Layout`.

  Raises:
    ValueError: if a sequence is longer than a packed row.
  """
  if layout.pack_tokens:
    return packing.pack_groups(groups, layout), layout.pack_tokens
  length = row_length(
    groups, layout.length_multiple, share_prompts=layout.share_prompts
  )
  return _unpacked(groups, layout.share_prompts), length


def _unpacked(groups: Sequence[Group], share_prompts: bool) -> packing.Plan:
  size = facts.group_size(groups)
  plan: packing.Plan = []
  for n, group in enumerate(groups):
    there = {
      c.sample_index: i
      for i, c in enumerate(group.completions)
      if c.tokens.size
    }
    if share_prompts:
      plan.append([packing.Part(n, tuple(there.values()))] if there else [])
    else:
      plan += [
        [packing.Part(n, (there[g],))] if g in there else []
        for g in range(size)
      ]
  return plan


def build_trajectories(
  groups: Sequence[Group],
  advantages: np.ndarray,
  *,
  row_length: int,
  pad_token: int,
  share_prompts: bool = False,
  plan: packing.Plan | None = None,
) -> Trajectories:
  """Returns the rows of a batch.

  By default a row holds one sequence. With `share_prompts` it holds one group:
  the prompt once, as segment 1, then its completions as segments 2, 3, ...,
  each of which reads the prompt and itself. A `plan` from `packing` puts more
  into a row. The loss is the same in any case.

  Reference log-probs are there where every group has them.

  Args:
    groups: N groups of G requested completions.
    advantages: f32[N, G], one for each completion.
    row_length: T, tokens a row.
    pad_token: token id of padding.
    share_prompts: see `lay_out`.
    plan: what stands in each row; None for rows in group order.

  Raises:
    ValueError: if shapes disagree or a sequence does not fit.
  """
  size = facts.group_size(groups)
  if advantages.shape != (len(groups), size):
    raise ValueError(
      f'advantages have shape {advantages.shape}, but the batch has '
      f'{len(groups)} groups of {size}'
    )
  rows, places = lay_out(
    groups,
    _unpacked(groups, share_prompts) if plan is None else plan,
    row_length=row_length,
    pad_token=pad_token,
    share_prompts=share_prompts,
  )
  if all(group.reference_log_probs is not None for group in groups):
    zeros: Any = np.zeros_like(rows.advantages)
    rows = dataclasses.replace(rows, reference_log_probs=zeros)
  for (n, i), (row, where) in places.items():
    completion = groups[n].completions[i]
    rows.behavior_log_probs[row, where] = completion.log_probs
    rows.policy_version[row, where] = completion.versions
    rows.advantages[row, where] = advantages[n, completion.sample_index]
    if rows.reference_log_probs is not None:
      reference = (groups[n].reference_log_probs or ())[i]
      rows.reference_log_probs[row, where] = reference
  return rows

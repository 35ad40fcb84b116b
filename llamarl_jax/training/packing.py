"""Which sequences share a row: rows of T tokens, with little padding.

Lengths are skewed: with one sequence a row, most of a batch is padding of the
length of its longest. Everything here is about lengths; the rows themselves
are written by `batching`.
"""

from collections.abc import Sequence
import dataclasses
import itertools
from typing import NamedTuple

import jax
import numpy as np

from llamarl_jax.types import Group


class Part(NamedTuple):
  """Completions that stand in one row, beside others.

  Attributes:
    group: place of their group in the batch.
    completions: places in `Group.completions`.
  """

  group: int
  completions: tuple[int, ...]


# What stands in each row.
Plan = list[list[Part]]


@dataclasses.dataclass(frozen=True)
class Layout:
  """How a batch becomes rows.

  Attributes:
    length_multiple: row lengths are rounded up to a multiple of it.
    share_prompts: whether completions of a group that stand in one row read
      one copy of their prompt, rather than a copy each.
    pack_tokens: tokens a row, filled with as many sequences as it holds; 0 for
      one sequence a row, or one group with `share_prompts`.
    pack_rows: rows of a micro-batch at most, where rows are packed.
    num_minibatches: updates a batch.
    num_shards: groups of devices that the rows of a micro-batch are spread
      over.
  """

  length_multiple: int
  share_prompts: bool = False
  pack_tokens: int = 0
  pack_rows: int = 1
  num_minibatches: int = 1
  num_shards: int = 1


def pack_groups(groups: Sequence[Group], layout: Layout) -> Plan:
  """Returns packed rows, followed by empty ones up to `num_rows`.

  With shared prompts, the better of two plans. One keeps the completions of a
  group together, unless they exceed a row; the other splits a group where that
  fills a row, for the price of its prompt once more.

  Args:
    groups: of a batch; completions without tokens are left out.
    layout: with `pack_tokens`.

  Raises:
    ValueError: if a sequence is longer than a row.
  """
  _check_lengths(groups, layout.pack_tokens)
  if layout.share_prompts:
    plans = [
      _pack_parts(groups, _whole_parts(groups, layout.pack_tokens), layout),
      _pack_split(groups, layout.pack_tokens),
    ]
    plan = min(plans, key=lambda plan: (len(plan), _num_tokens(groups, plan)))
  else:
    single = [
      Part(n, (i,))
      for n, group in enumerate(groups)
      for i, c in enumerate(group.completions)
      if c.tokens.size
    ]
    plan = _pack_parts(groups, single, layout)
  return plan + [[] for _ in range(num_rows(len(plan), layout) - len(plan))]


def first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
  """Returns rows of indices into `sizes`, each row of `capacity` at most.

  First-fit decreasing: the largest first, each into the first row with room.
  It takes at most 11/9 of the least number of rows, and 6/9 of one (Dosa
  2007); with many small sizes hardly more than the least.

  Args:
    sizes: none above `capacity`.
    capacity: of a row.
  """
  rooms = np.zeros(len(sizes), np.int64)
  rows: list[list[int]] = []
  for index in np.argsort(-np.asarray(sizes, np.int64), kind='stable'):
    fits = rooms[: len(rows)] >= sizes[index]
    row = int(np.argmax(fits)) if fits.any() else len(rows)
    if row == len(rows):
      rows.append([])
      rooms[row] = capacity
    rows[row].append(int(index))
    rooms[row] -= sizes[index]
  return rows


def num_rows(needed: int, layout: Layout) -> int:
  """Returns the rows to have: what is needed, and some to bound the shapes.

  The train step is compiled for each number of rows. Those of a shard and
  update are a number up to 16, or one of eight in each octave above, and split
  into equal micro-batches of not much less than `pack_rows`.

  Args:
    needed: rows that hold something.
    layout: as in Layout.
  """
  splits = layout.num_minibatches * layout.num_shards
  most = max(layout.pack_rows // layout.num_shards, 1)
  rows = max(-(-needed // splits), 1)
  step = 2 ** max(rows.bit_length() - 4, 0)
  rows = -(-rows // step) * step
  # Half of `pack_rows` still keeps the devices busy, where the whole of it
  # would leave much padding.
  sizes = range((most + 1) // 2, most + 1)
  while rows > most and all(rows % size for size in sizes):
    rows += step
  return splits * rows


def num_micro_batches(rows: int, layout: Layout) -> int:
  """Returns the least number of equal micro-batches that `pack_rows` allows.

  Args:
    rows: of one update, as `num_rows` gives them.
    layout: as in Layout.
  """
  most = max(layout.pack_rows // layout.num_shards, 1)
  rows //= layout.num_shards
  return next(n for n in itertools.count(-(-rows // most)) if rows % n == 0)


def real_token_fraction(segment_ids: np.ndarray | jax.Array) -> float:
  """Returns the share of tokens that are not padding.

  Args:
    segment_ids: i32[R, T], 0 = padding.
  """
  return float(np.mean(np.asarray(segment_ids) > 0))


def _lengths(group: Group, completions: Sequence[int]) -> list[int]:
  return [group.completions[i].tokens.size for i in completions]


def _part_tokens(groups: Sequence[Group], part: Part) -> int:
  """Returns the tokens of a part, its prompt counted once."""
  group = groups[part.group]
  return len(group.request.prompt_tokens) + sum(
    _lengths(group, part.completions)
  )


def _num_tokens(groups: Sequence[Group], plan: Plan) -> int:
  return sum(_part_tokens(groups, part) for row in plan for part in row)


def _pack_parts(
  groups: Sequence[Group], parts: Sequence[Part], layout: Layout
) -> Plan:
  """Returns rows of whole parts."""
  sizes = [_part_tokens(groups, part) for part in parts]
  return [
    [parts[i] for i in row] for row in first_fit(sizes, layout.pack_tokens)
  ]


def _whole_parts(groups: Sequence[Group], capacity: int) -> list[Part]:
  """Returns each group as one part, or as few as fit into rows."""
  parts = []
  for n, group in enumerate(groups):
    places = [i for i, c in enumerate(group.completions) if c.tokens.size]
    room = capacity - len(group.request.prompt_tokens)
    for row in first_fit(_lengths(group, places), room):
      parts.append(Part(n, tuple(sorted(places[i] for i in row))))
  return parts


def _pack_split(groups: Sequence[Group], capacity: int) -> Plan:
  """Returns rows of parts, groups split wherever there is room for some.

  A completion goes where its prompt is already, else into the first row with
  room for both.
  """
  plan: list[dict[int, list[int]]] = []
  rooms = np.zeros(sum(len(g.completions) for g in groups), np.int64)
  totals = [
    _part_tokens(groups, Part(n, tuple(range(len(group.completions)))))
    for n, group in enumerate(groups)
  ]
  for n in np.argsort(-np.asarray(totals), kind='stable').tolist():
    group = groups[n]
    prompt = len(group.request.prompt_tokens)
    places = [i for i, c in enumerate(group.completions) if c.tokens.size]
    sizes = [c.tokens.size for c in group.completions]
    places.sort(key=sizes.__getitem__, reverse=True)
    own: list[int] = []
    for i in places:
      size = sizes[i]
      row = next((row for row in own if rooms[row] >= size), None)
      if row is None:
        size += prompt
        fits = rooms[: len(plan)] >= size
        row = int(np.argmax(fits)) if fits.any() else len(plan)
        own.append(row)
      if row == len(plan):
        plan.append({})
        rooms[row] = capacity
      plan[row].setdefault(n, []).append(i)
      rooms[row] -= size
  return [
    [Part(n, tuple(sorted(places))) for n, places in row.items()]
    for row in plan
  ]


def _check_lengths(groups: Sequence[Group], capacity: int) -> None:
  for group in groups:
    longest = max((c.tokens.size for c in group.completions), default=0)
    size = len(group.request.prompt_tokens) + longest
    if size > capacity:
      raise ValueError(
        f'group {group.request.admission_index} has a sequence of {size}'
        f' tokens but rows hold {capacity}: raise trainer.pack_tokens'
      )

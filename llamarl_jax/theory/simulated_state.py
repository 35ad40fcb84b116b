"""The state of simulated groups and generator replicas."""

from collections.abc import Iterable
import dataclasses

import numpy as np


@dataclasses.dataclass
class Group:
  """A group under way.

  Attributes:
    index: in admission order.
    lengths: i64[G], tokens of its responses.
    tokens: sampled so far, by policy version.
    num_running: responses not done yet.
  """

  index: int
  lengths: np.ndarray
  tokens: dict[int, int] = dataclasses.field(default_factory=dict)
  num_running: int = 0

  def __post_init__(self) -> None:
    self.num_running = len(self.lengths)


def tokens_by_version(groups: Iterable[Group]) -> dict[int, int]:
  """Returns the tokens of all groups by the version that sampled them."""
  total: dict[int, int] = {}
  for group in groups:
    for version, count in group.tokens.items():
      total[version] = total.get(version, 0) + count
  return dict(sorted(total.items(), reverse=True))


class Replica:
  """The slots of a generator replica, and the samples that wait for one."""

  def __init__(self, name: str, num_slots: int):
    """Starts empty, holding version 0."""
    self.name = name
    self.held = 0
    self.fetched = 0
    self._num_slots = num_slots
    self._waiting: list[tuple[Group, int]] = []
    self._running: list[Group] = []
    self._remaining = np.zeros(0, int)

  @property
  def active(self) -> int:
    """Responses being decoded."""
    return len(self._running)

  @property
  def room(self) -> int:
    """Slots that no sample is waiting for."""
    return self._num_slots - len(self._running) - len(self._waiting)

  def take(self, group: Group) -> None:
    """Queues all samples of a group."""
    self._waiting += [(group, int(length)) for length in group.lengths]

  def fill_slots(self) -> int:
    """Starts samples in free slots; returns how many prompts they read."""
    free = self._num_slots - len(self._running)
    starting, self._waiting = self._waiting[:free], self._waiting[free:]
    self._running += [group for group, _ in starting]
    self._remaining = np.concatenate(
      [self._remaining, np.array([length for _, length in starting], int)]
    )
    return len({group.index for group, _ in starting})

  def most_remaining(self) -> int:
    """Returns the steps after which no slot is active."""
    return int(self._remaining.max())

  def advance(self, steps: int) -> list[Group]:
    """Decodes so many steps; returns the groups that are done."""
    sampled = np.minimum(self._remaining, steps)
    for group, count in zip(self._running, sampled.tolist(), strict=True):
      group.tokens[self.held] = group.tokens.get(self.held, 0) + count
    self._remaining = self._remaining - sampled
    done = []
    for group, left in zip(
      self._running, self._remaining.tolist(), strict=True
    ):
      if not left:
        group.num_running -= 1
        if not group.num_running:
          done.append(group)
    going = self._remaining > 0
    self._running = [
      group for group, go in zip(self._running, going, strict=True) if go
    ]
    self._remaining = self._remaining[going]
    return done

  def fail(self) -> list[int]:
    """Loses everything under way; returns the indices of its groups."""
    lost = {group.index for group in self._running}
    lost |= {group.index for group, _ in self._waiting}
    self._running, self._waiting = [], []
    self._remaining = np.zeros(0, int)
    return sorted(lost)

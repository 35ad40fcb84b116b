"""Which groups may start, and which groups are the next batch.

Groups are numbered 0, 1, 2, ... in the order of admission. There are two batch
orders, and neither discards a group: to drop stale ones would drop the long
ones, and bias the policy to short answers.

  admission   batch v is exactly the groups v * N ... v * N + N - 1, and no
              token of it is older than v - max_staleness
  completion  batch v is the first N groups to complete; one that takes longer
              joins a later batch, with tokens that may be older

Pure: used by the controller and by theory.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
from typing import Any
from typing import Generic
from typing import TypeVar

ADMISSION = 'admission'
COMPLETION = 'completion'

_Item = TypeVar('_Item')


@dataclasses.dataclass(frozen=True)
class AdmissionRule:
  """The pacing of a run whose batches are in admission order.

  The gate is the version the *replica* holds, not the trainer's: gating on the
  trainer deadlocks at max_staleness = 0 as soon as a publication lags.

  Attributes:
    batch_size: groups a batch (N).
    num_batches: batches to be trained, over the whole run.
    max_staleness: versions a token may be behind the batch it joins (k).
  """

  batch_size: int
  num_batches: int
  max_staleness: int

  def __post_init__(self) -> None:
    """Refuses sizes that admit nothing."""
    if self.batch_size < 1:
      raise ValueError(f'batch_size is {self.batch_size}; it must be >= 1')
    if self.num_batches < 0:
      raise ValueError(f'num_batches is {self.num_batches}; it must be >= 0')
    if self.max_staleness < 0:
      raise ValueError(
        f'max_staleness is {self.max_staleness}; it must be >= 0'
      )

  @property
  def num_groups(self) -> int:
    """Groups of the whole run."""
    return self.batch_size * self.num_batches

  def batch_of(self, index: int) -> int:
    """Returns the batch that group `index` belongs to, in admission order."""
    return index // self.batch_size

  def may_start(
    self,
    index: int,
    replica_version: int,
    *,
    trainer_version: int = 0,
    num_outstanding: int = 0,
  ) -> bool:
    """Returns whether group `index` may start on a replica.

    Args:
      index: of the group.
      replica_version: version that the replica holds.
      trainer_version: batches trained on; of no influence in this order.
      num_outstanding: other groups that are admitted and not yet trained on;
        of no influence in this order.
    """
    del trainer_version, num_outstanding
    return (
      index < self.num_groups
      and self.batch_of(index) <= replica_version + self.max_staleness
    )


class CompletionRule(AdmissionRule):
  """The pacing of a run whose batches are the first groups to complete.

  Outstanding groups are at most those of max_staleness + 1 batches, so that
  generation does not run away from training. A replica more than max_staleness
  versions behind starts nothing until it has committed newer weights: of a
  group that starts, the first token is no older than that.
  """

  def may_start(
    self,
    index: int,
    replica_version: int,
    *,
    trainer_version: int = 0,
    num_outstanding: int = 0,
  ) -> bool:
    """Returns whether group `index` may start; see AdmissionRule."""
    return (
      index < self.num_groups
      and num_outstanding < (self.max_staleness + 1) * self.batch_size
      and trainer_version - replica_version <= self.max_staleness
    )


def make_rule(
  order: str, batch_size: int, num_batches: int, max_staleness: int
) -> AdmissionRule:
  """Returns the rule of a batch order, 'admission' or 'completion'.

  Raises:
    ValueError: there is no such order, or a size is out of its range.
  """
  rules = {ADMISSION: AdmissionRule, COMPLETION: CompletionRule}
  if order not in rules:
    raise ValueError(f'batch_order is {order!r}; it must be in {list(rules)}')
  return rules[order](batch_size, num_batches, max_staleness)


@dataclasses.dataclass(frozen=True)
class Trained:
  """Which groups have been trained on.

  In completion order they are not the first ones: some that were overtaken are
  missing, and a run that is resumed has to sample those again.

  Attributes:
    below: every group with a smaller index.
    beyond: further ones, all above `below`.
  """

  below: int = 0
  beyond: frozenset[int] = frozenset()

  def __contains__(self, index: int) -> bool:
    """Returns whether group `index` was trained on."""
    return index < self.below or index in self.beyond

  def __len__(self) -> int:
    """Returns how many there are."""
    return self.below + len(self.beyond)

  def first_missing(self, start: int = 0) -> int:
    """Returns the least index from `start` on that is not among them."""
    index = max(start, self.below)
    while index in self.beyond:
      index += 1
    return index

  def add(self, indices: Iterable[int]) -> 'Trained':
    """Returns these groups and those of a batch.

    Raises:
      ValueError: one was among them already.
    """
    beyond = set(self.beyond)
    for index in indices:
      if index < self.below or index in beyond:
        raise ValueError(f'group {index} was trained on twice')
      beyond.add(index)
    below = Trained(self.below, frozenset(beyond)).first_missing()
    return Trained(below, frozenset(i for i in beyond if i > below))

  def state(self) -> dict[str, Any]:
    """Returns them as JSON can hold them."""
    return {'below': self.below, 'beyond': sorted(self.beyond)}

  @classmethod
  def restore(cls, state: Mapping[str, Any]) -> 'Trained':
    """Returns the groups that `state` stands for."""
    return cls(state['below'], frozenset(state['beyond']))


class BatchAssembler(Generic[_Item]):
  """Collects groups in any order and gives batches in that of the rule."""

  def __init__(self, rule: AdmissionRule, trained: Trained | None = None):
    """Starts without groups.

    Args:
      rule: of the run.
      trained: groups that were trained on before; None for none.
    """
    self._rule = rule
    self._taken = trained or Trained()
    # In the order of completion.
    self._waiting: dict[int, _Item] = {}

  def add(self, index: int, item: _Item) -> None:
    """Adds group `index`.

    Raises:
      ValueError: the group came twice.
    """
    if index in self._waiting or index in self._taken:
      raise ValueError(f'group {index} was completed twice')
    self._waiting[index] = item

  def ready(self) -> bool:
    """Returns whether every group of the next batch is there."""
    indices = self._indices()
    return len(indices) == self._rule.batch_size and all(
      index in self._waiting for index in indices
    )

  def take(self) -> list[_Item]:
    """Returns the next batch, its groups in admission order.

    Raises:
      ValueError: the batch is not complete.
    """
    indices = self._indices()
    batch = len(self._taken) // self._rule.batch_size
    if not self.ready():
      missing = [i for i in indices if i not in self._waiting]
      lack = f'groups {missing}' if missing else 'groups that are complete'
      raise ValueError(f'batch {batch} lacks {lack}')
    self._taken = self._taken.add(indices)
    return [self._waiting.pop(index) for index in indices]

  def _indices(self) -> list[int]:
    """Returns the groups of the next batch, as far as they are known."""
    size = self._rule.batch_size
    if isinstance(self._rule, CompletionRule):
      return sorted(list(self._waiting)[:size])
    return list(range(len(self._taken), len(self._taken) + size))

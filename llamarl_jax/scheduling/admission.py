"""Admission order: which groups may start, and which batch is next.

Groups are numbered 0, 1, 2, ... in admission order and batch v is exactly the
groups v * N ... v * N + N - 1, so nothing is discarded and no token of batch v
is older than v - max_staleness. Pure: used by the controller and by theory.
"""

from collections.abc import Iterable
import dataclasses
from typing import Generic
from typing import TypeVar

_Item = TypeVar('_Item')


@dataclasses.dataclass(frozen=True)
class AdmissionRule:
  """The pacing rule of admission order.

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
    """Returns the batch that group `index` belongs to."""
    return index // self.batch_size

  def may_start(self, index: int, replica_version: int) -> bool:
    """Returns whether group `index` may start on that version's replica."""
    return (
      index < self.num_groups
      and self.batch_of(index) <= replica_version + self.max_staleness
    )


class BatchAssembler(Generic[_Item]):
  """Collects groups in any order and gives batches in admission order."""

  def __init__(self, rule: AdmissionRule, next_batch: int = 0):
    self._rule = rule
    self._next_batch = next_batch
    self._waiting: dict[int, _Item] = {}

  @property
  def next_batch(self) -> int:
    """The batch that `take` gives next."""
    return self._next_batch

  def add(self, index: int, item: _Item) -> None:
    """Adds group `index`.

    Raises:
      ValueError: the group came twice, or its batch was taken already.
    """
    if index in self._waiting or self._rule.batch_of(index) < self._next_batch:
      raise ValueError(f'group {index} was completed twice')
    self._waiting[index] = item

  def ready(self) -> bool:
    """Returns whether every group of the next batch is there."""
    return all(index in self._waiting for index in self._indices())

  def take(self) -> list[_Item]:
    """Returns the next batch, in admission order.

    Raises:
      ValueError: the batch is not complete.
    """
    if not self.ready():
      missing = [i for i in self._indices() if i not in self._waiting]
      raise ValueError(f'batch {self._next_batch} lacks groups {missing}')
    items = [self._waiting.pop(index) for index in self._indices()]
    self._next_batch += 1
    return items

  def _indices(self) -> Iterable[int]:
    start = self._next_batch * self._rule.batch_size
    return range(start, start + self._rule.batch_size)

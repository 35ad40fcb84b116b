"""SCATTER: each record goes to one destination (LlamaRL's channel)."""

from collections.abc import Sequence
import dataclasses
from typing import ClassVar
from typing import TypeVar

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Scatter:
  """An edge that splits.

  Attributes:
    source: name of the executor the records come from.
    destination: name of the executor whose replicas share them.
  """

  kind: ClassVar[str] = 'scatter'
  source: str
  destination: str

  def route(
    self, items: Sequence[T], capacities: Sequence[int]
  ) -> list[list[T]]:
    """Returns for each destination its share of the records.

    Each record goes to the destination with the most room left, the first of
    them on a tie: so the load is even and the split depends on nothing else.

    Args:
      items: records in the order they are to be worked on.
      capacities: records each destination can take now.

    Returns:
      One list a destination, each in the order of `items`.

    Raises:
      ValueError: there are more records than room; none would be dropped.
    """
    if len(items) > sum(capacities):
      raise ValueError(
        f'{len(items)} records do not fit into the capacities '
        f'{list(capacities)} of {self.destination}; hold some back.'
      )
    room = list(capacities)
    parts: list[list[T]] = [[] for _ in room]
    for item in items:
      place = self.place(room, [True] * len(room))
      room[place] -= 1
      parts[place].append(item)
    return parts

  def place(self, room: Sequence[int], allowed: Sequence[bool]) -> int:
    """Returns the destination of the next record.

    Args:
      room: left at each destination.
      allowed: which destinations may have the record, at least one.
    """
    return max(
      (i for i, may in enumerate(allowed) if may), key=lambda i: (room[i], -i)
    )

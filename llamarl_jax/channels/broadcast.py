"""BROADCAST: every destination gets every record (LlamaRL's channel)."""

from collections.abc import Sequence
import dataclasses
from typing import ClassVar
from typing import TypeVar

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Broadcast:
  """An edge that copies.

  Attributes:
    source: name of the executor the records come from.
    destination: name of the executor whose replicas all get them.
  """

  kind: ClassVar[str] = 'broadcast'
  source: str
  destination: str

  def route(self, items: Sequence[T], num_destinations: int) -> list[list[T]]:
    """Returns for each destination a list of all records, in order."""
    return [list(items) for _ in range(num_destinations)]

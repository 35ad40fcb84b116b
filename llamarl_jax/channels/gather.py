"""GATHER: the records of all sources in one list (LlamaRL's channel)."""

from collections.abc import Sequence
import dataclasses
from typing import ClassVar
from typing import TypeVar

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Gather:
  """An edge that joins.

  Attributes:
    source: name of the executor whose replicas give the records.
    destination: name of the executor that gets them all.
  """

  kind: ClassVar[str] = 'gather'
  source: str
  destination: str

  def merge(self, parts: Sequence[Sequence[T]]) -> list[T]:
    """Returns all records, in the order of the sources and within each."""
    return [item for part in parts for item in part]

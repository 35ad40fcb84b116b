"""The program: executors, the channels between them and where they run.

The paper's system figure as a value. It is checked before anything starts and
prints itself, so that a reader sees what will run.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

from llamarl_jax import types

# Builds an executor in the process it will live in, from the devices it gets.
ExecutorFactory = Callable[..., types.Executor]


@dataclasses.dataclass(frozen=True)
class Node:
  """One executor process.

  Attributes:
    name: unique, such as 'generator_0'; the name of its timeline track.
    role: 'generator', 'trainer', 'reward' or 'reference'.
    factory: called as factory(devices=..., **arguments) where it will run.
    arguments: plain picklable values.
    num_devices: accelerators it owns; 0 for a process without JAX arrays.
    mesh: sizes of the mesh axes over those devices.
  """

  name: str
  role: str
  factory: ExecutorFactory
  arguments: Mapping[str, Any]
  num_devices: int
  mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Edge:
  """One channel, for people to read and for `Program.validate`.

  Attributes:
    source: name or role of an executor, or 'controller'.
    destination: likewise.
    kind: 'SCATTER', 'GATHER', 'BROADCAST' or 'WEIGHTS'.
    what: travels on it.
  """

  source: str
  destination: str
  kind: str
  what: str


@dataclasses.dataclass(frozen=True)
class Program:
  """Executors and the channels between them.

  Attributes:
    nodes: the executors.
    edges: the channels, of data and of weights.
    notes: what else a reader should know, such as replicated dimensions.
  """

  nodes: Sequence[Node]
  edges: Sequence[Edge]
  notes: Sequence[str] = ()

  def of_role(self, role: str) -> list[Node]:
    """Returns the nodes of a role."""
    return [node for node in self.nodes if node.role == role]

  def validate(self) -> None:
    """Checks names and edges.

    Raises:
      ValueError: a name is used twice, or an edge ends at no executor.
    """
    names = [node.name for node in self.nodes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
      raise ValueError(f'executor names {twice} are used twice')
    known = {*names, *(node.role for node in self.nodes), 'controller'}
    for edge in self.edges:
      for end in (edge.source, edge.destination):
        if end not in known:
          raise ValueError(
            f'channel {edge.source} -> {edge.destination} ends at {end!r},'
            f' which is no executor; the executors are {names}'
          )

  def describe(self, processes: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the program as text.

    Args:
      processes: by node name what its executor says of itself; 'pid' is shown.
    """
    lines = ['program']
    for node in self.nodes:
      where = f'process {processes[node.name]["pid"]}'
      mesh = ' x '.join(f'{k} {v}' for k, v in node.mesh.items() if v > 1)
      devices = f'{node.num_devices} device' + 's' * (node.num_devices != 1)
      lines.append(
        f'  {node.name:<14} {where:<16} {devices}'
        + (f' ({mesh})' if mesh else '')
      )
    lines.append('channels')
    for edge in self.edges:
      ends = f'{edge.source} -> {edge.destination}'
      lines.append(f'  {ends:<28} {edge.kind:<10} {edge.what}')
    lines.extend(f'  note: {note}' for note in self.notes)
    return '\n'.join(lines)

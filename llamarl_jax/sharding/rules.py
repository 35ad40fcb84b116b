"""Which mesh axis shards which logical axis of the parameters.

Two visible tables, one for the trainer (fully sharded data parallelism, with
tensor parallelism inside) and one for the generator (tensor parallelism), and
one rule for what does not divide: the mesh axis moves to the first dimension
of the same leaf, in the order of `FALLBACK`, that it divides.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import math
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from llamarl_jax.sharding import offload
from llamarl_jax.sharding import spec as spec_lib

# Logical axis -> mesh axis, axes in order of preference, or () for replicated.
Rules = Mapping[str, str | tuple[str, ...]]

# A plan can be made for devices that are not there.
AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh

# Every matrix has an 'embed' dimension, so 'fsdp' shards every large leaf.
TRAINER_RULES: Rules = {
  'layers': (),  # Scanned over: a sharded layer axis would gather every step.
  # Devices that share the tokens of a row share the parameters, too.
  'embed': ('fsdp', 'sequence'),
  'mlp': 'tensor',
  'heads': 'tensor',
  'kv_heads': 'tensor',
  'head_dim': (),
  'vocab': 'tensor',
  'norm': (),
  'lora': (),
  'slots': (),
}

GENERATOR_RULES: Rules = {
  'layers': (),
  'embed': (),
  'mlp': 'tensor',
  'heads': 'tensor',
  'kv_heads': 'tensor',
  'head_dim': (),
  'vocab': 'tensor',
  'norm': (),
  'lora': (),
  'slots': (),
}

# Where a mesh axis goes that does not divide the dimension its rule names. A
# matrix product may be split along any of these: what is split by columns
# gives a part of the result, what is split by rows a part of each sum. Not
# along 'head_dim', which rotary embedding cuts in halves and attention sums
# over, nor along 'layers'. Decode slots are independent of each other.
FALLBACK = ('embed', 'vocab', 'mlp', 'slots')

# Rows of a batch are spread over both, as parameters are over 'fsdp' alone,
# and the tokens of a row over 'sequence'.
BATCH_AXES = ('data', 'fsdp')
TOKEN_AXIS = 'sequence'


def partition_spec(
  spec: spec_lib.ParamSpec, rules: Rules, mesh: AnyMesh
) -> PartitionSpec:
  """Returns how one parameter is laid out over `mesh`.

  A mesh axis shards at most one dimension of a leaf: the first that names it
  and that it divides; else the first in the order of `FALLBACK` that it
  divides beside the axes that are there; else none. Rules naming axes the mesh
  does not have leave the dimension replicated.

  Args:
    spec: the parameter.
    rules: logical axis -> mesh axes.
    mesh: where it is to live.

  Raises:
    ValueError: a logical axis is missing from `rules`.
  """
  return _partition(spec, rules, mesh)[0]


def shardings(specs: Any, mesh: AnyMesh, rules: Rules) -> tuple[Any, list[str]]:
  """Returns the sharding of every leaf, and what did not divide.

  Args:
    specs: tree of `ParamSpec`.
    mesh: where the parameters are to live.
    rules: logical axis -> mesh axes.

  Returns:
    A tree of `NamedSharding` of the same structure, and one readable line for
    each mesh axis that does not divide the dimension its rule names, with what
    became of it.

  Raises:
    ValueError: a logical axis is missing from `rules`.
  """
  notes = []
  for path, leaf in spec_lib.named_leaves(specs).items():
    notes += [f'{path}: {note}' for note in _partition(leaf, rules, mesh)[1]]
  tree = jax.tree.map(
    lambda leaf: NamedSharding(mesh, partition_spec(leaf, rules, mesh)), specs
  )
  return tree, notes


def batch_sharding(mesh: AnyMesh) -> NamedSharding:
  """Returns the sharding of arrays [R, T]: rows, and tokens over sequence."""
  rows = tuple(axis for axis in BATCH_AXES if axis in mesh.shape)
  tokens = TOKEN_AXIS if TOKEN_AXIS in mesh.shape else None
  return NamedSharding(mesh, PartitionSpec(rows or None, tokens))


def replicated(mesh: AnyMesh) -> NamedSharding:
  """Returns the sharding that keeps a whole copy on every device."""
  return NamedSharding(mesh, PartitionSpec())


def device_bytes(specs: Any, shardings: Any) -> int:
  """Returns the bytes of a tree in the memory of one device.

  Args:
    specs: tree of anything with shape and dtype.
    shardings: a sharding for each leaf.
  """

  def held(leaf: Any, sharding: NamedSharding) -> int:
    if sharding.memory_kind == offload.HOST:
      return 0
    shape = sharding.shard_shape(tuple(leaf.shape))
    return math.prod(shape) * leaf.dtype.itemsize

  return sum(jax.tree.leaves(jax.tree.map(held, specs, shardings)))


def _partition(
  spec: spec_lib.ParamSpec, rules: Rules, mesh: AnyMesh
) -> tuple[PartitionSpec, list[str]]:
  """Returns the layout of a leaf and notes on what does not divide."""
  layout: list[list[str]] = [[] for _ in spec.shape]
  left: dict[str, int] = {}  # Mesh axis -> dimension it did not divide.
  for dimension, logical in enumerate(spec.logical_axes):
    for axis in _mesh_axes(logical, rules):
      # An axis of size one shards nothing; leaving it out keeps layouts plain.
      if mesh.shape.get(axis, 1) == 1 or _place(axis, layout) is not None:
        continue
      if _divides(axis, dimension, layout, spec, mesh):
        layout[dimension].append(axis)
      else:
        left.setdefault(axis, dimension)
  notes = []
  for axis, dimension in left.items():
    if _place(axis, layout) is None:
      for other in _fallbacks(spec):
        if _divides(axis, other, layout, spec, mesh):
          layout[other].append(axis)
          break
    place = _place(axis, layout)
    outcome = (
      'replicated'
      if place is None
      else f'{spec.logical_axes[place]} of {spec.shape[place]} is sharded'
      ' instead'
    )
    notes.append(
      f'{spec.logical_axes[dimension]} of {spec.shape[dimension]} does not'
      f' divide over {axis}={mesh.shape[axis]}; {outcome}'
    )
  entries = [
    axes[0] if len(axes) == 1 else tuple(axes) or None for axes in layout
  ]
  return PartitionSpec(*entries), notes


def _place(axis: str, layout: Sequence[Sequence[str]]) -> int | None:
  """Returns the dimension that a mesh axis shards, if there is one."""
  places = [i for i, axes in enumerate(layout) if axis in axes]
  return places[0] if places else None


def _divides(
  axis: str,
  dimension: int,
  layout: Sequence[Sequence[str]],
  spec: spec_lib.ParamSpec,
  mesh: AnyMesh,
) -> bool:
  """Returns whether the axis can shard a dimension further, evenly."""
  parts = math.prod(mesh.shape[other] for other in layout[dimension])
  return spec.shape[dimension] % (parts * mesh.shape[axis]) == 0


def _fallbacks(spec: spec_lib.ParamSpec) -> list[int]:
  """Returns the dimensions that may take what others cannot, best first."""
  return sorted(
    (i for i, name in enumerate(spec.logical_axes) if name in FALLBACK),
    key=lambda i: FALLBACK.index(str(spec.logical_axes[i])),
  )


def _mesh_axes(logical: str | None, rules: Rules) -> tuple[str, ...]:
  """Returns the mesh axes a logical axis may use."""
  if logical is None:
    return ()
  if logical not in rules:
    raise ValueError(
      f'No rule for the logical axis {logical!r}; known: {sorted(rules)}.'
    )
  axes = rules[logical]
  return (axes,) if isinstance(axes, str) else axes

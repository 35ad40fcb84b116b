"""Which mesh axis shards which logical axis of the parameters.

Two visible tables, one for the trainer (fully sharded data parallelism, with
tensor parallelism inside) and one for the generator (tensor parallelism).
"""

from collections.abc import Mapping
import math
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from llamarl_jax.sharding import spec as spec_lib

# Logical axis -> mesh axis, axes in order of preference, or () for replicated.
Rules = Mapping[str, str | tuple[str, ...]]

# A plan can be made for devices that are not there.
AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh

# Every matrix has an 'embed' dimension, so 'fsdp' shards every large leaf.
TRAINER_RULES: Rules = {
  'layers': (),  # Scanned over: a sharded layer axis would gather every step.
  'embed': 'fsdp',
  'mlp': 'tensor',
  'heads': 'tensor',
  'kv_heads': 'tensor',
  'head_dim': (),
  'vocab': 'tensor',
  'norm': (),
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
}

# Rows of a batch are spread over both, as parameters are over 'fsdp' alone.
BATCH_AXES = ('data', 'fsdp')


def partition_spec(
  spec: spec_lib.ParamSpec, rules: Rules, mesh: AnyMesh
) -> PartitionSpec:
  """Returns how one parameter is laid out over `mesh`.

  A dimension that does not divide is replicated, and a mesh axis shards at
  most one dimension of a leaf (the first that can use it). Rules naming axes
  the mesh does not have leave the dimension replicated.

  Args:
    spec: the parameter.
    rules: logical axis -> mesh axes.
    mesh: where it is to live.

  Raises:
    ValueError: a logical axis is missing from `rules`.
  """
  return _partition(spec, rules, mesh)[0]


def shardings(specs: Any, mesh: AnyMesh, rules: Rules) -> tuple[Any, list[str]]:
  """Returns the sharding of every leaf, and what was replicated and why.

  Args:
    specs: tree of `ParamSpec`.
    mesh: where the parameters are to live.
    rules: logical axis -> mesh axes.

  Returns:
    A tree of `NamedSharding` of the same structure, and one readable line for
    each dimension that a rule would have sharded but which does not divide.

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


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding of arrays [R, ...] by rows, over data and fsdp."""
  axes = tuple(axis for axis in BATCH_AXES if axis in mesh.shape)
  return NamedSharding(mesh, PartitionSpec(axes or None))


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding that keeps a whole copy on every device."""
  return NamedSharding(mesh, PartitionSpec())


def _partition(
  spec: spec_lib.ParamSpec, rules: Rules, mesh: AnyMesh
) -> tuple[PartitionSpec, list[str]]:
  """Returns the layout of a leaf and notes on what does not divide."""
  used: set[str] = set()
  entries: list[str | tuple[str, ...] | None] = []
  notes = []
  for size, logical in zip(spec.shape, spec.logical_axes, strict=True):
    wanted = _mesh_axes(logical, rules)
    # An axis of size one shards nothing; leaving it out keeps layouts plain.
    axes = tuple(
      axis
      for axis in wanted
      if mesh.shape.get(axis, 1) > 1 and axis not in used
    )
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if size % parts:
      notes.append(
        f'{logical} of {size} does not divide over {"x".join(axes)}={parts}; '
        'replicated'
      )
      axes = ()
    used.update(axes)
    entries.append(axes[0] if len(axes) == 1 else axes or None)
  return PartitionSpec(*entries), notes


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

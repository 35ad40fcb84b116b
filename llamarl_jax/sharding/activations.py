"""Where activations live, told to the compiler at the points that decide.

Left to itself, the partitioner may keep weights sharded and replicate the
batch, which for fully sharded data parallelism is the wrong way round. What
the model computes is named here by logical axes, and laid out over the mesh
that the function is traced on; without one nothing changes.
"""

from collections.abc import Callable
import functools
import math
from typing import ParamSpec
from typing import TypeVar

import jax
from jax.sharding import PartitionSpec

from llamarl_jax.sharding import rules

_P = ParamSpec('_P')
_R = TypeVar('_R')

# Of activations, as the tables of `rules` are of parameters.
ACTIVATION_RULES: rules.Rules = {
  'rows': rules.BATCH_AXES,
  'tokens': rules.TOKEN_AXIS,
  'width': (),  # Whole on each device, as norms and residual sums need it.
  'heads': 'tensor',
  'kv_heads': 'tensor',
  'head_dim': (),
  'mlp': 'tensor',
  'vocab': 'tensor',
}


def on_mesh(fn: Callable[_P, _R], mesh: rules.AnyMesh) -> Callable[_P, _R]:
  """Returns `fn` with the activations of its models laid out over `mesh`.

  Args:
    fn: to be traced, by `jax.jit` for instance.
    mesh: with any of the axes data, fsdp, sequence and tensor.
  """
  abstract = mesh.abstract_mesh

  @functools.wraps(fn)
  def traced(*args: _P.args, **kwargs: _P.kwargs) -> _R:
    with jax.sharding.use_abstract_mesh(abstract):
      return fn(*args, **kwargs)

  return traced


def shares_tokens() -> bool:
  """Returns whether the mesh of the trace spreads the tokens of a row."""
  mesh = jax.sharding.get_abstract_mesh()
  return not mesh.empty and mesh.shape.get(rules.TOKEN_AXIS, 1) > 1


def constrain(x: jax.Array, *logical_axes: str | None) -> jax.Array:
  """Returns x, laid out as its logical axes say on the mesh of the trace.

  A dimension that its mesh axes do not divide is whole on each device.

  Args:
    x: f[B, *named] or f[B, T, *named]: what is not named are rows, and tokens.
    *logical_axes: for each of the last dimensions a key of `ACTIVATION_RULES`,
      or None where it is to be whole on each device.

  Raises:
    ValueError: there are more dimensions in front than two.
  """
  leading = x.ndim - len(logical_axes)
  if not 0 <= leading <= 2:
    raise ValueError(
      f'{logical_axes} name {len(logical_axes)} dimensions of the shape'
      f' {x.shape}; name all but rows and tokens'
    )
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return x
  entries = []
  names = ('rows', 'tokens')[:leading] + logical_axes
  for size, logical in zip(x.shape, names, strict=True):
    wanted = ACTIVATION_RULES[logical] if logical else ()
    candidates = (wanted,) if isinstance(wanted, str) else wanted
    axes = tuple(name for name in candidates if mesh.shape.get(name, 1) > 1)
    parts = math.prod(mesh.shape[name] for name in axes)
    if size % parts:
      axes = ()
    entries.append(axes[0] if len(axes) == 1 else axes or None)
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))

"""Weights in one byte, with a scale for each channel of a product's result.

Only weights are quantized, by rounding to nearest, on their way to a generator;
products are computed in the generator's dtype. qwix has the same arithmetic
(its QArray), but describes models by rewriting their operations as they run;
here a tree of specs must tell shardings and transports what will arrive, which
it has not, and the arithmetic is three lines.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from llamarl_jax.sharding import spec as spec_lib
from llamarl_jax.types import Params

# Kind -> element type. 'fp8' has 4 bits of exponent and 3 of mantissa:
# Micikevicius et al. (2022), https://arxiv.org/abs/2209.05433.
DTYPES: Mapping[str, Any] = {'int8': jnp.int8, 'fp8': jnp.float8_e4m3fn}

# Weights that are quantized -> dimensions they are summed over in a product;
# the first dimension of a layer's weight numbers the layers. A token's row of
# the embedding is its column of the output projection where they are tied.
_INNER: Mapping[str, tuple[int, ...]] = {
  'embedding': (1,),
  'head': (0,),
  'query': (1,),
  'key': (1,),
  'value': (1,),
  'output': (1, 2),
  'gate': (1,),
  'up': (1,),
  'down': (1,),
}
_VALUES, _SCALE = 'values', 'scale'


def abstract(specs: Params, kind: str) -> Params:
  """Returns the specs of quantized parameters.

  Args:
    specs: tree of `ParamSpec`, as `llama.abstract_params` gives it, without
      adapters.
    kind: a key of DTYPES; '' quantizes nothing.

  Returns:
    A tree with {'values': ..., 'scale': ...} in place of each quantized leaf,
    `scale` of size 1 along what is summed over. Norms and biases are as before.
  """
  if not kind:
    return specs

  def describe(spec: spec_lib.ParamSpec, inner: tuple[int, ...]) -> Params:
    sizes, axes = list(spec.shape), list(spec.logical_axes)
    for dimension in inner:
      sizes[dimension], axes[dimension] = 1, None
    return {
      _VALUES: dataclasses.replace(spec, dtype=jnp.dtype(DTYPES[kind])),
      _SCALE: spec_lib.ParamSpec(tuple(sizes), jnp.dtype('float32'), (*axes,)),
    }

  return _map_weights(describe, specs)


def quantize(params: Params, kind: str) -> Params:
  """Returns parameters as `abstract` describes them.

  scale = max |w| over what is summed over / largest value of the kind
  values = round(w / scale)

  Args:
    params: tree of arrays, without adapters.
    kind: a key of DTYPES; '' quantizes nothing.
  """
  if not kind:
    return params
  dtype = jnp.dtype(DTYPES[kind])
  exact = jnp.issubdtype(dtype, jnp.integer)
  # -128 is left out: the values are as many on either side of 0.
  largest = float((jnp.iinfo if exact else jnp.finfo)(dtype).max)

  def convert(weight: jax.Array, inner: tuple[int, ...]) -> Params:
    weight = weight.astype(jnp.float32)
    peak = jnp.max(jnp.abs(weight), axis=inner, keepdims=True)
    scale = jnp.where(peak > 0, peak / largest, 1.0)
    # The peak itself may come out a rounding error above the largest.
    values = jnp.clip(weight / scale, -largest, largest)
    values = (jnp.round(values) if exact else values).astype(dtype)
    return {_VALUES: values, _SCALE: scale}

  return _map_weights(convert, params)


def dequantize(tree: Params, dtype: jax.typing.DTypeLike) -> Params:
  """Returns the tree with weights again: values * scale, in `dtype`.

  Args:
    tree: quantized parameters or a part of them, also one layer; what is not
      quantized is passed through.
    dtype: of the weights; the product is rounded to it once.
  """

  def convert(node: Any) -> Any:
    if not is_quantized(node):
      return node
    return (node[_VALUES].astype(jnp.float32) * node[_SCALE]).astype(dtype)

  return jax.tree.map(convert, tree, is_leaf=is_quantized)


def rows(
  table: Any, indices: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
  """Returns rows of a weight, f[..., D], converting no others.

  Args:
    table: f[V, D], or such a weight quantized.
    indices: i32[...], of rows.
    dtype: of the result.
  """
  if not is_quantized(table):
    return table[indices].astype(dtype)
  part = {name: leaf[indices] for name, leaf in table.items()}
  return dequantize(part, dtype)


def is_quantized(node: Any) -> bool:
  """Returns whether a node of a tree stands for one quantized weight."""
  return isinstance(node, Mapping) and node.keys() == {_VALUES, _SCALE}


def num_bytes(specs: Params) -> int:
  """Returns the bytes of a tree of `ParamSpec`: those of a publication."""
  return sum(leaf.nbytes for leaf in jax.tree.leaves(specs))


def _map_weights(fn: Any, tree: Params) -> Params:
  """Returns the tree with fn(leaf, inner dimensions) for quantized weights."""

  def visit(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
    name = str(path[-1].key)
    return fn(leaf, _INNER[name]) if name in _INNER else leaf

  return jax.tree_util.tree_map_with_path(visit, tree)

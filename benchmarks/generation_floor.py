"""What a decode step must at least take on this machine, measured.

floor = max(bytes read / bandwidth, arithmetic / rate of matrix products)

Bytes are those of all weights and of the used part of the cache; arithmetic is
that of S tokens. The bandwidth is measured by reading as many bytes as weights
have; the rate by products of [S, in] with each matrix of a layer, which stays
in the processor's caches, by XLA or numpy, whichever is faster.
"""

import collections
from collections.abc import Callable
from collections.abc import Mapping
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import generation_workload as workload_lib
from benchmarks import workload as shapes_lib

# Products one after another in a measurement.
REPEATS = 16
_ROWS = 64

# Does its work to the end.
WorkFn = Callable[[], Any]


class Cost(NamedTuple):
  """What a decode step of S tokens reads and computes."""

  weight_bytes: int
  cache_bytes: float
  flops: float


def step_cost(workload: workload_lib.GenerationWorkload) -> Cost:
  """Returns the mean cost of a decode step while all slots are in use.

  A slot's cache is counted as far as it is used: a prompt, and the half of its
  new tokens, weighted by how long each completion runs.
  """
  shape = workload.shape
  lengths = np.array(workload.lengths, np.float64)
  # The token at place p reads p + 1 positions; completions of n tokens are
  # seen n times.
  used = workload.prompt + np.sum(lengths * (lengths - 1) / 2) / lengths.sum()
  row = 2 * shape.num_kv_heads * shape.head_dim * shape.num_layers * 4
  norms = (2 * shape.num_layers + 1) * shape.width
  parameters = shapes_lib.num_parameters(shape)
  attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * used
  return Cost(
    weight_bytes=4 * parameters,
    cache_bytes=workload.slots * used * row,
    # Tied: the embedding is multiplied with as the head, and read as a table.
    flops=workload.slots * (2 * (parameters - norms) + attention),
  )


def make_reading(workload: workload_lib.GenerationWorkload) -> WorkFn:
  """Returns a function that reads as many bytes as the weights have."""
  # In rows, of which the sums are made side by side.
  count = shapes_lib.num_parameters(workload.shape) // _ROWS
  array = jnp.ones((_ROWS, count), jnp.float32)
  total = jax.jit(functools.partial(jnp.sum, axis=1))
  return lambda: total(array).block_until_ready()


def reading_bytes(workload: workload_lib.GenerationWorkload) -> int:
  """Returns the bytes that the function of `make_reading` reads."""
  count = shapes_lib.num_parameters(workload.shape) // _ROWS
  return 4 * _ROWS * count


def layer_products(
  workload: workload_lib.GenerationWorkload,
) -> dict[tuple[int, int], int]:
  """Returns how many matrices of each shape [in, out] a layer has."""
  shape = workload.shape
  query = shape.num_heads * shape.head_dim
  keys = shape.num_kv_heads * shape.head_dim
  counts: dict[tuple[int, int], int] = collections.Counter()
  for size in (
    (shape.width, query),
    (shape.width, keys),
    (shape.width, keys),
    (query, shape.width),
    (shape.width, shape.mlp_width),
    (shape.width, shape.mlp_width),
    (shape.mlp_width, shape.width),
  ):
    counts[size] += 1
  return counts


def make_products(
  workload: workload_lib.GenerationWorkload,
) -> dict[tuple[str, tuple[int, int]], WorkFn]:
  """Returns functions that multiply, by library and shape of the matrix.

  Each does `REPEATS` products, so that starting one is no part of it.
  """
  functions: dict[tuple[str, tuple[int, int]], WorkFn] = {}
  for size in layer_products(workload):
    x = np.ones((workload.slots, size[0]), np.float32)
    matrix = np.ones(size, np.float32)
    functions['xla', size] = _xla_product(x, matrix)
    functions['numpy', size] = _numpy_product(x, matrix)
  return functions


def product_rate(
  workload: workload_lib.GenerationWorkload,
  seconds: Mapping[tuple[str, tuple[int, int]], float],
) -> float:
  """Returns the arithmetic a second of the products of one layer.

  Args:
    workload: whose layer.
    seconds: of each function of `make_products`.
  """
  flops = total = 0.0
  for size, count in layer_products(workload).items():
    best = min(s for (_, found), s in seconds.items() if found == size)
    flops += count * 2.0 * workload.slots * size[0] * size[1]
    total += count * best / REPEATS
  return flops / total


def _xla_product(x: np.ndarray, matrix: np.ndarray) -> WorkFn:
  def products(x: jax.Array, matrix: jax.Array) -> jax.Array:
    def once(i: jax.Array, total: jax.Array) -> jax.Array:
      # Another factor each time, or one product would do for all.
      return total + (x + i.astype(x.dtype)) @ matrix

    start = jnp.zeros((x.shape[0], matrix.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, REPEATS, once, start)

  compiled = jax.jit(products)
  arguments = jax.device_put((x, matrix))
  return lambda: compiled(*arguments).block_until_ready()


def _numpy_product(x: np.ndarray, matrix: np.ndarray) -> WorkFn:
  out = np.empty((x.shape[0], matrix.shape[1]), np.float32)

  def products() -> None:
    for _ in range(REPEATS):
      np.matmul(x, matrix, out=out)

  return products

"""Measures the train step: tokens/s, arithmetic against the machine's, memory.

  python -m benchmarks.training [--workload=3m] [--rounds=7] [--json=FILE]

Forward pass, gradient and whole step are timed in turns with a large matrix
product, which says what the machine gives just then: the ratio of the two
rates holds from one moment to another, and from machine to machine.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import json
import pathlib
import resource
import statistics
import time
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp

from benchmarks import train_steps
from benchmarks import workload as workload_lib
from llamarl_jax.runtime import host_memory

_WORKLOAD = flags.DEFINE_enum(
  'workload', '3m', sorted(workload_lib.WORKLOADS), 'What to run.'
)
_ROUNDS = flags.DEFINE_integer('rounds', 7, 'Runs of each.', lower_bound=1)
_JSON = flags.DEFINE_string('json', None, 'File to write the results to.')

_MATMUL_SIZE = 2048


def prepare(
  name: str,
) -> tuple[dict[str, Callable[[], Any]], dict[str, float], dict[str, int]]:
  """Returns what is timed, the arithmetic of each, and compiled memory."""
  workload = workload_lib.WORKLOADS[name]
  batch = train_steps.load_batch(workload)
  loss = functools.partial(train_steps.loss, workload)
  state = train_steps.load_state(workload)
  forward = jax.jit(loss).lower(state.params, batch).compile()
  gradient = jax.jit(jax.grad(loss)).lower(state.params, batch).compile()
  train_step = (
    train_steps.make_train_step(workload).lower(state, batch).compile()
  )
  square = jnp.ones((_MATMUL_SIZE, _MATMUL_SIZE), jnp.float32)
  product = jax.jit(jnp.matmul)

  def step() -> Any:
    nonlocal state
    state, metrics = train_step(state, batch)
    return state, metrics

  flops = workload_lib.forward_flops(workload)
  # A gradient is a forward pass and two products more for each of its own.
  arithmetic = {
    'forward': flops,
    'gradient': 3 * flops,
    'step': 3 * flops,
    'matmul': 2.0 * _MATMUL_SIZE**3,
  }
  analysis = train_step.memory_analysis()
  memory = {
    'temporary_bytes': analysis.temp_size_in_bytes,
    'argument_bytes': analysis.argument_size_in_bytes,
  }
  functions = {
    'forward': lambda: forward(state.params, batch),
    'gradient': lambda: gradient(state.params, batch),
    'step': step,
    'matmul': lambda: product(square, square),
  }
  return functions, arithmetic, memory


def measure(
  functions: dict[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
  """Returns the seconds of each function in each round, taken in turns."""
  seconds: dict[str, list[float]] = {name: [] for name in functions}
  for i in range(rounds + 1):
    for name, function in functions.items():
      start = time.perf_counter()
      jax.block_until_ready(function())
      if i > 0:  # The first run is a warm-up.
        seconds[name].append(time.perf_counter() - start)
  return seconds


def summary(
  name: str,
  seconds: dict[str, list[float]],
  arithmetic: dict[str, float],
  memory: dict[str, int],
) -> dict[str, Any]:
  """Returns medians and rates, as they go into the JSON file."""
  workload = workload_lib.WORKLOADS[name]
  medians = {k: statistics.median(v) for k, v in seconds.items()}
  rates = {k: arithmetic[k] / medians[k] for k in medians}
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  return {
    'workload': name,
    'num_parameters': workload_lib.num_parameters(workload),
    'rows': workload.rows,
    'row_length': workload.length,
    'device': jax.devices()[0].device_kind,
    'jax': jax.__version__,
    'median_seconds': medians,
    'seconds': seconds,
    'tokens_per_second': workload.num_tokens / medians['step'],
    'flops_per_second': rates,
    'fraction_of_matmul_rate': {
      k: rate / rates['matmul'] for k, rate in rates.items()
    },
    'peak_resident_bytes': peak,
    **memory,
  }


def table(result: dict[str, Any]) -> str:
  """Returns the results for people to read."""
  lines = [
    f'{result["workload"]}: {result["num_parameters"] / 1e6:.2f} M parameters,'
    f' {result["rows"]} x {result["row_length"]} tokens, float32,'
    f' jax {result["jax"]} on {result["device"]}',
    'part      seconds  GFLOP/s  of the matmul rate',
  ]
  for name, seconds in result['median_seconds'].items():
    lines.append(
      f'{name:9}{seconds:8.3f}'
      f'{result["flops_per_second"][name] / 1e9:9.0f}'
      f'{result["fraction_of_matmul_rate"][name]:20.2f}'
    )
  lines.append(
    f'{result["tokens_per_second"]:.0f} tokens/s; memory of the step: '
    f'{result["argument_bytes"] / 1e9:.2f} GB of state and batch, '
    f'{result["temporary_bytes"] / 1e9:.2f} GB temporary; peak of the process '
    f'{result["peak_resident_bytes"] / 1e9:.2f} GB'
  )
  return '\n'.join(lines)


def main(arguments: Sequence[str]) -> None:
  """Runs the command."""
  del arguments
  host_memory.keep_freed_memory()
  functions, arithmetic, memory = prepare(_WORKLOAD.value)
  seconds = measure(functions, _ROUNDS.value)
  result = summary(_WORKLOAD.value, seconds, arithmetic, memory)
  if _JSON.value:
    pathlib.Path(_JSON.value).write_text(json.dumps(result, indent=1))
  print(table(result))


if __name__ == '__main__':
  app.run(main)

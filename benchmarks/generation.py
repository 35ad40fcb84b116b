"""Measures the engine: tokens/s, decode steps against the machine's floor.

  python -m benchmarks.generation [--workload=smollm2] [--rounds=7]
      [--json=FILE]

Runs of the workload, and of its first token alone, are timed in turns with a
reading of memory and with matrix products, from which the floor of a decode
step follows (`generation_floor.py`). A step is what a run takes beyond its
first token, by the steps it takes beyond the first: sampling, recording and
what the host does between segments included.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import json
import pathlib
import resource
import statistics
import time
from typing import Any

from absl import app
from absl import flags
import jax

from benchmarks import generation_engine
from benchmarks import generation_floor
from benchmarks import generation_workload as workload_lib
from benchmarks import workload as shapes_lib
from llamarl_jax.runtime import host_memory


def make_runs(
  workload: workload_lib.GenerationWorkload, runs: list[generation_engine.Run]
) -> tuple[dict[str, Callable[[], Any]], str]:
  """Returns the run of a workload and of its first token, and the cache.

  Args:
    workload: what to run.
    runs: takes what each whole run did.
  """
  engine = generation_engine.make_engine(workload)
  policy = generation_engine.load_policy(workload)
  engine.warm_up(policy.params)
  prompts = workload_lib.prompts(workload)
  batch = prompts[: workload.slots]
  asked = generation_engine.requests(prompts, workload.lengths, 1.0)
  first = generation_engine.requests(batch, [1] * len(batch), 1.0)

  def run() -> None:
    runs.append(generation_engine.run(engine, lambda: policy, asked))

  def run_first() -> None:
    generation_engine.run(engine, lambda: policy, first)

  return {'run': run, 'first': run_first}, engine.plan.describe()


def measure(
  functions: Mapping[Hashable, Callable[[], Any]], rounds: int
) -> dict[Hashable, list[float]]:
  """Returns the seconds of each function in each round, taken in turns."""
  seconds: dict[Hashable, list[float]] = {name: [] for name in functions}
  for i in range(rounds + 1):
    for name, function in functions.items():
      start = time.perf_counter()
      function()
      if i > 0:  # The first round is a warm-up.
        seconds[name].append(time.perf_counter() - start)
  return seconds


def summary(
  name: str,
  seconds: Mapping[Hashable, list[float]],
  run: generation_engine.Run,
  cache: str,
) -> dict[str, Any]:
  """Returns medians, floor and rates, as they go into the JSON file."""
  workload = workload_lib.WORKLOADS[name]
  medians = {k: statistics.median(v) for k, v in seconds.items()}
  cost = generation_floor.step_cost(workload)
  bandwidth = generation_floor.reading_bytes(workload) / medians['reading']
  products = {k: v for k, v in medians.items() if isinstance(k, tuple)}
  rate = generation_floor.product_rate(workload, products)
  memory_floor = (cost.weight_bytes + cost.cache_bytes) / bandwidth
  compute_floor = cost.flops / rate
  floor = max(memory_floor, compute_floor)
  step = (medians['run'] - medians['first']) / (run.num_steps - 1)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  return {
    'workload': name,
    'num_parameters': shapes_lib.num_parameters(workload.shape),
    'device': jax.devices()[0].device_kind,
    'jax': jax.__version__,
    'seconds': {str(k): v for k, v in seconds.items()},
    'tokens_per_second': workload.num_tokens / medians['run'],
    'first_token_seconds': medians['first'],
    'num_steps': run.num_steps,
    'num_segments': len(run.stats),
    'occupancy': run.occupancy(workload.slots),
    'static_occupancy': workload_lib.static_occupancy(workload),
    'step_seconds': step,
    'floor_seconds': floor,
    'memory_floor_seconds': memory_floor,
    'compute_floor_seconds': compute_floor,
    'step_over_floor': step / floor,
    'bytes_per_second': bandwidth,
    'flops_per_second': rate,
    'cost': cost._asdict(),
    'cache': cache,
    'peak_resident_bytes': peak,
  }


def table(result: Mapping[str, Any]) -> str:
  """Returns the results for people to read."""
  cost = result['cost']
  return '\n'.join(
    [
      f'{result["workload"]}: {result["num_parameters"] / 1e6:.2f} M'
      f' parameters, float32, jax {result["jax"]} on {result["device"]};'
      f' {result["cache"]}',
      f'{result["tokens_per_second"]:.0f} tokens/s; first token of all slots'
      f' after {result["first_token_seconds"]:.3f} s; {result["num_steps"]}'
      f' steps in {result["num_segments"]} segments; slots in use'
      f' {result["occupancy"]:.2f} (without refill'
      f' {result["static_occupancy"]:.2f}); peak of the process'
      f' {result["peak_resident_bytes"] / 1e9:.2f} GB',
      f'decode step {result["step_seconds"] * 1e3:.2f} ms, the floor'
      f' {result["floor_seconds"] * 1e3:.2f} ms:'
      f' {result["step_over_floor"]:.2f} times',
      f'  {cost["weight_bytes"] / 1e6:.1f} MB of weights and'
      f' {cost["cache_bytes"] / 1e6:.1f} MB of cache at'
      f' {result["bytes_per_second"] / 1e9:.1f} GB/s:'
      f' {result["memory_floor_seconds"] * 1e3:.2f} ms',
      f'  {cost["flops"] / 1e9:.2f} GFLOP at'
      f' {result["flops_per_second"] / 1e9:.0f} GFLOP/s:'
      f' {result["compute_floor_seconds"] * 1e3:.2f} ms',
    ]
  )


def main(arguments: Sequence[str]) -> None:
  """Runs the command."""
  del arguments
  host_memory.keep_freed_memory()
  values = flags.FLAGS
  workload = workload_lib.WORKLOADS[values.workload]
  runs: list[generation_engine.Run] = []
  functions, cache = make_runs(workload, runs)
  seconds = measure(
    {
      **functions,
      'reading': generation_floor.make_reading(workload),
      **generation_floor.make_products(workload),
    },
    values.rounds,
  )
  result = summary(values.workload, seconds, runs[-1], cache)
  if values.json:
    pathlib.Path(values.json).write_text(json.dumps(result, indent=1))
  print(table(result))


def _define_flags() -> None:
  names = sorted(workload_lib.WORKLOADS)
  flags.DEFINE_enum('workload', 'smollm2', names, 'What to generate.')
  flags.DEFINE_integer('rounds', 7, 'Runs of each.', lower_bound=1)
  flags.DEFINE_string('json', None, 'File to write the results to.')


if __name__ == '__main__':
  _define_flags()
  app.run(main)

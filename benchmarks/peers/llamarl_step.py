"""Worker: the train step of this project."""

import jax

from benchmarks import train_steps
from benchmarks import workload as workload_lib
from benchmarks.peers import turns
from llamarl_jax.runtime import host_memory


def make_step(workload: workload_lib.Workload) -> turns.StepFn:
  """Returns the step; it is compiled when first called."""
  train_step = train_steps.make_train_step(workload)
  batch = train_steps.load_batch(workload)
  state = train_steps.load_state(workload)

  def step() -> float:
    nonlocal state
    state, metrics = train_step(state, batch)
    jax.block_until_ready(state)
    return float(metrics['grad_norm'])

  return step


if __name__ == '__main__':
  # As executors do when they are processes.
  host_memory.keep_freed_memory()
  turns.serve(make_step, ('jax', 'jaxlib', 'optax'))

"""How the driver and its workers take turns: lines of JSON over pipes.

A worker prepares one train step, says that it is ready, and then sleeps but
for its turns. Standard library only: workers run in many environments.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import time
from typing import Any

from benchmarks import workload as workload_lib

# Does one train step to its end; returns the norm of the gradient.
StepFn = Callable[[], float]
MakeStepFn = Callable[[workload_lib.Workload], StepFn]


def serve(make_step: MakeStepFn, packages: Sequence[str]) -> None:
  """Runs a worker: prepares, then does as many steps as each line asks for.

  Args:
    make_step: prepares the step of a workload.
    packages: whose versions to report.
  """
  # What libraries print must not get between the answers.
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)

  def answer(**facts: Any) -> None:
    print(json.dumps(facts), file=answers, flush=True)

  step = make_step(workload_lib.WORKLOADS[sys.argv[1]])
  start = time.perf_counter()
  grad_norm = step()
  answer(
    python=platform.python_version(),
    versions={name: importlib.metadata.version(name) for name in packages},
    grad_norm=grad_norm,
    first_seconds=time.perf_counter() - start,
  )
  for line in sys.stdin:
    seconds = []
    for _ in range(int(line)):
      start = time.perf_counter()
      step()
      seconds.append(time.perf_counter() - start)
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer(seconds=seconds, peak_bytes=kibibytes * 1024)


class Worker:
  """A worker process, from the side of the driver."""

  def __init__(self, python: str, module: str, workload: str):
    """Starts the process and waits until it is ready.

    Args:
      python: interpreter of its environment.
      module: its program.
      workload: a key of `workload.WORKLOADS`.

    Raises:
      RuntimeError: if it ends before it is ready.
    """
    self._module = module
    self._process = subprocess.Popen(
      [python, '-m', module, workload],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    self.facts = self._read()

  def turn(self, num_steps: int) -> Mapping[str, Any]:
    """Returns the seconds of each of `num_steps`, and the peak of memory."""
    assert self._process.stdin is not None
    print(num_steps, file=self._process.stdin, flush=True)
    return self._read()

  def close(self) -> None:
    """Ends the process."""
    self._process.kill()
    self._process.wait()

  def _read(self) -> dict[str, Any]:
    assert self._process.stdout is not None
    line = self._process.stdout.readline()
    if not line:
      code = self._process.wait()
      raise RuntimeError(f'{self._module} ended with code {code}; see above')
    return json.loads(line)

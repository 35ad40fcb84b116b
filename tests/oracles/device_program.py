"""Runs a program of the tests with another number of simulated devices."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any


def run(program: str, num_devices: int) -> Any:
  """Returns what a program prints, as JSON; its warnings are errors.

  Args:
    program: path of the file.
    num_devices: simulated, fixed when a process starts.
  """
  root = pathlib.Path(__file__).parents[2]
  environment = {
    **os.environ,
    'PYTHONPATH': str(root),
    # The last of two equal flags counts.
    'XLA_FLAGS': os.environ['XLA_FLAGS']
    + f' --xla_force_host_platform_device_count={num_devices}',
  }
  done = subprocess.run(
    [sys.executable, '-W', 'error', program],
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)

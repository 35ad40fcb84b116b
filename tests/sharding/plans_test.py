"""Plans between random shardings of JAX over up to sixteen devices."""

import json
import os
import pathlib
import subprocess
import sys

from tests.sharding import sixteen_devices as program


def test_slices_make_up_what_jax_lays_out():
  root = pathlib.Path(__file__).parents[2]
  environment = {
    **os.environ,
    'PYTHONPATH': str(root),
    'XLA_FLAGS': '--xla_force_host_platform_device_count=16',
  }
  run = subprocess.run(
    [sys.executable, '-W', 'error', program.__file__],
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  assert run.returncode == 0, run.stderr
  result = json.loads(run.stdout)
  assert result['cases'] >= 500
  # Equal shapes in other places: where a transfer by shard number corrupts.
  assert result['silent'] >= 10

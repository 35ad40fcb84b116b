"""Planning a run starts no JAX backend: the controller has no devices."""

import os
import subprocess
import sys

_PROGRAM = """
import pathlib
from configs import arithmetic
from llamarl_jax.controller import builder

config = arithmetic.get_config()
config.trainer.lora_rank = 4
plan = builder.build(config, pathlib.Path('nowhere'))
print(plan.program.notes)
"""


def test_building_a_program_needs_no_platform():
  # With a platform that does not exist, whatever starts a backend fails.
  result = subprocess.run(
    [sys.executable, '-c', _PROGRAM],
    env={**os.environ, 'JAX_PLATFORMS': 'no_such_platform'},
    capture_output=True,
    text=True,
    check=False,
  )
  assert result.returncode == 0, result.stderr
  assert 'GB a device' in result.stdout

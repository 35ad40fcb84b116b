"""An engine whose layers 2 or 4 devices share makes what one device makes."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.sampling import four_devices as program


@pytest.fixture(scope='module')
def results():
  root = pathlib.Path(__file__).parents[2]
  environment = {
    **os.environ,
    'PYTHONPATH': str(root),
    # The last of two equal flags counts.
    'XLA_FLAGS': os.environ['XLA_FLAGS']
    + ' --xla_force_host_platform_device_count=4',
  }
  run = subprocess.run(
    [sys.executable, '-W', 'error', program.__file__],
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  assert run.returncode == 0, run.stderr
  return json.loads(run.stdout)


@pytest.mark.parametrize('model', program.MODELS)
@pytest.mark.parametrize('num_devices', program.NUM_DEVICES[1:])
def test_equals_one_device(results, model, num_devices):
  alone = results[model]['1']
  shared = results[model][str(num_devices)]
  assert len(alone) == len(shared) == 8
  for (tokens, log_probs), (others, other_log_probs) in zip(
    alone, shared, strict=True
  ):
    assert tokens == others
    np.testing.assert_allclose(other_log_probs, log_probs, atol=2e-5)
  # Not all the same, nor all of one length.
  assert len({len(tokens) for tokens, _ in alone}) > 1

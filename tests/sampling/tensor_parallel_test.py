"""An engine whose layers 2 or 4 devices share makes what one device makes."""

import numpy as np
import pytest

from tests.oracles import device_program
from tests.sampling import four_devices as program


@pytest.fixture(scope='module')
def results():
  return device_program.run(program.__file__, 4)


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

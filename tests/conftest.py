"""Settings of every test: two simulated devices, no implicit broadcasting."""

import os

# Before jax is imported: two simulated CPU devices, so that a two-device mesh
# can be tested anywhere.
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'

import jax
import pytest

jax.config.update('jax_numpy_rank_promotion', 'raise')


@pytest.fixture(autouse=True)
def _fixed_precision():
  """Leaves global JAX settings as each test found them."""
  before = jax.config.jax_numpy_rank_promotion
  yield
  jax.config.update('jax_numpy_rank_promotion', before)

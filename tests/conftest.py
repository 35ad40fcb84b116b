"""Settings of every test: two simulated devices, no implicit broadcasting."""

import os
import tempfile

# Before jax is imported: two simulated CPU devices, so that a two-device mesh
# can be tested anywhere. Executor processes that tests start inherit these.
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'
# Many tests run the same small programs: each is compiled once a session.
_CACHE = tempfile.TemporaryDirectory(prefix='llamarl_jax_compiled_')
os.environ['JAX_COMPILATION_CACHE_DIR'] = _CACHE.name
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.2'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'

import jax
import pytest

jax.config.update('jax_numpy_rank_promotion', 'raise')


@pytest.fixture(autouse=True)
def _same_settings():
  """Leaves global JAX settings as each test found them."""
  before = jax.config.jax_numpy_rank_promotion
  yield
  jax.config.update('jax_numpy_rank_promotion', before)

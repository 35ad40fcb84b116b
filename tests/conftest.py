"""Settings of every test: two simulated devices, no implicit broadcasting."""

from importlib import metadata
import os
import tempfile

# Before jax is imported: two simulated CPU devices, so that a two-device mesh
# can be tested anywhere. Executor processes that tests start inherit these.
os.environ['JAX_PLATFORMS'] = 'cpu'
_FLAGS = ['--xla_force_host_platform_device_count=2']
# Programs are compiled for longer than they run, most of it in LLVM.
os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] = '1'
if metadata.version('jaxlib').startswith('0.10.'):
  # Later versions have no other way to compile fusions, and no such flag.
  _FLAGS.append('--xla_cpu_use_fusion_emitters=false')
os.environ['XLA_FLAGS'] = ' '.join(_FLAGS)
# Many tests run the same small programs: each is compiled once a session. The
# first process makes the folder; those that share the tests with it, and those
# that tests start, inherit it.
if 'PYTEST_XDIST_WORKER' not in os.environ:
  _CACHE = tempfile.TemporaryDirectory(
    prefix='llamarl_jax_compiled_', ignore_cleanup_errors=True
  )
  os.environ['JAX_COMPILATION_CACHE_DIR'] = _CACHE.name
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.02'
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

"""Measures the memory it takes to load a Hugging Face folder onto a mesh.

  python -m benchmarks.load_memory [--architecture=llama-3.2-1b]
      [--devices=8] [--dtype=bfloat16] [--folder=DIR]

Writes a random bfloat16 checkpoint of the architecture's shapes (2.5 GB for
the default) into a temporary folder, loads it in a process of its own onto
simulated CPU devices under the trainer's rules, fsdp over all of them, and
prints the peak of resident memory above what the process held before plus the
finished arrays. The folder is deleted at the end; --folder measures one that
is there instead.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from absl import app
from absl import flags
import numpy as np

# The loading process is told by this variable what to load.
_JOB = 'LLAMARL_JAX_LOAD_MEMORY_JOB'


def write_random(folder: pathlib.Path, architecture: str) -> None:
  """Writes a checkpoint of random weights, one tensor in memory at a time."""
  from llamarl_jax.checkpoints import hf_config
  from llamarl_jax.checkpoints import hf_tensors
  from llamarl_jax.checkpoints import safetensors_format
  from llamarl_jax.models import catalog

  config = catalog.ARCHITECTURES[architecture]
  hf_config.write_config(folder, config)
  shapes = {place.name: place.shape for place in hf_tensors.places(config)}
  rng = np.random.default_rng(0)

  def make(name: str) -> np.ndarray:
    # Random signs and mantissas with one exponent: numbers of size 2 ** -7.
    bits = rng.integers(2**16, size=shapes[name], dtype=np.uint16)
    bits = (bits & 0x807F) | 0x3C00
    return bits.view(safetensors_format.DTYPES['BF16'])

  path = folder / hf_tensors.SINGLE_FILE
  safetensors_format.write(path, shapes, 'BF16', make)


def load(folder: str, dtype: str) -> dict[str, float]:
  """Loads a folder onto all devices of this process.

  Returns:
    Bytes resident before, at the peak and after, bytes of the arrays, and the
    seconds it took.
  """
  import jax

  from llamarl_jax.checkpoints import hf
  from llamarl_jax.checkpoints import hf_config
  from llamarl_jax.models import llama
  from llamarl_jax.sharding import mesh as mesh_lib
  from llamarl_jax.sharding import rules

  config = hf_config.read_config(folder)
  devices = jax.devices()
  mesh = mesh_lib.make_mesh({'fsdp': len(devices)}, devices)
  shardings, notes = rules.shardings(
    llama.abstract_params(config), mesh, rules.TRAINER_RULES
  )
  if notes:
    print('\n'.join(notes), file=sys.stderr)
  before = _status_bytes('VmRSS')
  # The kernel counts the peak from here on.
  pathlib.Path('/proc/self/clear_refs').write_text('5')
  start = time.monotonic()
  params = hf.load_params(folder, config, shardings, jax.numpy.dtype(dtype))
  jax.block_until_ready(params)
  return {
    'seconds': time.monotonic() - start,
    'before': before,
    'peak': _status_bytes('VmHWM'),
    'after': _status_bytes('VmRSS'),
    'arrays': sum(x.nbytes for x in jax.tree.leaves(params)),
  }


def _status_bytes(field: str) -> int:
  """Returns a field of this process's memory status (Linux)."""
  for line in pathlib.Path('/proc/self/status').read_text().splitlines():
    if line.startswith(f'{field}:'):
      return int(line.split()[1]) * 1024
  raise RuntimeError(f'/proc/self/status has no {field}')


def measure(folder: str, num_devices: int, dtype: str) -> dict[str, float]:
  """Returns what `load` does, from a process of its own."""
  done = subprocess.run(
    [sys.executable, '-m', 'benchmarks.load_memory'],
    env={
      **os.environ,
      'JAX_PLATFORMS': 'cpu',
      'XLA_FLAGS': f'--xla_force_host_platform_device_count={num_devices}',
      _JOB: json.dumps([folder, dtype]),
    },
    stdout=subprocess.PIPE,
    check=True,
  )
  return json.loads(done.stdout)


def main(arguments: list[str]) -> None:
  """Runs the command."""
  del arguments
  values = flags.FLAGS
  with tempfile.TemporaryDirectory() as temporary:
    folder = values.folder or temporary
    if not values.folder:
      write_random(pathlib.Path(folder), values.architecture)
    facts = measure(folder, values.devices, values.dtype)
  above = facts['peak'] - facts['before'] - facts['arrays']
  print(
    f'{values.folder or values.architecture} as {values.dtype} on '
    f'{values.devices} devices: arrays {facts["arrays"] / 1e9:.2f} GB, peak '
    f'above them {above / 1e9:.3f} GB, loaded in {facts["seconds"]:.1f} s '
    f'(resident before {facts["before"] / 1e9:.2f}, peak '
    f'{facts["peak"] / 1e9:.2f}, after {facts["after"] / 1e9:.2f} GB)'
  )


def _define_flags() -> None:
  flags.DEFINE_string('architecture', 'llama-3.2-1b', 'A name in catalog.')
  flags.DEFINE_integer('devices', 8, 'Simulated CPU devices.')
  flags.DEFINE_enum(
    'dtype', 'bfloat16', ['bfloat16', 'float32'], 'Of the arrays.'
  )
  flags.DEFINE_string('folder', None, 'Model folder in place of a random one.')


if __name__ == '__main__':
  if _JOB in os.environ:
    print(json.dumps(load(*json.loads(os.environ[_JOB]))))
  else:
    _define_flags()
    app.run(main)

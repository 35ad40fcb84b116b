"""Peak memory of a fetch, for a model of about 1.2 billion parameters.

  python -m benchmarks.publication_memory

A trainer process publishes twice by `transfer`; this process, which holds the
first version, fetches the second. What its resident memory grows by beyond the
two versions and the staging memory of the transfer library is printed, beside
the bound of 300 MB, with the seconds of the fetch. Linux only: it reads /proc.
"""

from collections.abc import Sequence
import dataclasses
import functools
import multiprocessing
import pathlib
import threading
import time
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp

from llamarl_jax import types
from llamarl_jax.channels import registry
from llamarl_jax.channels import weights
from llamarl_jax.models import catalog
from llamarl_jax.models import llama
from llamarl_jax.sharding import spec

_MODEL = flags.DEFINE_string('model', 'llama-3.2-1b', 'Which architecture.')
_LAYERS = flags.DEFINE_integer('num_layers', 0, 'Layers; 0 for all.')
_DTYPE = flags.DEFINE_string('dtype', 'bfloat16', 'Of what is published.')

_BOUND_BYTES = 300e6
_SAMPLE_SECONDS = 0.005


def resident_bytes() -> int:
  """Returns the resident memory of this process."""
  for line in pathlib.Path('/proc/self/status').read_text().splitlines():
    if line.startswith('VmRSS:'):
      return int(line.split()[1]) * 1024
  raise RuntimeError('no VmRSS in /proc/self/status')


def specs_of(model: str, num_layers: int, dtype: str) -> Any:
  """Returns the abstract parameters of a published architecture."""
  config = catalog.find(model)
  if num_layers:
    config = dataclasses.replace(config, num_layers=num_layers)
  return jax.tree.map(
    lambda leaf: dataclasses.replace(leaf, dtype=jnp.dtype(dtype)),
    llama.abstract_params(config),
  )


def publish(commands: Any, model: str, num_layers: int, dtype: str) -> None:
  """Publishes on command; the body of the trainer process.

  Args:
    commands: connection that destinations come from and manifests go to; None
      publishes the next version, False ends.
    model: architecture.
    num_layers: layers, or 0 for all.
    dtype: of the parameters.
  """
  specs = specs_of(model, num_layers, dtype)
  publisher = registry.TRANSPORTS['transfer'].publisher(
    weights.TransportSettings()
  )
  batches = 0
  while (destination := commands.recv()) is not False:
    if destination is None:
      batches += 1
      # Leaf by leaf the numbers are all alike: only their bytes matter.
      params = jax.tree.map(functools.partial(_filled, value=batches), specs)
      version = types.Version(0, batches)
      publisher.publish(types.VersionedParams(version, params))
      del params
      commands.send(version)
    else:
      commands.send(publisher.offer(destination))
  publisher.close()


def _filled(leaf: spec.ParamSpec, *, value: int) -> jax.Array:
  """Returns an array of one number."""
  return jnp.full(leaf.shape, value, leaf.dtype)


class _Peak:
  """The most memory this process has had while it runs."""

  def __init__(self) -> None:
    self.num_bytes = resident_bytes()
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._watch)
    self._thread.start()

  def _watch(self) -> None:
    while not self._stop.wait(_SAMPLE_SECONDS):
      self.num_bytes = max(self.num_bytes, resident_bytes())

  def stop(self) -> int:
    """Returns the peak."""
    self._stop.set()
    self._thread.join()
    return self.num_bytes


def main(argv: Sequence[str]) -> None:
  """Prints one table."""
  del argv
  arguments = (_MODEL.value, _LAYERS.value, _DTYPE.value)
  context = multiprocessing.get_context('spawn')
  commands, theirs = context.Pipe()
  trainer = context.Process(target=publish, args=(theirs, *arguments))
  trainer.start()
  specs = specs_of(*arguments)
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  settings = weights.TransportSettings()
  subscriber = registry.TRANSPORTS['transfer'].subscriber(
    'generator', specs, jax.tree.map(lambda _: device, specs), settings
  )
  model_bytes = sum(leaf.nbytes for leaf in spec.named_leaves(specs).values())
  held: list[types.VersionedParams] = []
  print(f'{_MODEL.value}, {model_bytes / 1e9:.2f} GB in {_DTYPE.value}')
  print(
    '| version | fetch, s | GB/s | CPU here, s | held before, MB | peak, MB'
    ' | beyond, MB |'
  )
  print('|---|---|---|---|---|---|---|')
  for _ in range(2):
    commands.send(None)
    commands.recv()
    commands.send(subscriber.request())
    manifest = commands.recv()
    before = resident_bytes()
    peak = _Peak()
    cpu = time.process_time()
    subscriber.begin(manifest)
    while not subscriber.ready():
      time.sleep(0.001)
    held.append(subscriber.take())
    most = peak.stop()
    cpu = time.process_time() - cpu
    report = subscriber.report
    assert report is not None
    beyond = most - before - model_bytes
    print(
      f'| {report.version.batches} | {report.seconds:.2f}'
      f' | {report.bytes / report.seconds / 1e9:.2f} | {cpu:.1f}'
      f' | {before / 1e6:,.0f}'
      f' | {most / 1e6:,.0f} | {beyond / 1e6:,.0f} |',
      flush=True,
    )
  staging = settings.num_parallel_copies * settings.copy_bytes
  print(
    f'staging memory of the library: {staging / 1e6:.0f} MB a side; window of'
    f' chunks: {settings.window_bytes / 1e6:.0f} MB, of which'
    f' {report.staging_bytes / 1e6:.0f} MB were used. Bound beyond old, spare'
    f' and staging: {_BOUND_BYTES / 1e6:.0f} MB; found: '
    f'{(beyond - staging) / 1e6:,.0f} MB (version 2).'
  )
  commands.send(False)
  trainer.join()


if __name__ == '__main__':
  app.run(main)

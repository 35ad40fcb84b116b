"""One process of a jax.distributed world, for world_test.

Run with its index, the number of processes, the coordinator's address and the
file descriptor of a connection. The last process is a generator, the others are
the trainer. Obeys pickled commands and answers each with one object.
"""

from multiprocessing import connection
import sys

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from llamarl_jax import types
from llamarl_jax.channels import registry
from llamarl_jax.channels import weights
from llamarl_jax.sharding import digest
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import spec as spec_lib

# Name -> (shape, dtype, layout of the trainer, layout of the generator).
LEAVES = {
  'embedding': ((8, 12), 'float32', P('fsdp', None), P(None, 'tensor')),
  'up': (
    (2, 8, 512),
    'bfloat16',
    P(None, 'fsdp', None),
    P(None, None, 'tensor'),
  ),
  'norm': ((8,), 'float32', P(), P()),
  'scale': ((), 'float32', P(), P()),
  'values': ((16, 4), 'int8', P('fsdp', None), P('tensor', None)),
}
SETTINGS = weights.TransportSettings(
  deadline_seconds=60.0, chunk_bytes=1 << 11, window_bytes=1 << 12
)
TRANSPORTS = ('transfer', 'collective')


def values(batches):
  """Returns the arrays of one version, by leaf."""
  rng = np.random.default_rng(batches)
  return {
    name: np.asarray(rng.normal(size=shape) * 30).astype(dtype)
    for name, (shape, dtype, _, _) in LEAVES.items()
  }


class _Trainer:
  """One process of the trainer."""

  def __init__(self, num_processes):
    devices = [d for d in jax.devices() if d.process_index < num_processes]
    mesh = mesh_lib.make_mesh({'fsdp': len(devices)}, devices)
    self._layouts = {
      name: NamedSharding(mesh, layout)
      for name, (_, _, layout, _) in LEAVES.items()
    }
    self._publishers = {
      name: registry.TRANSPORTS[name].publisher(SETTINGS) for name in TRANSPORTS
    }

  def publish(self, transport, batches):
    """Returns the digests of what it published."""
    host = values(batches)
    params = {
      name: jax.make_array_from_callback(
        host[name].shape, layout, host[name].__getitem__
      )
      for name, layout in self._layouts.items()
    }
    version = types.Version(0, batches)
    self._publishers[transport].publish(types.VersionedParams(version, params))
    return digest.tree_digests(params)

  def offer(self, transport, destination):
    """Returns the manifest of this process."""
    return self._publishers[transport].offer(destination)

  def serve(self, transport, destination):
    """Does its part of a fetch."""
    self._publishers[transport].serve(destination)


class _Generator:
  """The generator, on the devices of its process."""

  def __init__(self):
    mesh = mesh_lib.make_mesh({'tensor': 2}, jax.local_devices())
    specs = {
      name: spec_lib.ParamSpec(shape, dtype, (None,) * len(shape))
      for name, (shape, dtype, _, _) in LEAVES.items()
    }
    shardings = {
      name: NamedSharding(mesh, layout)
      for name, (_, _, _, layout) in LEAVES.items()
    }
    self._subscribers = {
      name: registry.TRANSPORTS[name].subscriber(
        'generator', specs, shardings, SETTINGS
      )
      for name in TRANSPORTS
    }

  def request(self, transport):
    """Returns the destination."""
    return self._subscribers[transport].request()

  def fetch(self, transport, manifest):
    """Returns version, digests and host arrays of what arrived."""
    subscriber = self._subscribers[transport]
    subscriber.begin(manifest)
    while not subscriber.ready():
      pass
    taken = subscriber.take()
    return (
      taken.version,
      digest.tree_digests(taken.params),
      jax.device_get(taken.params),
    )


def main():
  index, count = int(sys.argv[1]), int(sys.argv[2])
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(sys.argv[3], count, index)
  commands = connection.Connection(int(sys.argv[4]))
  role = _Generator() if index == count - 1 else _Trainer(count - 1)
  while True:
    name, *arguments = commands.recv()
    if name == 'close':
      commands.send('closed')
      break
    commands.send(getattr(role, name)(*arguments))
  jax.distributed.shutdown()


if __name__ == '__main__':
  main()

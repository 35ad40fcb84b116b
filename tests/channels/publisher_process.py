"""A trainer's end in a process of its own, for transfer_test.

Run with the file descriptor of a connection; obeys pickled commands
(name, argument) and answers each with one object.
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

# Name -> (specification, layout over the two devices of the publisher).
LEAVES = {
  'embedding': (((8, 6), 'float32'), P('fsdp', None)),
  'mlp/up': (((2, 6, 4), 'float32'), P(None, 'fsdp', None)),
  'norm': (((6,), 'bfloat16'), P(None)),
  'quantized': (((4, 4), 'int8'), P('fsdp', None)),
  'scale': (((), 'float32'), P()),
}


def values(batches):
  """Returns the arrays of one version, by leaf."""
  rng = np.random.default_rng(batches)
  return {
    name: np.asarray(rng.normal(size=shape) * 30).astype(dtype)
    for name, ((shape, dtype), _) in LEAVES.items()
  }


def specs():
  """Returns the abstract tree."""
  return {
    name: spec_lib.ParamSpec(shape, dtype, (None,) * len(shape))
    for name, ((shape, dtype), _) in LEAVES.items()
  }


def main():
  commands = connection.Connection(int(sys.argv[1]))
  mesh = mesh_lib.make_mesh({'fsdp': 2}, jax.devices())
  layouts = {
    name: NamedSharding(mesh, layout) for name, (_, layout) in LEAVES.items()
  }
  publisher = registry.TRANSPORTS['transfer'].publisher(
    weights.TransportSettings()
  )
  while True:
    name, argument = commands.recv()
    if name == 'publish':
      params = jax.device_put(values(argument), layouts)
      publisher.publish(
        types.VersionedParams(types.Version(0, argument), params)
      )
      commands.send(digest.tree_digests(params))
      jax.tree.map(lambda leaf: leaf.delete(), params)
    elif name == 'offer':
      commands.send(publisher.offer(argument))
    else:
      publisher.close()
      commands.send('closed')
      return


if __name__ == '__main__':
  main()

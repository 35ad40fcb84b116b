"""A trainer's end in a process of its own, for transfer_test.

Run with the file descriptor of a connection; obeys pickled commands
(name, argument) and answers each with one object.
"""

from multiprocessing import connection
import os
import sys

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from llamarl_jax import types
from llamarl_jax.channels import registry
from llamarl_jax.channels import transfer
from llamarl_jax.channels import weights
from llamarl_jax.sharding import digest
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import spec as spec_lib

NUM_DEVICES = 4
AXES = {'fsdp': 2, 'tensor': 2}
# Small chunks, so that there are many.
SETTINGS = {'chunk_bytes': 1 << 16, 'window_bytes': 1 << 17}
# Name -> (specification, layout over the devices of the publisher).
LEAVES = {
  'embedding': (((8, 6), 'float32'), P('fsdp', None)),
  'large': (((64, 4096), 'float32'), P(('fsdp', 'tensor'), None)),
  'mlp/up': (((2, 6, 4), 'float32'), P(None, 'fsdp', 'tensor')),
  'norm': (((6,), 'bfloat16'), P(None)),
  'quantized': (((4, 4), 'int8'), P('fsdp', None)),
  'scale': (((), 'float32'), P()),
  'values': (((2, 8), 'float8_e4m3fn'), P(None, ('tensor', 'fsdp'))),
}
DTYPES = ('float32', 'float8_e4m3fn')
NUM_RANDOM = 48


def random_leaves():
  """Returns leaves like LEAVES of random shape, dtype and layout."""
  rng = np.random.default_rng(0)
  leaves = {}
  for i in range(NUM_RANDOM):
    # Few shapes: each new one is a program to compile.
    shape = ((8, 8), (16,))[rng.integers(2)]
    dtype = DTYPES[rng.integers(len(DTYPES))]
    leaves[f'random{i:02}'] = ((shape, dtype), random_layout(rng, shape, AXES))
  return leaves


def random_layout(rng, shape, axes):
  """Returns a layout that puts each mesh axis on one dimension, or none."""
  layout = [[] for _ in shape]
  for axis in rng.permutation(list(axes)):
    place = int(rng.integers(-1, len(shape)))
    parts = int(np.prod([axes[other] for other in layout[place]]))
    if place >= 0 and shape[place] % (parts * axes[axis]) == 0:
      layout[place].append(str(axis))
  return P(*(tuple(names) or None for names in layout))


def values(batches, leaves=None):
  """Returns the arrays of one version, by leaf."""
  rng = np.random.default_rng(batches)
  return {
    name: np.asarray(rng.normal(size=shape) * 30).astype(dtype)
    for name, ((shape, dtype), _) in (leaves or LEAVES).items()
  }


def specs(leaves=None):
  """Returns the abstract tree."""
  return {
    name: spec_lib.ParamSpec(shape, dtype, (None,) * len(shape))
    for name, ((shape, dtype), _) in (leaves or LEAVES).items()
  }


class _Faults:
  """What goes wrong with the pieces given out, on command."""

  def __init__(self):
    self._give = transfer._give
    transfer._give = self._faulty_give
    server = transfer.transfer_server.Server
    self._offer = server.offer
    # Not a bound method: the server it is called on is its argument.
    server.offer = lambda *args: self._faulty_offer(*args)
    self.corrupt = 0  # So many pieces of the leaf 'norm'.
    self.signal = None  # (pieces before it, signal sent to this process)
    self.lose = 0  # So many offers are never made.

  def _faulty_give(self, held, wanted):
    piece = self._give(held, wanted)
    if wanted.leaf == 'norm' and self.corrupt:
      self.corrupt -= 1
      return piece.at[1].add(1)
    if self.signal is not None:
      left, signal = self.signal
      self.signal = (left - 1, signal) if left else None
      if not left:
        os.kill(os.getpid(), signal)
    return piece

  def _faulty_offer(self, server, arrays):
    if self.lose:
      self.lose -= 1
      return 12345
    return self._offer(server, arrays)


def main():
  commands = connection.Connection(int(sys.argv[1]))
  mesh = mesh_lib.make_mesh(AXES, jax.devices())
  publisher = registry.TRANSPORTS['transfer'].publisher(
    weights.TransportSettings(deadline_seconds=60.0, **SETTINGS)
  )
  faults = _Faults()
  while True:
    name, argument = commands.recv()
    if name == 'publish':
      batches, kind = argument
      leaves = random_leaves() if kind == 'random' else LEAVES
      layouts = {
        n: NamedSharding(mesh, layout) for n, (_, layout) in leaves.items()
      }
      params = jax.device_put(values(batches, leaves), layouts)
      publisher.publish(
        types.VersionedParams(types.Version(0, batches), params)
      )
      commands.send(digest.tree_digests(params))
      jax.tree.map(lambda leaf: leaf.delete(), params)
    elif name == 'offer':
      commands.send(publisher.offer(argument))
    elif name == 'fault':
      for key, value in argument.items():
        setattr(faults, key, value)
      commands.send(None)
    elif name == 'resident_bytes':
      with open('/proc/self/statm') as file:
        pages = int(file.read().split()[1])
      commands.send(pages * os.sysconf('SC_PAGE_SIZE'))
    else:
      publisher.close()
      commands.send('closed')
      return


if __name__ == '__main__':
  main()

"""The slice plan of Llama 3.1 405B, from 512 trainer to 512 generator devices.

  python -m benchmarks.publication_plan

Prints how long the planning takes, the traffic of each link, and the time it
must take at a link speed. No device takes part: all but the seconds of planning
is predicted. The paper (Wu et al., 2025) measured 2.31 s for this model, with a
layout over 1024 GPUs that it does not give.
"""

from collections.abc import Mapping
import dataclasses
import time
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp

from llamarl_jax.models import catalog
from llamarl_jax.models import llama
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import reshard
from llamarl_jax.sharding import rules
from llamarl_jax.sharding import spec
from llamarl_jax.sharding import traffic

_MODEL = flags.DEFINE_string('model', 'llama-3.1-405b', 'Which architecture.')
_DTYPE = flags.DEFINE_string('dtype', 'bfloat16', 'Of what is published.')
_FSDP = flags.DEFINE_integer('fsdp', 64, 'Size of that axis of the trainer.')
_TENSOR = flags.DEFINE_integer('tensor', 8, 'Of that axis of the trainer.')
_REPLICAS = flags.DEFINE_integer('replicas', 64, 'Generators.')
_GENERATOR_TENSOR = flags.DEFINE_integer(
  'generator_tensor', 8, 'Devices of a generator.'
)
_GBITS = flags.DEFINE_float('link_gbits', 400.0, 'Gb/s of a link, each way.')
_PER_LINK = flags.DEFINE_integer('devices_per_link', 1, 'That share a link.')

# Table of the paper's section on DDMA, 405B.
_PAPER_SECONDS = {'llama-3.1-405b': '2.31'}


def shard_maps(
  specs: Any, axes: Mapping[str, int], table: rules.Rules
) -> dict[str, reshard.ShardMap]:
  """Returns where each leaf lives on a mesh of devices that are not there.

  Args:
    specs: tree of `ParamSpec`.
    axes: sizes of the mesh axes.
    table: which mesh axis shards what.
  """
  shardings, _ = rules.shardings(specs, mesh_lib.abstract_mesh(axes), table)
  by_path = spec.named_leaves(shardings)
  return {
    path: reshard.shard_map_of(by_path[path], leaf.shape)
    for path, leaf in spec.named_leaves(specs).items()
  }


def main(argv: list[str]) -> None:
  """Prints the plan of the model and layout that the flags name."""
  del argv
  dtype = jnp.dtype(_DTYPE.value)
  specs = jax.tree.map(
    lambda leaf: dataclasses.replace(leaf, dtype=dtype),
    llama.abstract_params(catalog.find(_MODEL.value)),
  )
  itemsizes = dict.fromkeys(spec.named_leaves(specs), dtype.itemsize)
  started = time.monotonic()
  source = shard_maps(
    specs, {'fsdp': _FSDP.value, 'tensor': _TENSOR.value}, rules.TRAINER_RULES
  )
  destination = shard_maps(
    specs,
    {'data': _REPLICAS.value, 'tensor': _GENERATOR_TENSOR.value},
    rules.GENERATOR_RULES,
  )
  plan = reshard.plan_slices(source, destination, itemsizes)
  first = time.monotonic() - started
  started = time.monotonic()
  reshard.plan_slices(source, destination, itemsizes)
  again = time.monotonic() - started
  link = {
    'link_bits_per_second': _GBITS.value * 1e9,
    'devices_per_link': _PER_LINK.value,
  }
  print(f'{_MODEL.value} in {_DTYPE.value}')
  print(traffic.describe(plan, **link))
  predicted = traffic.predict_seconds(plan, **link)
  paper = _PAPER_SECONDS.get(_MODEL.value, '-')
  print()
  print(
    '| planning, s | planning again, s | publication, s | in the paper, s |'
  )
  print('|---|---|---|---|')
  print(f'| {first:.2f} | {again:.3f} | {predicted:.2f} | {paper} |')
  print('| measured | measured | predicted | measured |')


if __name__ == '__main__':
  app.run(main)

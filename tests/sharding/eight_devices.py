"""Run by many_devices_test: one train step on meshes of eight devices.

Prints one JSON object: for each case how far log-probs, gradients and new
parameters are from those of one device, and the shapes in the compiled step.
"""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

from llamarl_jax import types
from llamarl_jax.algorithms import registry
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import rules
from llamarl_jax.sharding import spec
from llamarl_jax.training import optimizer as optimizer_lib
from llamarl_jax.training import state as state_lib
from llamarl_jax.training import step as step_lib

ROWS, LENGTH, COMPLETION = 16, 20, 8
# Unlike any other size, to be found in the compiled program.
VOCABULARY = 8 * 37
WIDTH, MLP = 48, 56
DIVISIBLE = config_lib.LlamaConfig(
  vocab_size=VOCABULARY,
  width=WIDTH,
  num_layers=2,
  num_heads=24,
  num_kv_heads=8,
  head_dim=6,
  mlp_width=MLP,
  rope_theta=1e4,
)
INDIVISIBLE = dataclasses.replace(
  DIVISIBLE, num_heads=9, num_kv_heads=3, tie_embeddings=False
)
MESHES = {
  'fsdp 8': {'fsdp': 8},
  'tensor 8': {'tensor': 8},
  'fsdp 4 x tensor 2': {'fsdp': 4, 'tensor': 2},
  'data 2 x fsdp 2 x tensor 2': {'data': 2, 'fsdp': 2, 'tensor': 2},
  'fsdp 2 x sequence 2 x tensor 2': {'fsdp': 2, 'sequence': 2, 'tensor': 2},
}
CASES = (
  *(f'divisible, {name}' for name in MESHES),
  'indivisible, fsdp 2 x sequence 2 x tensor 2',
)
B1 = 0.9
# Adam divides by the root of the second moment: with a small epsilon a first
# step is the sign of the gradient, and rounding of small ones would show whole.
OPTIMIZER = optimizer_lib.make_optimizer(
  learning_rate=1e-2, b1=B1, epsilon=1e-2, clip_norm=math.inf
)


def _batch():
  random = np.random.default_rng(0)
  shape = (ROWS, LENGTH)
  places = np.arange(LENGTH)
  mask = np.tile((places >= 5) & (places < 5 + COMPLETION), (ROWS, 1))
  return types.Trajectories(
    tokens=random.integers(0, VOCABULARY, shape).astype(np.int32),
    completion_mask=mask,
    segment_ids=np.tile(places < LENGTH - 2, (ROWS, 1)).astype(np.int32),
    positions=np.tile(places, (ROWS, 1)).astype(np.int32),
    behavior_log_probs=np.where(mask, -5.0, 0.0).astype(np.float32),
    policy_version=np.zeros(shape, np.int32),
    advantages=np.where(mask, random.normal(size=shape), 0).astype(np.float32),
  )


def _loss(log_probs, batch):
  """Returns the AIPO loss, with the log-probs themselves as a metric."""
  loss_fn = registry.make_loss(
    name='aipo',
    max_importance_ratio=4.0,
    clip_low=0.2,
    clip_high=0.2,
    reduction='token',
    constant_length=COMPLETION,
    kl_estimator='k3',
    kl_coefficient=0.0,
  )
  loss, metrics = loss_fn(log_probs, batch)
  fixed = jax.lax.stop_gradient(log_probs)
  seen = types.Mean(fixed, jnp.ones_like(fixed))
  return types.LossOutput(loss, {**metrics, 'log_probs': seen})


def _run(model, initial, axes):
  """Returns host arrays by name, notes, and the compiled train step.

  Args:
    model: config of the network.
    initial: train state, host arrays.
    axes: sizes of the mesh axes above 1.
  """
  sizes = {'data': 1, 'fsdp': 1, 'sequence': 1, 'tensor': 1, **axes}
  count = math.prod(sizes.values())
  mesh = mesh_lib.make_mesh(sizes, jax.devices()[:count])
  _, notes = rules.shardings(
    llama.abstract_params(model), mesh, rules.TRAINER_RULES
  )
  plan = state_lib.plan_train_state(model, OPTIMIZER, mesh)
  shardings = jax.tree.map(lambda x: x.sharding, plan)
  state = jax.device_put(initial, shardings)
  batch = jax.device_put(_batch(), rules.batch_sharding(mesh))
  step = step_lib.make_train_step(
    model,
    _loss,
    OPTIMIZER,
    temperature=1.0,
    max_completion=COMPLETION,
    state_shardings=shardings,
  )
  compiled = step.lower(state, batch).compile()
  state, metrics = jax.device_get(compiled(state, batch))
  arrays = {'log_probs': metrics['log_probs']}
  for name, leaf in spec.named_leaves(state.params).items():
    arrays[f'params/{name}'] = leaf
  # The first moment after one step from 0 is (1 - b1) times the gradient.
  moment = optax.tree.get(state.opt_state, 'mu')
  for name, leaf in spec.named_leaves(moment).items():
    arrays[f'gradients/{name}'] = leaf / (1 - B1)
  return arrays, notes, compiled


@functools.partial(jax.jit, static_argnums=0)
def _initial(model):
  params = llama.init_params(model, jax.random.key(1))
  return state_lib.init_train_state(params, OPTIMIZER)


def _difference(found, expected):
  """Returns the largest difference over the largest value, of each kind."""
  worst = {}
  for name, array in expected.items():
    kind = name.split('/')[0]
    error = np.max(np.abs(found[name] - array)) / np.max(np.abs(array))
    worst[kind] = max(worst.get(kind, 0.0), float(error))
  return worst


def _shapes(compiled):
  """Returns the distinct shapes of arrays in a compiled program."""
  found = re.findall(r'\b(?:f32|bf16)\[([\d,]+)\]', compiled.as_text())
  return sorted({tuple(map(int, shape.split(','))) for shape in found})


def main():
  # As of a large model, layers are scanned over: compiled once, not each.
  llama.MAX_UNROLLED = llama._MAX_UNROLLED_ON_CPU = 0
  results = {}
  for kind, model in (('divisible', DIVISIBLE), ('indivisible', INDIVISIBLE)):
    initial = jax.device_get(_initial(model))
    expected, _, _ = _run(model, initial, {})
    for name, axes in MESHES.items():
      if f'{kind}, {name}' not in CASES:
        continue
      found, notes, compiled = _run(model, initial, axes)
      results[f'{kind}, {name}'] = {
        'difference': _difference(found, expected),
        'notes': notes,
        'shapes': _shapes(compiled),
      }
  print(json.dumps(results))


if __name__ == '__main__':
  jax.config.update('jax_numpy_rank_promotion', 'raise')
  main()

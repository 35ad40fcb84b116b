"""Configs of large models are planned and traced on meshes of no devices."""

import importlib
import math

import jax
import pytest

from llamarl_jax import types
from llamarl_jax.controller import builder
from llamarl_jax.controller import checks
from llamarl_jax.controller import problems
from llamarl_jax.data import tokenizers
from llamarl_jax.executors import generator
from llamarl_jax.executors import policy
from llamarl_jax.executors import trainer
from llamarl_jax.models import catalog
from llamarl_jax.models import llama
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import rules
from llamarl_jax.training import optimizer as optimizer_lib
from llamarl_jax.training import state as state_lib

_NAMES = (
  'llama3_1b_gsm8k',
  'llama3_8b_math',
  'llama3_70b_math',
  'llama3_405b_math',
)
# Of the hardware that the docstrings state.
_DEVICE_BYTES = 80e9


def _load(name):
  """Returns config, docstring and model; no file of the model is read."""
  module = importlib.import_module(f'configs.{name}')
  config = module.get_config()
  checks.check_config(config)
  model = problems.Model(
    policy.PolicySource(
      catalog.find(config.model.architecture), 'hf', 'nowhere', config.seed
    ),
    tokenizers.CharacterTokenizer(),
    problems.ChatTemplate('', '', ''),
  )
  return config, module.__doc__, model


def _batch(config, mesh):
  """Returns one batch of full rows, as shapes."""
  sharding = rules.batch_sharding(mesh)
  shape = (config.trainer.pack_rows, config.trainer.pack_tokens)

  def array(dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  return types.Trajectories(
    tokens=array('int32'),
    completion_mask=array('bool'),
    segment_ids=array('int32'),
    positions=array('int32'),
    behavior_log_probs=array('float32'),
    policy_version=array('int32'),
    advantages=array('float32'),
  )


@pytest.mark.parametrize('name', _NAMES)
def test_builds_without_weights_and_devices(name, tmp_path):
  config, text, model = _load(name)
  program = builder.make_program(config, model, tmp_path)
  assert not list(tmp_path.iterdir())
  num_devices = sum(node.num_devices for node in program.nodes)
  assert f'{num_devices} GPUs of 80 GB' in text
  assert f'make train CONFIG=configs/{name}.py' in text

  # The trainer: float32 weights, two moments, a gradient, a published copy.
  (node,) = program.of_role('trainer')
  settings = node.arguments['settings']
  mesh = mesh_lib.abstract_mesh(node.mesh)
  assert mesh.size == node.num_devices
  optimizer = optimizer_lib.make_optimizer(**settings.optimizer)
  state = state_lib.plan_train_state(
    settings.source.model,
    optimizer,
    mesh,
    offload_optimizer=settings.offload_optimizer,
  )
  shardings = jax.tree.map(lambda x: x.sharding, state)
  weights = rules.device_bytes(state.params, shardings.params)
  held = rules.device_bytes(state, shardings) + 2 * weights
  assert held < _DEVICE_BYTES
  # Nothing large is whole on a device.
  exact = 4 * sum(map(_size, jax.tree.leaves(state.params))) / mesh.size
  assert weights < 1.01 * exact * config.trainer.data
  step = trainer.make_step(
    settings, settings.source.model, optimizer, shardings
  )
  traced = step.trace(state, _batch(config, mesh))
  after, metrics = traced.out_info
  assert jax.tree.map(_shape, after) == jax.tree.map(_shape, state)
  assert metrics['loss'].shape == ()

  # A generator: weights in use, weights arriving, keys and values.
  node = program.of_role('generator')[0]
  settings = node.arguments['settings']
  mesh = mesh_lib.abstract_mesh(node.mesh)
  assert mesh.size == node.num_devices
  plan = generator.cache_plan(settings)
  specs = {
    'in use': llama.abstract_params(settings.model),
    'arriving': llama.abstract_params(settings.model),
    'cache': [plan.slots, plan.lines],
  }
  shardings, _ = rules.shardings(specs, mesh, rules.GENERATOR_RULES)
  assert rules.device_bytes(specs, shardings) < _DEVICE_BYTES


def _size(leaf):
  return math.prod(leaf.shape)


def _shape(leaf):
  return (leaf.shape, leaf.dtype)

"""Optimizer state lives where its parameters live, or rests on the host."""

import dataclasses
from unittest import mock

from absl.testing import parameterized
import jax
import numpy as np
import pytest

from llamarl_jax.algorithms import registry
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import offload
from llamarl_jax.sharding import rules
from llamarl_jax.sharding import spec
from llamarl_jax.training import optimizer as optimizer_lib
from llamarl_jax.training import state as state_lib
from llamarl_jax.training import step as step_lib
from llamarl_jax.types import Trajectories

_MODEL = config_lib.LlamaConfig(
  vocab_size=24,
  width=16,
  num_layers=1,
  num_heads=2,
  num_kv_heads=2,
  head_dim=8,
  mlp_width=24,
  rope_theta=1e4,
)
_OPTIMIZER = optimizer_lib.make_optimizer(learning_rate=1e-2, weight_decay=0.1)


def _plan(mesh, *, offload_optimizer=False, model=_MODEL):
  """Returns the abstract state and its shardings."""
  state = state_lib.plan_train_state(
    model, _OPTIMIZER, mesh, offload_optimizer=offload_optimizer
  )
  return state, jax.tree.map(lambda x: x.sharding, state)


def _batch(mesh):
  shape = (4, 6)
  mask = np.tile(np.arange(6) > 2, (4, 1))
  random = np.random.default_rng(0)
  batch = Trajectories(
    tokens=random.integers(0, 24, shape).astype(np.int32),
    completion_mask=mask,
    segment_ids=np.ones(shape, np.int32),
    positions=np.tile(np.arange(6, dtype=np.int32), (4, 1)),
    behavior_log_probs=np.where(mask, -3.0, 0.0).astype(np.float32),
    policy_version=np.zeros(shape, np.int32),
    advantages=np.where(mask, random.normal(size=shape), 0).astype(np.float32),
  )
  return jax.device_put(batch, rules.batch_sharding(mesh))


def _train(mesh, *, offload_optimizer):
  """Returns the state after two steps."""
  _, shardings = _plan(mesh, offload_optimizer=offload_optimizer)
  params = jax.jit(llama.init_params, static_argnums=0)(
    _MODEL, jax.random.key(0)
  )
  state = jax.device_put(
    state_lib.init_train_state(params, _OPTIMIZER), shardings
  )
  step = step_lib.make_train_step(
    _MODEL,
    registry.make_loss(
      name='aipo',
      max_importance_ratio=4.0,
      clip_low=0.2,
      clip_high=0.2,
      reduction='token',
      constant_length=3,
      kl_estimator='k3',
      kl_coefficient=0.0,
    ),
    _OPTIMIZER,
    temperature=1.0,
    max_completion=3,
    state_shardings=shardings,
  )
  for _ in range(2):
    state, metrics = step(state, _batch(mesh))
  assert metrics['step_skipped'] == 0
  return state, shardings


class StateTest(parameterized.TestCase):
  @parameterized.parameters(2, 9)
  def test_every_moment_is_sharded_like_its_parameter(self, num_heads):
    mesh = mesh_lib.abstract_mesh(
      {'data': 2, 'fsdp': 2, 'sequence': 2, 'tensor': 4}
    )
    model = dataclasses.replace(
      _MODEL, num_heads=num_heads, num_kv_heads=1, tie_embeddings=False
    )
    state, shardings = _plan(mesh, model=model)
    of_params = spec.named_leaves(shardings.params)
    seen = dict.fromkeys(of_params, 0)
    shapes = spec.named_leaves(state.opt_state)
    for path, sharding in spec.named_leaves(shardings.opt_state).items():
      owner = [name for name in of_params if path.endswith(f'/{name}')]
      if not owner:
        # Counts of updates, of which every device has its own.
        self.assertEqual(shapes[path].shape, ())
        self.assertTrue(sharding.is_fully_replicated)
        continue
      self.assertEqual(sharding, of_params[owner[0]], path)
      seen[owner[0]] += 1
    # AdamW has two moments.
    self.assertEqual(set(seen.values()), {2})

  def test_offloaded_moments_change_no_bit(self):
    mesh = mesh_lib.make_mesh({'fsdp': 2, 'tensor': 1}, jax.devices()[:2])
    plain, _ = _train(mesh, offload_optimizer=False)
    rested, shardings = _train(mesh, offload_optimizer=True)
    kinds = set()
    for path, leaf in spec.named_leaves(rested.opt_state).items():
      # Counters stay: what is read by the host anyway gains nothing there.
      expected = offload.HOST if leaf.ndim else offload.DEVICE
      self.assertEqual(leaf.sharding.memory_kind, expected, path)
      kinds.add(expected)
    self.assertEqual(kinds, {offload.HOST, offload.DEVICE})
    jax.tree.map(np.testing.assert_array_equal, plain, rested)
    held = rules.device_bytes(rested, shardings)
    self.assertEqual(
      held, rules.device_bytes(rested.params, shardings.params) + 4 * 4
    )

  def test_a_device_without_host_memory_is_named(self):
    mesh = mesh_lib.make_mesh({'fsdp': 2}, jax.devices()[:2])
    with (
      mock.patch.object(offload, 'HOST', 'elsewhere'),
      pytest.raises(ValueError, match=r"no 'elsewhere'.*set it to False"),
    ):
      _plan(mesh, offload_optimizer=True)

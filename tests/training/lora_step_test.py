"""Training adapters: their gradients, and that nothing else moves."""

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.models import lora
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import rules
from llamarl_jax.training import packing
from llamarl_jax.training import scoring
from llamarl_jax.training import state as states
from llamarl_jax.training import step as steps
from llamarl_jax.training import supervised

_ADAPTERS = config_lib.LoRAConfig(rank=2, alpha=6.0)
_CONFIG = config_lib.LlamaConfig(
  vocab_size=11,
  width=16,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  mlp_width=24,
  rope_theta=1e4,
  qkv_bias=True,
  lora=_ADAPTERS,
)


@functools.cache
def _params():
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda spec: np.float32(rng.normal(size=spec.shape) / 3),
    llama.abstract_params(_CONFIG),
  )


def _batch():
  rng = np.random.default_rng(1)
  return supervised.supervised_trajectories(
    [
      (rng.integers(11, size=2), rng.integers(11, size=size))
      for size in (1, 3, 2, 4)
    ],
    layout=packing.Layout(6),
    pad_token=0,
  )


def _step(config, optimizer, **options):
  return steps.make_train_step(
    config,
    supervised.supervised_loss,
    optimizer,
    temperature=1.0,
    max_completion=4,
    **options,
  )


@functools.cache
def _weight_gradient():
  """Returns the gradient by the merged weights, from a step without adapters.

  Plain descent at rate 1 moves the parameters by it.
  """
  config, merged = lora.merge(_CONFIG, jax.tree.map(jnp.asarray, _params()))
  optimizer = optax.sgd(1.0)
  new, _ = _step(config, optimizer)(
    states.init_train_state(merged, optimizer), _batch()
  )
  return jax.tree.map(lambda x, y: np.float64(x - y), merged, new.params)


def _expected_gradients(gradient, first, second):
  """Returns dA = s dW B', dB = s A' dW, layer by layer."""
  rank, scale = _ADAPTERS.rank, _ADAPTERS.alpha / _ADAPTERS.rank
  firsts, seconds = [], []
  for w, a, b in zip(gradient, first, second, strict=True):
    a2, b2 = a.reshape(-1, rank), b.reshape(rank, -1)
    w2 = w.reshape(len(a2), -1)
    firsts.append((scale * w2 @ b2.T).reshape(a.shape))
    seconds.append((scale * a2.T @ w2).reshape(b.shape))
  return np.stack(firsts), np.stack(seconds)


class LoRAStepTest(parameterized.TestCase):
  @parameterized.parameters(
    {'num_micro_batches': 1},
    {
      'num_micro_batches': 2,
      'computation': scoring.Computation(remat='full'),
    },
  )
  def test_gradients_follow_from_those_of_the_weights(self, **options):
    optimizer = optax.sgd(1.0)
    state = states.init_train_state(_params(), optimizer)
    new, metrics = _step(_CONFIG, optimizer, **options)(state, _batch())
    squares = 0.0
    for part in ('attention', 'mlp'):
      before = _params()['layers'][part]
      after = new.params['layers'][part]
      weights = _weight_gradient()['layers'][part]
      for name in [n for n in weights if f'{n}_lora_a' in before]:
        factors = before[f'{name}_lora_a'], before[f'{name}_lora_b']
        expected = _expected_gradients(weights[name], *factors)
        for factor, gradient in zip('ab', expected, strict=True):
          leaf = f'{name}_lora_{factor}'
          moved = before[leaf] - np.asarray(after[leaf])
          np.testing.assert_allclose(moved, gradient, atol=2e-5, err_msg=leaf)
          squares += np.sum(gradient**2)
    # The norm that is clipped and reported is that of the adapters alone.
    np.testing.assert_allclose(metrics['grad_norm'], squares**0.5, rtol=1e-4)

  def test_frozen_weights_stay_bit_for_bit_on_two_devices(self):
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    mesh = mesh_lib.make_mesh({'fsdp': 2}, jax.devices()[:2])
    shardings, _ = rules.shardings(
      llama.abstract_params(_CONFIG), mesh, rules.TRAINER_RULES
    )
    placed = states.train_state_shardings(
      _params(), optimizer, shardings, rules.replicated(mesh)
    )
    state = jax.device_put(
      states.init_train_state(_params(), optimizer), placed
    )
    step = _step(_CONFIG, optimizer, state_shardings=placed)
    batch = jax.device_put(_batch(), rules.batch_sharding(mesh))
    for _ in range(2):
      state, _ = step(state, batch)
    trained, frozen = lora.split_trainable(state.params)
    first, rest = lora.split_trainable(_params())
    jax.tree.map(np.testing.assert_array_equal, frozen, rest)
    for leaf, before in zip(
      jax.tree.leaves(trained), jax.tree.leaves(first), strict=True
    ):
      self.assertGreater(np.abs(leaf - before).max(), 0.01)
    moments = state.opt_state[0]
    self.assertEqual(
      jax.tree.structure(moments.mu), jax.tree.structure(trained)
    )
    abstract = states.abstract_train_state(_params(), optimizer, placed)
    self.assertEqual(jax.tree.structure(abstract), jax.tree.structure(state))

  def test_takes_no_gradient_of_frozen_weights(self):
    """The program has fewer operations than one that trains the weights."""
    flops = {}
    for config in (_CONFIG, dataclasses.replace(_CONFIG, lora=None)):
      optimizer = optax.sgd(1.0)
      params = _params()
      if config.lora is None:
        params = lora.split_trainable(params)[1]
      state = states.init_train_state(params, optimizer)
      lowered = _step(config, optimizer).lower(state, _batch())
      flops[config.lora is None] = lowered.compile().cost_analysis()['flops']
    self.assertLess(flops[False], flops[True])


if __name__ == '__main__':
  absltest.main()

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.models import lora
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import rules
from llamarl_jax.sharding import spec

_ADAPTERS = config_lib.LoRAConfig(
  rank=4, alpha=6.0, targets=('query', 'output', 'up', 'down')
)
_CONFIG = config_lib.LlamaConfig(
  vocab_size=24,
  width=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_width=48,
  rope_theta=100.0,
  lora=_ADAPTERS,
)
_PLAIN = dataclasses.replace(_CONFIG, lora=None)


@functools.cache
def _first_params(config):
  init = jax.jit(llama.init_params, static_argnums=0)
  return init(config, jax.random.key(0))


@functools.cache
def _trained():
  """Parameters whose adapters are of the size of the weights."""
  rng = np.random.default_rng(0)
  adapters, frozen = lora.split_trainable(_first_params(_CONFIG))
  drawn = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(0, 0.2, x.shape), jnp.float32), adapters
  )
  return lora.combine(drawn, frozen)


@functools.partial(jax.jit, static_argnums=0)
def _scores(config, params):
  tokens = jnp.arange(12).reshape(2, 6)
  positions = jnp.broadcast_to(jnp.arange(6)[None], tokens.shape)
  ones = jnp.ones_like(tokens)
  hidden = llama.hidden_states(config, params, tokens, positions, ones)
  return llama.logits(config, params, hidden)


class LoRATest(parameterized.TestCase):
  def test_splits_into_adapters_and_the_rest(self):
    specs = llama.abstract_params(_CONFIG)
    trainable, frozen = lora.split_trainable(specs)
    self.assertEqual(
      sorted(spec.named_leaves(trainable)),
      sorted(
        f'layers/{part}/{name}_lora_{factor}'
        for part, names in (
          ('attention', ('query', 'output')),
          ('mlp', ('up', 'down')),
        )
        for name in names
        for factor in 'ab'
      ),
    )
    self.assertEqual(frozen, llama.abstract_params(_PLAIN))
    self.assertEqual(lora.combine(trainable, frozen), specs)
    self.assertEqual(lora.split_trainable(frozen), (frozen, {}))
    self.assertEqual(lora.combine(frozen, {}), frozen)
    # Shapes and logical axes of a projection that sums over two dimensions.
    output = trainable['layers']['attention']
    first, second = output['output_lora_a'], output['output_lora_b']
    self.assertEqual(first.shape, (2, 4, 8, 4))
    self.assertEqual(
      first.logical_axes, ('layers', 'heads', 'head_dim', 'lora')
    )
    self.assertEqual(second.shape, (2, 4, 32))
    self.assertEqual(second.logical_axes, ('layers', 'lora', 'embed'))

  def test_begins_as_the_model_without_adapters(self):
    params = _first_params(_CONFIG)
    adapters, frozen = lora.split_trainable(params)
    jax.tree.map(np.testing.assert_array_equal, frozen, _first_params(_PLAIN))
    np.testing.assert_array_equal(
      _scores(_CONFIG, params), _scores(_PLAIN, frozen)
    )
    # A is uniform within 1 / sqrt(fan-in), B is 0.
    for name, leaf in spec.named_leaves(adapters).items():
      if name.endswith('_b'):
        np.testing.assert_array_equal(leaf, 0.0)
        continue
      bound = np.prod(leaf.shape[1:-1]) ** -0.5
      self.assertLessEqual(float(jnp.abs(leaf).max()), bound)
      # At least 256 numbers: their deviation is within 3 standard errors.
      np.testing.assert_allclose(leaf.std(), bound / 3**0.5, rtol=0.1)
    again = jax.jit(lora.init_adapters, static_argnums=0)(
      _CONFIG, jax.random.key(0)
    )
    jax.tree.map(np.testing.assert_array_equal, again, adapters)

  def test_merged_is_the_same_policy(self):
    """Each weight by numpy in float64; log-probs to 2e-5."""
    params = _trained()
    config, merged = lora.merge(_CONFIG, params)
    self.assertEqual(config, _PLAIN)
    found = spec.named_leaves(merged)
    given = spec.named_leaves(params)
    self.assertEqual(
      found.keys(), spec.named_leaves(llama.abstract_params(_PLAIN)).keys()
    )
    for name, leaf in found.items():
      expected = np.asarray(given[name], np.float64)
      if f'{name}_lora_a' in given:
        first = np.float64(given[f'{name}_lora_a'])
        second = np.float64(given[f'{name}_lora_b'])
        # alpha / rank = 6 / 4.
        expected = expected + 1.5 * np.stack(
          [np.tensordot(first[i], second[i], 1) for i in range(2)]
        )
      np.testing.assert_allclose(leaf, expected, atol=1e-6)
    apart = jax.nn.log_softmax(_scores(_CONFIG, params))
    first = jax.nn.log_softmax(_scores(_CONFIG, _first_params(_CONFIG)))
    joined = jax.nn.log_softmax(_scores(_PLAIN, merged))
    np.testing.assert_allclose(joined, apart, atol=2e-5)
    self.assertGreater(float(jnp.abs(apart - first).max()), 0.1)

  def test_a_model_without_adapters_is_passed_through(self):
    params = _first_params(_PLAIN)
    config, merged = lora.merge(_PLAIN, params)
    self.assertEqual(config, _PLAIN)
    self.assertIs(merged, params)

  def test_merges_on_two_devices(self):
    mesh = mesh_lib.make_mesh({'fsdp': 2}, jax.devices()[:2])
    shardings, _ = rules.shardings(
      llama.abstract_params(_CONFIG), mesh, rules.TRAINER_RULES
    )
    frozen = lora.split_trainable(shardings)[1]
    merge = jax.jit(
      lambda params: lora.merge(_CONFIG, params)[1], out_shardings=frozen
    )
    merged = merge(jax.device_put(_trained(), shardings))
    expected = lora.merge(_CONFIG, _trained())[1]
    for leaf, other in zip(
      jax.tree.leaves(merged), jax.tree.leaves(expected), strict=True
    ):
      np.testing.assert_allclose(leaf, other, atol=1e-6)
    query = merged['layers']['attention']['query']
    self.assertFalse(query.sharding.is_fully_replicated)


if __name__ == '__main__':
  absltest.main()

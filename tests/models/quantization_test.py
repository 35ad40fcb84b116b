"""Quantized weights: against numpy, against their bounds, and in a model."""

import dataclasses
import functools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.models import catalog
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.models import quantization
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import rules
from llamarl_jax.sharding import spec as spec_lib

_CONFIG = config_lib.LlamaConfig(
  vocab_size=24,
  width=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_width=48,
  rope_theta=100.0,
  tie_embeddings=False,
  qkv_bias=True,
  qk_norm=True,
)
_SMOLLM2 = config_lib.LlamaConfig(
  vocab_size=49_152,
  width=576,
  num_layers=30,
  num_heads=9,
  num_kv_heads=3,
  head_dim=64,
  mlp_width=1536,
  rope_theta=100_000.0,
)
_quantize = jax.jit(quantization.quantize, static_argnums=1)
_dequantize = jax.jit(quantization.dequantize, static_argnums=1)


@functools.cache
def _params():
  """Drawn in numpy, channels of very different sizes, one of them all 0."""
  generator = np.random.default_rng(0)

  def draw(spec):
    sizes = np.exp(generator.normal(0, 2, spec.shape[-1])).astype(np.float32)
    sizes[0] = 0.0
    numbers = generator.normal(0, 0.2, spec.shape).astype(np.float32)
    return jnp.asarray(numbers * sizes)

  return jax.tree.map(draw, llama.abstract_params(_CONFIG))


def _summed_over():
  """Returns the dimensions that each quantized weight is summed over."""
  found = {'embedding': (1,), 'head': (0,)}
  for name, shape in config_lib.projections(_CONFIG).items():
    folder = 'mlp' if name in ('gate', 'up', 'down') else 'attention'
    path = f'layers/{folder}/{name}'
    # Behind the dimension that numbers the layers.
    found[path] = tuple(range(1, 1 + len(shape.inner)))
  return found


def _nodes(tree):
  leaves, _ = jax.tree_util.tree_flatten_with_path(
    tree, is_leaf=quantization.is_quantized
  )
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in leaves
  }


class QuantizationTest(parameterized.TestCase):
  @parameterized.parameters('int8', 'fp8')
  def test_every_weight_has_a_scale_a_channel(self, kind):
    quantized = _nodes(_quantize(_params(), kind))
    largest = {'int8': 127.0, 'fp8': 448.0}[kind]
    for path, weight in _nodes(_params()).items():
      node = quantized[path]
      if path not in _summed_over():
        np.testing.assert_array_equal(node, weight, err_msg=path)
        continue
      peak = np.abs(weight).max(axis=_summed_over()[path], keepdims=True)
      expected = np.where(peak > 0, peak / np.float32(largest), 1)
      np.testing.assert_allclose(node['scale'], expected, rtol=1e-6)
      values = np.asarray(node['values'], np.float32)
      found = np.abs(values).max(axis=_summed_over()[path], keepdims=True)
      np.testing.assert_array_equal(found, np.where(peak > 0, largest, 0))

  def test_int8_is_off_by_half_a_step_at_most(self):
    quantized = _quantize(_params(), 'int8')
    back = _nodes(_dequantize(quantized, jnp.float32))
    for path, node in _nodes(quantized).items():
      if path in _summed_over():
        error = np.abs(back[path] - _nodes(_params())[path])
        step = np.broadcast_to(node['scale'], error.shape)
        self.assertLessEqual((error / step).max(), 0.5 + 1e-4, path)
        # As numbers between steps are: a quarter of a step in the mean.
        self.assertBetween((error / step).mean(), 0.2, 0.3, path)

  def test_fp8_is_off_by_a_sixteenth_at_most(self):
    """3 bits behind the leading one; 2^-9 is the step of the least numbers."""
    quantized = _quantize(_params(), 'fp8')
    back = _nodes(_dequantize(quantized, jnp.float32))
    for path, node in _nodes(quantized).items():
      if path in _summed_over():
        weight = _nodes(_params())[path]
        error = np.abs(back[path] - weight)
        step = 2.0**-9 * np.broadcast_to(node['scale'], error.shape)
        bound = np.maximum(np.abs(weight) / 16, step / 2)
        self.assertLessEqual((error - bound).max(), 1e-6, path)

  def test_quantizing_again_changes_nothing(self):
    once = _quantize(_params(), 'int8')
    twice = _quantize(_dequantize(once, jnp.float32), 'int8')
    for path, node in _nodes(once).items():
      if path in _summed_over():
        np.testing.assert_array_equal(
          node['values'], _nodes(twice)[path]['values']
        )

  @parameterized.parameters('int8', 'fp8')
  def test_specs_describe_the_result(self, kind):
    specs = quantization.abstract(llama.abstract_params(_CONFIG), kind)
    found = spec_lib.named_leaves(_quantize(_params(), kind))
    expected = {
      path: (spec.shape, spec.dtype)
      for path, spec in spec_lib.named_leaves(specs).items()
    }
    self.assertEqual(
      expected, {p: (x.shape, x.dtype) for p, x in found.items()}
    )
    query = specs['layers']['attention']['query']['scale']
    self.assertEqual(query.logical_axes, ('layers', None, 'heads', 'head_dim'))
    output = specs['layers']['attention']['output']['scale']
    self.assertEqual(output.logical_axes, ('layers', None, None, 'embed'))

  def test_no_kind_changes_nothing(self):
    specs = llama.abstract_params(_CONFIG)
    self.assertIs(quantization.abstract(specs, ''), specs)
    self.assertIs(quantization.quantize(specs, ''), specs)

  @parameterized.parameters('int8', 'fp8')
  def test_little_more_than_a_quarter_is_published(self, kind):
    specs = llama.abstract_params(_SMOLLM2)
    whole = quantization.num_bytes(specs)
    self.assertEqual(whole, 4 * config_lib.num_parameters(_SMOLLM2))
    part = quantization.num_bytes(quantization.abstract(specs, kind))
    self.assertBetween(part / whole, 0.25, 0.255)

  def test_a_405b_model_has_a_plan(self):
    """As shapes alone; every dimension that was sharded still is."""
    model = catalog.find('llama-3.1-405b')
    mesh = mesh_lib.abstract_mesh({'tensor': 8})
    specs = quantization.abstract(llama.abstract_params(model), 'int8')
    shardings, notes = rules.shardings(specs, mesh, rules.GENERATOR_RULES)
    self.assertEqual(notes, [])
    held = rules.device_bytes(specs, shardings)
    self.assertLess(held, 0.26 * 4 * config_lib.num_parameters(model) / 8)

  def test_a_model_runs_on_quantized_weights(self):
    """As on the weights they stand for."""
    tokens = jnp.arange(16).reshape(2, 8)
    positions = jnp.broadcast_to(jnp.arange(8)[None], (2, 8))

    @jax.jit
    def run(params):
      hidden = llama.hidden_states(
        _CONFIG, params, tokens, positions, jnp.ones_like(tokens)
      )
      tied = dataclasses.replace(_CONFIG, tie_embeddings=True)
      return [llama.logits(c, params, hidden) for c in (_CONFIG, tied)]

    params = _quantize(_params(), 'int8')
    found = run(params)
    expected = run(_dequantize(params, jnp.float32))
    for scores, others in zip(found, expected, strict=True):
      np.testing.assert_allclose(scores, others, rtol=1e-4, atol=1e-4)

  def test_rows_are_those_of_the_whole_table(self):
    table = _quantize(_params(), 'int8')['embedding']
    indices = jnp.array([[3, 0], [23, 3]])
    for dtype in (jnp.float32, jnp.bfloat16):
      found = quantization.rows(table, indices, dtype)
      whole = quantization.dequantize(table, dtype)
      self.assertEqual(found.dtype, dtype)
      np.testing.assert_array_equal(found, whole[indices])

  def test_sharded_weights_have_the_same_values(self):
    """The largest of a channel is sought over all devices."""
    mesh = mesh_lib.make_mesh({'fsdp': 2}, jax.devices()[:2])
    specs = llama.abstract_params(_CONFIG)
    shardings, _ = rules.shardings(specs, mesh, rules.TRAINER_RULES)
    published, _ = rules.shardings(
      quantization.abstract(specs, 'int8'), mesh, rules.TRAINER_RULES
    )
    sharded = jax.jit(
      quantization.quantize, static_argnums=1, out_shardings=published
    )(jax.device_put(_params(), shardings), 'int8')
    jax.tree.map(
      np.testing.assert_array_equal, sharded, _quantize(_params(), 'int8')
    )

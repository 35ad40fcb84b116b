"""The model against a loop-written oracle, and sharded."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import rules as rules_lib

# One shape everywhere, so that little is compiled.
_ROWS, _LENGTH = 4, 8
# A context so short that positions lie beyond it, and wavelengths are short,
# long and between (100 ** (-i / 4) for i = 0 ... 3).
_SCALING = config_lib.RopeScaling(
  factor=8.0,
  low_frequency_factor=0.125,
  high_frequency_factor=0.5,
  original_max_position=4,
)
_ADAPTERS = config_lib.LoRAConfig(rank=3, alpha=2.0)
# Every switch at once, where no two need to be told apart.
_SWITCHES = {
  'qkv_bias': True,
  'qk_norm': True,
  'rope_scaling': _SCALING,
  'num_tokens': 21,
  'lora': _ADAPTERS,
}


def _config(**changes):
  fields = {
    'vocab_size': 24,
    'width': 32,
    'num_layers': 2,
    'num_heads': 4,
    'num_kv_heads': 2,
    'head_dim': 8,
    'mlp_width': 48,
    'rope_theta': 100.0,
  }
  return config_lib.LlamaConfig(**(fields | changes))


@functools.cache
def _params(config):
  """Drawn in numpy, with norms that differ from 1 so that none is forgotten."""
  generator = np.random.default_rng(0)

  def draw(spec):
    if 'norm' in spec.logical_axes:
      return jnp.asarray(generator.uniform(0.5, 1.5, spec.shape), jnp.float32)
    return jnp.asarray(generator.normal(0, 0.18, spec.shape), jnp.float32)

  return jax.tree.map(draw, llama.abstract_params(config))


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=('dtype',))
def _scores(config, params, tokens, positions, segments, dtype=jnp.float32):
  hidden = llama.hidden_states(
    config, params, tokens, positions, segments, compute_dtype=dtype
  )
  return llama.logits(config, params, hidden, compute_dtype=dtype)


def _batch(config):
  tokens = jax.random.randint(
    jax.random.key(1), (_ROWS, _LENGTH), 0, config.vocab_size
  )
  positions = jnp.broadcast_to(jnp.arange(_LENGTH)[None], tokens.shape)
  return tokens, positions, jnp.ones_like(tokens)


def _oracle(config, params, tokens):
  """Returns the logits of one sequence, f64[T, V]: a token and head at a time.

  Keys and values are kept in lists; rotary pairs are complex numbers.
  """
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  half = config.head_dim // 2
  frequencies = config.rope_theta ** (-np.arange(half) / half)
  if config.rope_scaling is not None:
    scaling = config.rope_scaling
    for i, frequency in enumerate(frequencies):
      waves = scaling.original_max_position * frequency / (2 * np.pi)
      low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
      if waves < low:
        frequencies[i] = frequency / scaling.factor
      elif waves <= high:
        share = (waves - low) / (high - low)
        slow = frequency / scaling.factor
        frequencies[i] = share * frequency + (1 - share) * slow

  def norm(x, scale):
    return x / np.sqrt(np.mean(x**2) + config.norm_epsilon) * scale

  def turn(x, position):
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * position * frequencies)
    return np.concatenate([z.real, z.imag])

  memory = {}
  scores = []
  for position, token in enumerate(tokens):
    x = params['embedding'][token]
    for i in range(config.num_layers):
      w = _merged(config, jax.tree.map(lambda a, i=i: a[i], params['layers']))
      own = w['attention']
      zero = np.zeros(max(config.num_heads, config.num_kv_heads))
      normed = norm(x, w['attention_norm']['scale'])
      mixed = 0.0
      for head in range(config.num_heads):
        shared = head // (config.num_heads // config.num_kv_heads)
        keys, values = memory.setdefault((i, head), ([], []))
        key = normed @ own['key'][:, shared]
        key = key + own.get('key_bias', zero)[shared]
        value = normed @ own['value'][:, shared]
        values.append(value + own.get('value_bias', zero)[shared])
        query = normed @ own['query'][:, head]
        query = query + own.get('query_bias', zero)[head]
        if config.qk_norm:
          key = norm(key, own['key_norm']['scale'])
          query = norm(query, own['query_norm']['scale'])
        keys.append(turn(key, position))
        query = turn(query, position)
        weights = np.exp(np.stack(keys) @ query / np.sqrt(config.head_dim))
        read = weights @ np.stack(values) / weights.sum()
        mixed = mixed + read @ own['output'][head]
      x = x + mixed
      normed = norm(x, w['mlp_norm']['scale'])
      gate, up = normed @ w['mlp']['gate'], normed @ w['mlp']['up']
      x = x + (gate / (1 + np.exp(-gate)) * up) @ w['mlp']['down']
    x = norm(x, params['final_norm']['scale'])
    tied = config.tie_embeddings
    score = x @ (params['embedding'].T if tied else params['head'])
    if config.num_tokens is not None:
      score[config.num_tokens :] = -np.inf
    scores.append(score)
  return np.stack(scores)


def _merged(config, layer):
  """Returns one layer whose adapters are added to its weights, if any."""
  if config.lora is None:
    return layer
  factor = config.lora.alpha / config.lora.rank
  merged = {part: dict(leaves) for part, leaves in layer.items()}
  for part in ('attention', 'mlp'):
    for name in [n for n in layer[part] if f'{n}_lora_a' in layer[part]]:
      added = np.tensordot(
        layer[part][f'{name}_lora_a'], layer[part][f'{name}_lora_b'], 1
      )
      merged[part][name] = layer[part][name] + factor * added
  return merged


class LlamaTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('tied', {}),
    (
      'untied_deep_one_kv_head',
      {
        'tie_embeddings': False,
        'num_layers': 9,
        'num_heads': 3,
        'num_kv_heads': 1,
      },
    ),
    ('query_key_value_bias', {'qkv_bias': True}),
    ('every_switch', _SWITCHES),
  )
  def test_equals_the_oracle(self, changes):
    config = _config(**changes)
    tokens, positions, segments = _batch(config)
    scores = _scores(config, _params(config), tokens, positions, segments)
    for row in range(2):
      expected = _oracle(config, _params(config), np.asarray(tokens[row]))
      np.testing.assert_allclose(scores[row], expected, atol=2e-5)

  def test_scaling_of_the_oracle_has_every_case(self):
    waves = 4 * 100.0 ** (-np.arange(4) / 4) / (2 * np.pi)
    self.assertGreater(waves[0], 0.5)
    self.assertBetween(waves[1], 0.125, 0.5)
    self.assertLess(waves[3], 0.125)

  @parameterized.parameters({}, _SWITCHES)
  def test_specs_describe_the_parameters(self, **switches):
    config = _config(tie_embeddings=False, num_layers=1, **switches)
    specs = llama.abstract_params(config, jnp.bfloat16)
    params = jax.eval_shape(
      functools.partial(llama.init_params, config), jax.random.key(0)
    )
    shapes = jax.tree.map(lambda x: x.shape, (specs, params))
    self.assertEqual(*shapes)
    self.assertEqual(
      sum(x.size for x in jax.tree.leaves(params)),
      config_lib.num_parameters(config),
    )
    query = specs['layers']['attention']['query']
    self.assertEqual(
      query.logical_axes, ('layers', 'embed', 'heads', 'head_dim')
    )
    self.assertEqual(query.dtype, jnp.bfloat16)
    self.assertEqual(specs['head'].logical_axes, ('embed', 'vocab'))

  def test_initial_scale(self):
    """Variance 1 / fan-in, so logits of a tied model start near 1."""
    init = jax.jit(llama.init_params, static_argnums=0)
    params = init(_config(), jax.random.key(0))
    gate, down = (params['layers']['mlp'][name] for name in ('gate', 'down'))
    # 3,072 numbers: the standard error of their deviation is 1.3 %.
    np.testing.assert_allclose(gate.std(), 32**-0.5, rtol=0.05)
    np.testing.assert_allclose(down.std(), (4 * 48) ** -0.5, rtol=0.05)
    self.assertFalse(bool(jnp.array_equal(gate[0], gate[1])))
    np.testing.assert_array_equal(params['final_norm']['scale'], 1.0)

  def test_packed_sequences_and_padding_do_not_meet(self):
    config = _config()
    params = _params(config)
    tokens, positions, segments = _batch(config)
    alone = _scores(config, params, tokens, positions, segments)
    # Row 0: its first 3 tokens, then row 1's first 4, then padding.
    packed = jnp.concatenate([tokens[:1, :3], tokens[1:2, :4]], axis=1)
    places = jnp.array([[0, 1, 2, 0, 1, 2, 3, 0]])
    marks = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0]])
    results = []
    for filler in (0, 9):
      row = jnp.concatenate([packed, jnp.array([[filler]])], axis=1)
      # Rows that are all padding must not make anything NaN.
      empty = jnp.zeros((_ROWS - 1, _LENGTH), jnp.int32)
      results.append(
        _scores(
          config,
          params,
          jnp.concatenate([row, empty]),
          jnp.concatenate([places, empty]),
          jnp.concatenate([marks, empty]),
        )
      )
    self.assertTrue(bool(jnp.isfinite(results[0]).all()))
    np.testing.assert_allclose(results[0][0, :3], alone[0, :3], atol=2e-5)
    np.testing.assert_allclose(results[0][0, 3:7], alone[1, :4], atol=2e-5)
    np.testing.assert_array_equal(results[0][0, :7], results[1][0, :7])

  def test_gradient_stays_in_its_segment_and_finite(self):
    """Also with a row of padding; with remat the same."""
    config = _config(tie_embeddings=False, num_layers=1)
    params = _params(config)
    tokens = jnp.array([[1, 2, 3, 4, 5, 6], [7] * 6])
    positions = jnp.broadcast_to(jnp.arange(6)[None], tokens.shape)
    segments = jnp.array([[1, 1, 1, 2, 2, 0], [0] * 6])

    @functools.partial(jax.jit, static_argnums=1)
    @jax.grad
    def gradient(params, remat):
      hidden = llama.hidden_states(
        config, params, tokens, positions, segments, remat=remat
      )
      scores = llama.logits(config, params, hidden)
      return jnp.sum(jax.nn.log_softmax(scores)[0, :3, 0])

    plain, again = gradient(params, 'none'), gradient(params, 'full')
    for leaf in jax.tree.leaves(plain):
      self.assertTrue(bool(jnp.isfinite(leaf).all()))
    touched = np.flatnonzero(np.abs(plain['embedding']).sum(axis=1))
    np.testing.assert_array_equal(touched, [1, 2, 3])
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), plain, again
    )

  def test_bfloat16_is_near_float32(self):
    """bfloat16 keeps 8 bits: relative 4e-3 a product, a few of them."""
    config = _config()
    batch = _batch(config)
    exact = _scores(config, _params(config), *batch)
    rough = _scores(config, _params(config), *batch, dtype=jnp.bfloat16)
    self.assertEqual(rough.dtype, jnp.float32)
    error = float(jnp.abs(rough - exact).max())
    self.assertBetween(error, 1e-4, 0.15)

  @parameterized.parameters(
    ({'fsdp': 2}, 'TRAINER_RULES'), ({'tensor': 2}, 'GENERATOR_RULES')
  )
  def test_two_devices_equal_one(self, axes, table):
    config = _config()
    params = _params(config)
    batch = _batch(config)
    expected = _scores(config, params, *batch)
    mesh = mesh_lib.make_mesh(axes, jax.devices()[:2])
    shardings, _ = rules_lib.shardings(
      llama.abstract_params(config), mesh, getattr(rules_lib, table)
    )
    placed = jax.device_put(params, shardings)
    query = placed['layers']['attention']['query']
    self.assertFalse(query.sharding.is_fully_replicated)
    replicated = jax.device_put(batch, rules_lib.replicated(mesh))
    scores = _scores(config, placed, *replicated)
    np.testing.assert_allclose(scores, expected, atol=2e-5)


if __name__ == '__main__':
  absltest.main()

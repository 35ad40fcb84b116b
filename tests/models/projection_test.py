"""Chunked log-probs against the logits of all tokens at once."""

import functools
import re

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.algorithms import log_probs as log_probs_lib
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.models import projection
from llamarl_jax.sharding import activations
from llamarl_jax.sharding import mesh as mesh_lib

# Three rows of five tokens, in chunks of six, six and three.
_ROWS, _LENGTH, _WIDTH, _VOCAB = 3, 5, 8, 22
_SMALL = 2 * 6 * _VOCAB * 4


def _config(**changes):
  fields = {
    'vocab_size': _VOCAB,
    'width': _WIDTH,
    'num_layers': 1,
    'num_heads': 1,
    'num_kv_heads': 1,
    'head_dim': 8,
    'mlp_width': 8,
    'rope_theta': 1e4,
  }
  return config_lib.LlamaConfig(**(fields | changes))


def _inputs(config, rows=_ROWS, length=_LENGTH):
  rng = np.random.default_rng(0)
  size, width = config.vocab_size, config.width
  params = (
    {'embedding': rng.normal(size=(size, width)).astype(np.float32)}
    if config.tie_embeddings
    else {'head': rng.normal(size=(width, size)).astype(np.float32)}
  )
  hidden = rng.normal(size=(rows, length, width)).astype(np.float32)
  tokens = rng.integers(config.num_tokens or size, size=(rows, length))
  return params, hidden, tokens.astype(np.int32)


def _oracle(config, params, hidden, tokens, *, temperature, compute_dtype):
  logits = llama.logits(config, params, hidden, compute_dtype=compute_dtype)
  return (
    log_probs_lib.token_log_probs(logits, tokens, temperature=temperature),
    log_probs_lib.entropy(logits, temperature=temperature),
  )


def _with_gradient(score, config, params, hidden, tokens):
  """Returns the values of `score`, and the gradient of a function of them."""

  def loss(params, hidden):
    log_probs, entropy = score(config, params, hidden, tokens)
    # Not linear, so that each token has a gradient of its own.
    return jnp.sum(jnp.sin(log_probs)), (log_probs, entropy)

  return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, hidden)


class ProjectionTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    # Sums as runs compute them: without optimizations they round more often.
    name = 'jax_disable_most_optimizations'
    self.addCleanup(jax.config.update, name, jax.config.read(name))
    jax.config.update(name, False)

  @parameterized.parameters(
    (True, None, 'float32', _SMALL),
    (False, 17, 'float32', _SMALL),
    (False, None, 'float32', 2**20),
    (True, 17, 'float32', 2**20),
    # Less than one token: each is a chunk.
    (True, None, 'float32', 1),
    (False, None, 'bfloat16', _SMALL),
  )
  def test_equals_all_logits_at_once(self, tied, num_tokens, dtype, max_bytes):
    config = _config(tie_embeddings=tied, num_tokens=num_tokens)
    inputs = _inputs(config)
    options = {'temperature': 0.7, 'compute_dtype': dtype}
    ours = jax.jit(
      functools.partial(
        _with_gradient,
        functools.partial(
          projection.token_log_probs, **options, max_bytes=max_bytes
        ),
        config,
      )
    )(*inputs)
    theirs = jax.jit(
      functools.partial(
        _with_gradient, functools.partial(_oracle, **options), config
      )
    )(*inputs)
    # Float32 sums in another order. In bfloat16 the gradient by a logit has 8
    # bits, and the oracle rounds sums of gradients, too.
    atol = 5e-6 if dtype == 'float32' else 0.03
    chex.assert_trees_all_close(ours[0], theirs[0], atol=atol)
    chex.assert_trees_all_close(ours[1], theirs[1], atol=5e-6)
    for leaf in jax.tree.leaves(ours):
      self.assertEqual(leaf.dtype, jnp.float32)

  @parameterized.parameters(_SMALL, 2**20)
  def test_entropy_has_no_gradient(self, max_bytes):
    config = _config()
    params, hidden, tokens = _inputs(config)

    @jax.jit
    @jax.grad
    def gradient(hidden):
      _, entropy = projection.token_log_probs(
        config, params, hidden, tokens, temperature=1.0, max_bytes=max_bytes
      )
      return jnp.sum(entropy)

    np.testing.assert_array_equal(gradient(hidden), np.zeros_like(hidden))

  @parameterized.parameters('fsdp', 'sequence', 'tensor')
  def test_devices_keep_to_their_tokens_and_vocabulary(self, axis):
    """Nothing is gathered along the vocabulary, nor summed chunk by chunk."""
    config = _config(tie_embeddings=False)
    params, hidden, tokens = _inputs(config, rows=4, length=6)
    score = functools.partial(projection.token_log_probs, temperature=1.0)
    expected = jax.jit(functools.partial(_with_gradient, score, config))(
      params, hidden, tokens
    )
    sizes = {'data': 1, 'fsdp': 1, 'sequence': 1, 'tensor': 1, axis: 2}
    mesh = mesh_lib.make_mesh(sizes, jax.devices()[:2])

    def place(*spec):
      return jax.sharding.NamedSharding(mesh, jax.P(*spec))

    weights = place(None, axis) if axis == 'tensor' else place(axis, None)
    batch = {
      'fsdp': place('fsdp'),
      'sequence': place(None, 'sequence'),
      'tensor': place(),
    }[axis]
    # Three chunks on each device, which has half of tokens or vocabulary.
    chunked = functools.partial(score, max_bytes=2 * 4 * _VOCAB * 4)
    step = jax.jit(
      activations.on_mesh(
        functools.partial(_with_gradient, chunked, config), mesh
      ),
      out_shardings=(({'head': weights}, batch), batch),
    )
    inputs = jax.device_put(
      (params, hidden, tokens), ({'head': weights}, batch, batch)
    )
    compiled = step.lower(*inputs).compile()
    chex.assert_trees_all_close(
      jax.device_get(compiled(*inputs)), jax.device_get(expected), atol=5e-6
    )

    program = compiled.as_text()
    self.assertIn('while(', program)
    if axis == 'tensor':
      self.assertNotIn(f'{_VOCAB}]', program)
      self.assertNotIn('all-gather', program)
    else:
      bodies = re.findall(r'body=(%[\w.-]+)', program)
      self.assertNotEmpty(bodies)
      for name in bodies:
        body = program.split(f'\n{name} ')[1].split('\n}')[0]
        self.assertNotRegex(body, 'all-reduce|all-gather|reduce-scatter')

  def test_memory_at_a_large_vocabulary(self):
    """Of 16384 tokens, 8.4 GB of logits: less than 1 GB at any time."""
    config = _config(vocab_size=128256, width=512)
    shape = (8, 2048)

    def loss(params, hidden, tokens):
      log_probs, entropy = projection.token_log_probs(
        config, params, hidden, tokens, temperature=1.0
      )
      return jnp.sum(log_probs), entropy

    compiled = (
      jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
      .lower(
        {'embedding': jax.ShapeDtypeStruct((128256, 512), jnp.float32)},
        jax.ShapeDtypeStruct((*shape, 512), jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.int32),
      )
      .compile()
    )
    self.assertLess(compiled.memory_analysis().temp_size_in_bytes, 1e9)

  def test_temperature_must_be_positive(self):
    config = _config()
    with self.assertRaisesRegex(ValueError, 'temperature must be above 0'):
      projection.token_log_probs(config, *_inputs(config), temperature=0.0)

"""The model over a cache against the model over whole sequences."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.models import config as config_lib
from llamarl_jax.models import inference
from llamarl_jax.models import kv_cache
from llamarl_jax.models import llama

_LENGTH = 8
# Every switch at once.
_CONFIG = config_lib.LlamaConfig(
  vocab_size=24,
  width=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_width=48,
  rope_theta=100.0,
  qkv_bias=True,
  qk_norm=True,
  rope_scaling=config_lib.RopeScaling(
    factor=8.0,
    low_frequency_factor=0.125,
    high_frequency_factor=0.5,
    original_max_position=4,
  ),
  num_tokens=21,
  lora=config_lib.LoRAConfig(rank=3, alpha=2.0),
)
_prefill = jax.jit(
  inference.prefill_chunk, static_argnums=0, static_argnames='read_length'
)
_step = jax.jit(inference.decode_step, static_argnums=0)


@functools.cache
def _params():
  generator = np.random.default_rng(0)
  return jax.tree.map(
    lambda spec: jnp.asarray(
      generator.normal('norm' in spec.logical_axes, 0.18, spec.shape),
      jnp.float32,
    ),
    llama.abstract_params(_CONFIG),
  )


def _tokens():
  return np.random.default_rng(1).integers(0, 21, (4, _LENGTH), np.int32)


@functools.cache
def _full():
  """Returns the log-probs of all next tokens, f32[4, T, V]."""

  @jax.jit
  def score(params, tokens):
    places = jnp.broadcast_to(jnp.arange(_LENGTH)[None], tokens.shape)
    hidden = llama.hidden_states(
      _CONFIG, params, tokens, places, jnp.ones_like(tokens)
    )
    return jax.nn.log_softmax(llama.logits(_CONFIG, params, hidden))

  return np.asarray(score(_params(), jnp.asarray(_tokens())))


def _read(cache, tokens, lines, chunks):
  """Returns the cache after chunks [(starts, lengths), ...], 4 tokens wide."""
  for starts, lengths in chunks:
    wide = np.zeros((len(lines), 4), np.int32)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
      wide[row, :length] = tokens[row, start : start + length]
    cache = _prefill(
      _CONFIG,
      _params(),
      cache,
      inference.PromptChunk(
        jnp.asarray(wide),
        jnp.array(starts),
        jnp.array(lengths),
        jnp.array(lines),
      ),
      read_length=max(starts) if max(starts) == 0 else _LENGTH,
    )
  return cache


class InferenceTest(parameterized.TestCase):
  def _assert_continues(self, cache, rows, lengths, atol=2e-5):
    """Decodes to the end; each line holds `lengths` tokens of its row."""
    tokens = _tokens()
    rows, place = np.array(rows), np.array(lengths)
    while (place < _LENGTH).all():
      scores, cache = _step(
        _CONFIG,
        _params(),
        jnp.asarray(tokens[rows, place]),
        jnp.asarray(place),
        cache,
      )
      np.testing.assert_allclose(
        jax.nn.log_softmax(scores), _full()[rows, place], atol=atol
      )
      place = place + 1

  @parameterized.named_parameters(
    ('at_once', [([0, 0, 0, 0], [1, 2, 3, 4])]),
    ('in_chunks', [([0, 0, 0, 0], [1, 1, 2, 3]), ([1, 1, 2, 3], [0, 1, 1, 1])]),
  )
  def test_chunks_and_steps_equal_the_full_forward(self, chunks):
    """Prompts of 1 to 4 tokens, the lines in another order."""
    lines = [2, 0, 3, 1]
    cache = kv_cache.init_cache(_CONFIG, 4, _LENGTH)
    cache = _read(cache, _tokens(), lines, chunks)
    order = np.argsort(lines)
    self._assert_continues(cache, order, np.array([1, 2, 3, 4])[order])

  def test_an_int8_cache_is_near(self):
    """Entries are off by up to 1 / 254 of the largest of their vector."""
    cache = kv_cache.init_cache(_CONFIG, 4, _LENGTH, 'int8')
    chunks = [([0] * 4, [1, 2, 3, 4]), ([1, 2, 3, 4], [1, 1, 1, 1])]
    cache = _read(cache, _tokens(), range(4), chunks)
    self._assert_continues(cache, range(4), [2, 3, 4, 5], atol=0.02)
    with self.assertRaises(AssertionError):
      self._assert_continues(cache, range(4), [2, 3, 4, 5], atol=1e-5)

  def test_padding_rows_leave_all_lines_alone(self):
    cache = kv_cache.init_cache(_CONFIG, 4, _LENGTH)
    read = _read(cache, _tokens(), [1, 4, 5, 2], [([0] * 4, [0, 3, 4, 2])])
    touched = np.flatnonzero(np.any(np.asarray(read.k) != 0, axis=(0, 2, 3, 4)))
    self.assertEqual(touched.tolist(), [2])
    self.assertFalse(np.any(read.v[:, 2, :, 2:]))


if __name__ == '__main__':
  absltest.main()

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.sampling import samplers

_sample = jax.jit(samplers.sample)


def _keys(count):
  return jax.random.split(jax.random.key(3), count)


class SamplersTest(chex.TestCase):
  @parameterized.parameters((5, 1.0), (5, 0.5), (300, 2.0))
  def test_frequencies_are_the_softmax(self, vocab_size, temperature):
    """Pearson's statistic has mean V - 1 and variance 2 (V - 1)."""
    draws = 20_000
    logits = jax.random.normal(jax.random.key(0), (vocab_size,))
    sampled = _sample(
      jnp.broadcast_to(logits[None], (draws, vocab_size)),
      _keys(draws),
      jnp.full(draws, temperature),
    )
    weights = np.exp(np.asarray(logits, np.float64) / temperature)
    expected = draws * weights / weights.sum()
    counts = np.bincount(sampled.tokens, minlength=vocab_size)
    statistic = np.sum((counts - expected) ** 2 / expected)
    freedom = vocab_size - 1
    self.assertLess(statistic, freedom + 5 * np.sqrt(2 * freedom))
    np.testing.assert_allclose(
      sampled.log_probs,
      np.log(expected / draws)[np.asarray(sampled.tokens)],
      atol=1e-5,
    )

  @chex.variants(with_jit=True, without_jit=True)
  def test_greedy_rows_take_the_best_at_temperature_one(self):
    logits = jnp.log(jnp.array([[0.2, 0.5, 0.3], [0.2, 0.5, 0.3]]))
    sampled = self.variant(samplers.sample)(
      logits, _keys(2), jnp.array([0.0, 1e-4])
    )
    np.testing.assert_array_equal(sampled.tokens, [1, 1])
    np.testing.assert_allclose(sampled.log_probs, [np.log(0.5), 0], atol=1e-6)

  def test_a_masked_token_is_never_drawn(self):
    """Nor the padding of the last block; a whole block may be masked."""
    logits = jnp.full((1000, 260), -jnp.inf).at[:, jnp.array([7, 259])].set(2.0)
    sampled = _sample(logits, _keys(1000), jnp.ones(1000))
    self.assertEqual(set(np.asarray(sampled.tokens).tolist()), {7, 259})
    np.testing.assert_allclose(sampled.log_probs, np.log(0.5), atol=1e-6)

  def test_a_row_does_not_depend_on_the_others(self):
    logits = 5 * jax.random.normal(jax.random.key(1), (6, 140))
    temperature = jnp.array([0.0, 0.5, 1.0, 1.0, 2.0, 0.7])
    keys = _keys(6)
    together = _sample(logits, keys, temperature)
    order = jnp.array([3, 0, 5, 4, 2, 1])
    shuffled = _sample(logits[order], keys[order], temperature[order])
    np.testing.assert_array_equal(together.tokens[order], shuffled.tokens)
    np.testing.assert_array_equal(together.log_probs[order], shuffled.log_probs)


if __name__ == '__main__':
  absltest.main()

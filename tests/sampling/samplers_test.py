from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.sampling import samplers

_DRAWS = 5_000
_sample = jax.jit(samplers.sample)


def _call(logits, temperature, top_k=0, top_p=1.0, min_p=0.0, keys=None):
  """Samples with the same settings in every row, or with one a row.

  Rows are added up to _DRAWS, so that little is compiled.
  """
  rows = logits.shape[0]
  if keys is None:
    keys = jax.random.split(jax.random.key(3), _DRAWS)

  def spread(value, dtype):
    value = np.asarray(value, dtype)
    if value.ndim:
      return np.append(value, np.full(_DRAWS - rows, value[-1]))
    return np.full(_DRAWS, value)

  sampled = _sample(
    jnp.pad(logits, ((0, _DRAWS - rows), (0, 0))),
    keys[np.minimum(np.arange(_DRAWS), len(keys) - 1)],
    spread(temperature, np.float32),
    spread(top_k, np.int32),
    spread(top_p, np.float32),
    spread(min_p, np.float32),
  )
  return jax.tree.map(lambda x: np.asarray(x[:rows]), sampled)


def _oracle(logits, temperature, top_k, top_p, min_p):
  """Returns the distribution to sample from, f64[V], by sorting."""
  logits = np.asarray(logits, np.float64)
  weights = np.exp((logits - logits.max()) / temperature)
  order = np.argsort(-weights, kind='stable')
  kept = order[: top_k or len(order)]
  kept = [v for v in order if weights[v] >= weights[kept[-1]]]
  total, sofar = weights[kept].sum(), 0.0
  nucleus = []
  for v in kept:
    if sofar < top_p * total or weights[v] == weights[nucleus[-1]]:
      nucleus.append(v)
      sofar += weights[v]
  nucleus = [v for v in nucleus if weights[v] >= min_p * weights.max()]
  result = np.zeros_like(weights)
  result[nucleus] = weights[nucleus] / weights[nucleus].sum()
  return result


class SamplersTest(parameterized.TestCase):
  # Each of them cuts elsewhere than the others it is combined with.
  @parameterized.named_parameters(
    ('whole', 300, 1.0, 0, 1.0, 0.0),
    ('cold', 300, 0.5, 0, 1.0, 0.0),
    ('hot', 300, 2.0, 0, 1.0, 0.0),
    ('one_block', 5, 0.7, 0, 1.0, 0.0),
    ('best', 300, 1.0, 1, 1.0, 0.0),
    ('top_k', 300, 2.0, 20, 1.0, 0.0),
    ('top_p', 300, 0.5, 0, 0.8, 0.0),
    ('tiny_top_p', 300, 1.0, 0, 1e-9, 0.0),
    ('min_p', 300, 1.5, 0, 1.0, 0.1),
    ('top_p_of_top_k', 300, 2.0, 20, 0.7, 0.0),
    ('all_three', 300, 2.0, 40, 0.95, 0.2),
    ('more_than_there_are', 300, 1.0, 301, 1.0, 1e-30),
  )
  def test_frequencies_are_those_of_the_kept_softmax(
    self, vocab_size, temperature, top_k, top_p, min_p
  ):
    """Pearson's statistic has mean n - 1 and variance 2 (n - 1)."""
    settings = (temperature, top_k, top_p, min_p)
    logits = 2 * jax.random.normal(jax.random.key(0), (vocab_size,))
    rows = jnp.broadcast_to(logits[None], (_DRAWS, vocab_size))
    sampled = _call(rows, *settings)
    chances = _oracle(logits, *settings)
    counts = np.bincount(sampled.tokens, minlength=vocab_size)
    self.assertEqual(counts[chances == 0].sum(), 0)
    # Rare tokens are counted together: Pearson's is for counts of 5 or more.
    common = chances * _DRAWS >= 5
    expected = _DRAWS * np.append(chances[common], chances[~common].sum())
    seen = np.append(counts[common], counts[~common].sum())
    there = expected > 1e-3
    statistic = np.sum((seen - expected)[there] ** 2 / expected[there])
    freedom = there.sum() - 1
    self.assertLess(statistic, freedom + 5 * np.sqrt(2 * freedom) + 1e-3)
    # The log-prob tells the weight of all that is kept.
    np.testing.assert_allclose(
      sampled.log_probs,
      np.log(chances[sampled.tokens]),
      atol=2e-5,
    )

  @parameterized.parameters({'top_k': 2}, {'top_p': 0.5}, {'top_p': 0.7})
  def test_equally_likely_tokens_stay_together(self, **settings):
    """Also where one is 0 and the other -0."""
    logits = jnp.array([1.0, 0.0, -0.0, -1.0, -5.0])
    sampled = _call(jnp.broadcast_to(logits, (300, 5)), 1.0, **settings)
    kept = {0, 1, 2} if settings != {'top_p': 0.5} else {0}
    self.assertEqual(set(sampled.tokens.tolist()), kept)

  def test_greedy_rows_take_the_best_of_the_whole_softmax(self):
    chances = jnp.array([0.2, 0.5, 0.3, 0.0, 0.0])
    sampled = _call(
      jnp.log(jnp.stack([chances, chances])),
      [0.0, 1e-4],
      top_k=1,
      top_p=0.1,
      min_p=1.0,
    )
    np.testing.assert_array_equal(sampled.tokens, [1, 1])
    np.testing.assert_allclose(sampled.log_probs, [np.log(0.5), 0], atol=1e-6)

  def test_of_equal_logits_greedy_takes_the_first(self):
    """In its block, and of several blocks; also where they barely differ."""
    logits = jnp.zeros((2, 300)).at[:, jnp.array([70, 75, 200])].set(30.0)
    logits = logits.at[1, 200].set(np.nextafter(np.float32(30), np.float32(31)))
    sampled = _call(logits, 0.0)
    np.testing.assert_array_equal(sampled.tokens, [70, 200])

  def test_a_masked_token_is_never_drawn(self):
    """Nor the padding of the last block; a whole block may be masked."""
    logits = jnp.full((1000, 300), -jnp.inf).at[:, jnp.array([7, 299])].set(2.0)
    for settings in ({}, {'top_k': 5, 'top_p': 0.99, 'min_p': 0.5}):
      sampled = _call(logits, 1.0, **settings)
      self.assertEqual(set(sampled.tokens.tolist()), {7, 299})
      np.testing.assert_allclose(sampled.log_probs, np.log(0.5), atol=1e-6)

  def test_a_row_does_not_depend_on_the_others(self):
    """Nor on whether another row asks for truncation."""
    logits = 5 * jax.random.normal(jax.random.key(1), (6, 300))
    keys = jax.random.split(jax.random.key(2), 6)
    settings = (
      np.array([0.0, 0.5, 1.0, 1.0, 2.0, 0.7]),
      np.array([3, 0, 0, 9, 0, 0]),
      np.array([0.5, 1.0, 1.0, 0.9, 0.6, 1.0]),
      np.array([0.5, 0.0, 0.0, 0.0, 0.0, 0.3]),
    )
    together = _call(logits, *settings, keys=keys)
    order = np.array([3, 0, 5, 4, 2, 1])
    shuffled = _call(
      logits[order], *(s[order] for s in settings), keys=keys[order]
    )
    np.testing.assert_array_equal(together.tokens[order], shuffled.tokens)
    np.testing.assert_array_equal(together.log_probs[order], shuffled.log_probs)
    # Rows 0 (greedy), 1 and 2 are as where nobody truncates.
    plain = _call(logits, settings[0], keys=keys)
    np.testing.assert_array_equal(together.tokens[:3], plain.tokens[:3])
    np.testing.assert_array_equal(together.log_probs[:3], plain.log_probs[:3])


if __name__ == '__main__':
  absltest.main()

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.models import attention

_B, _T, _H, _K, _A = 2, 5, 6, 2, 4


def _heads(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


class AttentionTest(parameterized.TestCase):
  def test_mask_by_hand(self):
    mask = attention.causal_mask(jnp.array([[1, 1, 2, 0, 0]]))
    expected = [
      [1, 0, 0, 0, 0],
      [1, 1, 0, 0, 0],
      [0, 0, 1, 0, 0],
      [0, 0, 0, 1, 0],
      [0, 0, 0, 1, 1],
    ]
    np.testing.assert_array_equal(mask[0], np.array(expected, bool))

  def test_groups_equal_repeated_heads(self):
    """Against one softmax a head and query, keys and values repeated."""
    queries = _heads(0, _B, _T, _H, _A)
    keys, values = _heads(1, _B, _T, _K, _A), _heads(2, _B, _T, _K, _A)
    mask = attention.causal_mask(jnp.array([[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]]))
    mixed = np.asarray(jax.jit(attention.attend)(queries, keys, values, mask))
    repeated = [np.repeat(np.asarray(x), _H // _K, 2) for x in (keys, values)]
    for b, t, h in np.ndindex(_B, _T, _H):
      seen = np.flatnonzero(np.asarray(mask)[b, t])
      scores = repeated[0][b, seen, h] @ np.asarray(queries)[b, t, h] / 2.0
      weights = np.exp(scores) / np.exp(scores).sum()
      expected = weights @ repeated[1][b, seen, h]
      np.testing.assert_allclose(mixed[b, t, h], expected, atol=2e-6)

  def test_one_token_against_a_cache_equals_the_last_of_a_sequence(self):
    queries = _heads(0, _B, _T, _H, _A)
    keys, values = _heads(1, _B, _T, _K, _A), _heads(2, _B, _T, _K, _A)
    full = jax.jit(attention.attend)(
      queries, keys, values, attention.causal_mask(jnp.ones((_B, _T), int))
    )
    # Slot 0 is at token 4, slot 1 at token 2 with other things beyond it.
    positions = jnp.array([4, 2])
    here = jnp.arange(_B), positions
    mixed = jax.jit(attention.attend_cached)(
      queries[here], keys[here], values[here], keys, values, positions
    )
    np.testing.assert_allclose(mixed, full[here], atol=2e-6)

  def test_with_an_empty_cache_a_token_reads_itself(self):
    keys, values = _heads(1, _B, _K, _A), _heads(2, _B, _K, _A)
    rubbish = jnp.full((_B, _T, _K, _A), 1e6)
    mixed = jax.jit(attention.attend_cached)(
      _heads(0, _B, _H, _A), keys, values, rubbish, rubbish, jnp.zeros(_B, int)
    )
    np.testing.assert_allclose(mixed, np.repeat(values, _H // _K, 1))


if __name__ == '__main__':
  absltest.main()

"""Attention over a cache against attention over whole sequences."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.models import attention
from llamarl_jax.models import cached_attention
from llamarl_jax.models import kv_cache

_B, _T, _H, _K, _A = 2, 5, 6, 2, 4


def _heads(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


def _past(keys, values):
  """One layer of a cache that holds f[B, T, K, A]."""
  return kv_cache.KVCache(keys.swapaxes(1, 2), values.swapaxes(1, 2))


class CachedAttentionTest(parameterized.TestCase):
  def test_one_token_against_a_cache_equals_the_last_of_a_sequence(self):
    queries = _heads(0, _B, _T, _H, _A)
    keys, values = _heads(1, _B, _T, _K, _A), _heads(2, _B, _T, _K, _A)
    full = jax.jit(attention.attend)(
      queries, keys, values, jnp.ones((_B, _T), int), None
    )
    # Slot 0 is at token 4, slot 1 at token 2 with other things beyond it.
    positions = jnp.array([4, 2])
    here = jnp.arange(_B), positions
    mixed = jax.jit(cached_attention.attend_cached)(
      queries[here],
      keys[here],
      values[here],
      past=_past(keys, values),
      positions=positions,
    )
    np.testing.assert_allclose(mixed, full[here], atol=2e-6)

  def test_with_an_empty_cache_a_token_reads_itself(self):
    keys, values = _heads(1, _B, _K, _A), _heads(2, _B, _K, _A)
    rubbish = jnp.full((_B, _T, _K, _A), 1e6)
    mixed = jax.jit(cached_attention.attend_cached)(
      _heads(0, _B, _H, _A),
      keys,
      values,
      past=_past(rubbish, rubbish),
      positions=jnp.zeros(_B, int),
    )
    np.testing.assert_allclose(mixed, np.repeat(values, _H // _K, 1))

  def test_a_chunk_against_a_cache_equals_the_end_of_a_sequence(self):
    """Row 0 has three tokens before its chunk, row 1 none; both are padded."""
    queries = _heads(0, _B, _T, _H, _A)
    keys, values = _heads(1, _B, _T, _K, _A), _heads(2, _B, _T, _K, _A)
    full = jax.jit(attention.attend)(
      queries, keys, values, jnp.ones((_B, _T), int), None
    )
    starts, lengths = jnp.array([3, 0]), jnp.array([2, 3])
    # Three of a chunk; where there is no token the place is not read.
    places = jnp.minimum(starts[:, None] + jnp.arange(3)[None], _T - 1)
    rows = jnp.arange(_B)[:, None]
    mixed = jax.jit(cached_attention.attend_chunk)(
      queries[rows, places],
      keys[rows, places],
      values[rows, places],
      past=_past(keys, values),
      starts=starts,
      inside=jnp.arange(3)[None] < lengths[:, None],
    )
    np.testing.assert_allclose(mixed[0, :2], full[0, 3:5], atol=2e-6)
    np.testing.assert_allclose(mixed[1], full[1, :3], atol=2e-6)

  @parameterized.parameters('float32', 'int8')
  def test_a_window_equals_a_cache(self, dtype):
    """The positions read need not be the first."""
    queries = _heads(0, _B, _H, _A)
    keys, values = _heads(1, _B, _T, _K, _A), _heads(2, _B, _T, _K, _A)
    past = _past(keys, values)
    past = kv_cache.as_entries(past.k, past.v, dtype)
    # The last of the window is the new token, whose entries are exact beside
    # a cache: take them from the cache here.
    own = [
      x[:, :, -1] if scale is None else x[:, :, -1] * scale[:, :, -1:]
      for x, scale in ((past.k, past.k_scale), (past.v, past.v_scale))
    ]
    expected = jax.jit(cached_attention.attend_cached)(
      queries, *own, past=past, positions=jnp.array([3, 1])
    )
    column = jnp.arange(_T)[None]
    seen = (column < jnp.array([[3], [1]])) | (column == _T - 1)
    mixed = jax.jit(cached_attention.attend_window)(
      queries,
      past.k.swapaxes(2, 3),
      past.v,
      seen,
      k_scale=past.k_scale,
      v_scale=past.v_scale,
    )
    np.testing.assert_allclose(mixed, expected, atol=2e-6)


if __name__ == '__main__':
  absltest.main()

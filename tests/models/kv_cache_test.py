from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.models import config as config_lib
from llamarl_jax.models import kv_cache

_CONFIG = config_lib.LlamaConfig(
  vocab_size=5,
  width=8,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=4,
  mlp_width=8,
  rope_theta=1e4,
)


def _numbered(lines, length):
  shape = (2, lines, 1, length, 4)
  k = jnp.arange(1, 1 + np.prod(shape), dtype=jnp.float32).reshape(shape)
  return kv_cache.KVCache(k, -k)


class KVCacheTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_copies_beginnings_of_lines_and_leaves_the_others(self):
    cache, source = _numbered(4, 6), _numbered(2, 5)

    def copy(cache, source, source_lines, lines):
      return kv_cache.copy_lines(cache, source, source_lines, lines, length=3)

    filled = self.variant(copy)(
      cache, source, jnp.array([1, 0, 1, 0]), jnp.array([3, 0, 1, 4])
    )
    for line, of in ((3, 1), (0, 0), (1, 1)):
      for into, new in ((filled.k, source.k), (filled.v, source.v)):
        np.testing.assert_array_equal(into[:, line, :, :3], new[:, of, :, :3])
    # Line 4 does not exist: no line is touched for it.
    np.testing.assert_array_equal(filled.k[:, 2], cache.k[:, 2])
    np.testing.assert_array_equal(filled.v[..., 3:, :], cache.v[..., 3:, :])

  @chex.variants(with_jit=True, without_jit=True)
  def test_writes_tokens_and_nothing_past_the_end(self):
    cache = kv_cache.init_cache(_CONFIG, 3, 6)
    self.assertEqual((cache.num_lines, cache.capacity), (3, 6))
    new = _numbered(3, 2)
    written = self.variant(kv_cache.write_tokens)(
      cache,
      new.k,
      new.v,
      jnp.array([2, 0, 3]),
      jnp.array([[4, 5], [0, 6], [1, 2]]),
    )
    np.testing.assert_array_equal(written.k[:, 2, :, 4:], new.k[:, 0])
    np.testing.assert_array_equal(written.v[:, 0, :, 0], new.v[:, 1, :, 0])
    changed = jax.tree.map(lambda x: int((x != 0).sum()), written)
    # Three tokens, two layers, one head of four.
    self.assertEqual((changed.k, changed.v), (24, 24))

  @parameterized.parameters(1e-3, 40.0)
  def test_int8_entries_are_within_half_a_step(self, size):
    """Of max |x| / 127, each head at each position by itself."""
    generator = np.random.default_rng(0)
    k, v = size * generator.normal(size=(2, 2, 3, 1, 5, 4))
    k[0, 0, 0, 1] = 0.0
    cache = kv_cache.init_cache(_CONFIG, 3, 5, 'int8')
    places = jnp.broadcast_to(jnp.arange(5)[None], (3, 5))
    written = jax.jit(kv_cache.write_tokens)(
      cache, jnp.asarray(k), jnp.asarray(v), jnp.arange(3), places
    )
    for exact, entries, scale in (
      (k, written.k, written.k_scale),
      (v, written.v, written.v_scale),
    ):
      self.assertEqual(entries.dtype, jnp.int8)
      step = np.abs(exact).max(axis=-1, keepdims=True) / 127
      restored = entries * scale[..., None]
      bound = np.broadcast_to(step * 0.501, exact.shape)
      np.testing.assert_array_less(np.abs(restored - exact), bound + 1e-12)

  def test_specs_describe_the_arrays(self):
    for dtype in ('bfloat16', 'int8'):
      specs = kv_cache.cache_specs(_CONFIG, 3, 6, dtype)
      cache = kv_cache.init_cache(_CONFIG, 3, 6, dtype)
      found = jax.tree.map(lambda x: (x.shape, x.dtype), cache)
      self.assertEqual(jax.tree.map(lambda s: (s.shape, s.dtype), specs), found)
      for spec in jax.tree.leaves(specs):
        self.assertLen(spec.logical_axes, len(spec.shape))


if __name__ == '__main__':
  absltest.main()

from absl.testing import absltest
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


def _numbered(slots, length):
  shape = (2, slots, length, 1, 4)
  k = jnp.arange(1, 1 + np.prod(shape), dtype=jnp.float32).reshape(shape)
  return kv_cache.KVCache(k, -k)


class KVCacheTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_inserts_rows_in_slots_and_leaves_the_others(self):
    cache, block = _numbered(4, 6), _numbered(2, 3)
    filled = self.variant(kv_cache.insert)(
      cache, block, jnp.array([1, 0, 1, 0]), jnp.array([3, 0, 1, 4])
    )
    for slot, row in ((3, 1), (0, 0), (1, 1)):
      np.testing.assert_array_equal(filled.k[:, slot, :3], block.k[:, row])
      np.testing.assert_array_equal(filled.v[:, slot, :3], block.v[:, row])
    # Slot 4 does not exist: no slot is touched for it.
    np.testing.assert_array_equal(filled.k[:, 2], cache.k[:, 2])
    np.testing.assert_array_equal(filled.v[:, :, 3:], cache.v[:, :, 3:])

  @chex.variants(with_jit=True, without_jit=True)
  def test_writes_one_token_a_slot_and_nothing_past_the_end(self):
    cache = kv_cache.init_cache(_CONFIG, 3, 6)
    self.assertEqual(cache.capacity, 6)
    new = _numbered(3, 1)
    written = self.variant(kv_cache.write)(
      cache, new.k[:, :, 0], new.v[:, :, 0], jnp.array([5, 0, 6])
    )
    np.testing.assert_array_equal(written.k[:, 0, 5], new.k[:, 0, 0])
    np.testing.assert_array_equal(written.v[:, 1, 0], new.v[:, 1, 0])
    changed = jax.tree.map(lambda x: int((x != 0).sum()), written)
    # Two of three slots, two layers, one head of four.
    self.assertEqual((changed.k, changed.v), (16, 16))


if __name__ == '__main__':
  absltest.main()

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp

from llamarl_jax.models import attention
from llamarl_jax.models import blocked_attention


def _softmax_attention(queries, keys, values, mask):
  """As it is written in textbooks, each head with keys of its own."""
  groups = queries.shape[2] // keys.shape[2]
  keys, values = (jnp.repeat(x, groups, 2) for x in (keys, values))
  scores = jnp.einsum('btha,bsha->bhts', queries, keys)
  scores = scores / queries.shape[-1] ** 0.5
  scores = jnp.where(mask[:, None], scores, -jnp.inf)
  return jnp.einsum('bhts,bsha->btha', jax.nn.softmax(scores), values)


class BlockedAttentionTest(parameterized.TestCase):
  @parameterized.parameters(
    (1, [(0, 1)]),
    (7, [(0, 7)]),
    (8, [(0, 4), (4, 8)]),
    (13, [(0, 5), (5, 10), (10, 13)]),
    (100, [(13 * i, min(13 * i + 13, 100)) for i in range(8)]),
  )
  def test_blocks_cover_all_queries_once(self, length, expected):
    """Blocks of at least 4, at most 8 of them: by hand."""
    with mock.patch.object(blocked_attention, '_MIN_BLOCK', 4):
      blocks = list(blocked_attention._blocks(length))
    self.assertEqual([(b.start, b.stop) for b in blocks], expected)

  @parameterized.parameters((13, 4), (9, 64))
  def test_values_and_gradients(self, length, min_block):
    """Against the derivative of plain softmax attention; sharp scores too."""
    keys = jax.random.split(jax.random.key(0), 4)
    # Scores of up to 60: the exponentials lose all but a few keys.
    queries = 8 * jax.random.normal(keys[0], (2, length, 6, 4))
    read = jax.random.normal(keys[1], (2, 2, length, 2, 4))
    direction = jax.random.normal(keys[2], queries.shape)
    ids = jnp.sort(jax.random.randint(keys[3], (2, length), 1, 4), axis=1)
    prefixes = jnp.where(ids == 3, 1, 0)
    mask = attention.causal_mask(ids, prefixes)

    def gradient(attend):
      def score(queries, keys, values):
        mixed = attend(queries, keys, values, mask)
        return jnp.sum(mixed * direction), mixed

      return jax.jit(jax.grad(score, argnums=(0, 1, 2), has_aux=True))(
        queries, *read
      )

    with mock.patch.object(blocked_attention, '_MIN_BLOCK', min_block):
      ours = gradient(blocked_attention.attend)
    theirs = gradient(_softmax_attention)
    # Float32 sums in another order, of numbers up to 100.
    chex.assert_trees_all_close(ours, theirs, atol=2e-5, rtol=2e-5)

  def test_dtypes_are_kept(self):
    shape = (1, 5, 2, 4)
    x = jnp.ones(shape, jnp.bfloat16)
    mask = attention.causal_mask(jnp.ones((1, 5), jnp.int32))
    mixed, pull_back = jax.vjp(
      lambda *heads: blocked_attention.attend(*heads, mask), x, x, x
    )
    chex.assert_type([mixed, *pull_back(mixed)], jnp.bfloat16)


if __name__ == '__main__':
  absltest.main()

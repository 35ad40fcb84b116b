import itertools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.sampling import keys


class KeysTest(parameterized.TestCase):
  def test_folds_the_address_in_order(self):
    seed = jax.random.key(5)
    found = keys.token_keys(seed, *(jnp.array([i, 0]) for i in (1, 2, 3, 4)))
    expected = seed
    for part in (1, 2, 3, 4):
      expected = jax.random.fold_in(expected, part)
    np.testing.assert_array_equal(
      jax.random.key_data(found[0]), jax.random.key_data(expected)
    )

  def test_every_address_has_its_own_key(self):
    addresses = np.array(list(itertools.product(range(3), repeat=4)))
    found = keys.token_keys(jax.random.key(0), *jnp.asarray(addresses.T))
    data = np.asarray(jax.random.key_data(found))
    self.assertLen(np.unique(data, axis=0), 81)


if __name__ == '__main__':
  absltest.main()

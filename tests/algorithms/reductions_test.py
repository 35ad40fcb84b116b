"""Weights and counts of the reductions, in closed form."""

import functools

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.algorithms import reductions

# Row 0 packs a sequence of 1 prompt and 2 completion tokens, one of 1 and 1,
# and padding; row 1 one of 2 and 4; row 2 one without a completion token; row 3
# is empty.
_SEGMENTS = jnp.asarray(
  [
    [1, 1, 1, 2, 2, 0],
    [1, 1, 1, 1, 1, 1],
    [1, 1, 1, 0, 0, 0],
    [0, 0, 0, 0, 0, 0],
  ],
  jnp.int32,
)
_MASK = jnp.asarray(
  [
    [0, 1, 1, 0, 1, 0],
    [0, 0, 1, 1, 1, 1],
    [0, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 0],
  ],
  bool,
)
_CONSTANT = functools.partial(reductions.constant_reduction, constant_length=8)
_EXPECTED = {
  'token': (
    [[0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 1, 1], [0] * 6, [0] * 6],
    7,
  ),
  'sequence': (
    [[0, 1 / 2, 1 / 2, 0, 1, 0], [0, 0] + [1 / 4] * 4, [0] * 6, [0] * 6],
    3,
  ),
  'constant': (
    [[0, 1 / 8, 1 / 8, 0, 1 / 8, 0], [0, 0] + [1 / 8] * 4, [0] * 6, [0] * 6],
    3,
  ),
}


_JITTED = {
  name: jax.jit(_CONSTANT if name == 'constant' else function)
  for name, function in reductions.REDUCTIONS.items()
}


class ReductionsTest(chex.TestCase):
  def test_every_reduction_is_tested(self):
    self.assertEqual(set(_EXPECTED), set(reductions.REDUCTIONS))

  @parameterized.parameters(*_EXPECTED)
  def test_weights_and_denominator(self, name):
    weights, denominator = _JITTED[name](_MASK, _SEGMENTS)
    expected_weights, expected_denominator = _EXPECTED[name]
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-6)
    self.assertEqual(denominator, expected_denominator)

  @parameterized.parameters(*_EXPECTED)
  def test_rows_add_up(self, name):
    whole = _JITTED[name](_MASK, _SEGMENTS)
    parts = [
      _JITTED[name](_MASK[i : i + 1], _SEGMENTS[i : i + 1]) for i in range(4)
    ]
    np.testing.assert_array_equal(
      np.concatenate([part.weights for part in parts]), whole.weights
    )
    self.assertEqual(sum(part.denominator for part in parts), whole.denominator)

  def test_mean_over_sequences_of_their_means(self):
    values = jnp.where(_MASK, jnp.arange(24.0).reshape(4, 6), jnp.nan)
    mean = jax.jit(reductions.reduce_tokens, static_argnums=3)(
      values, _MASK, _SEGMENTS, reductions.sequence_reduction
    )
    # (mean(1, 2) + mean(4) + mean(8, 9, 10, 11)) / 3
    np.testing.assert_allclose(mean.value(), (1.5 + 4.0 + 9.5) / 3, rtol=1e-6)

  def test_as_many_sequences_as_tokens(self):
    # The largest segment id a row of 3 can hold.
    weights, denominator = _JITTED['sequence'](
      jnp.ones((1, 3), bool), jnp.asarray([[1, 2, 3]], jnp.int32)
    )
    np.testing.assert_array_equal(weights, [[1.0, 1.0, 1.0]])
    self.assertEqual(denominator, 3.0)

  def test_masked_mean(self):
    mask = jnp.asarray([[True, False, True]])
    values = jnp.asarray([[1.0, jnp.nan, 3.0]])
    self.assertEqual(reductions.masked_mean(values, mask), (4.0, 2.0))
    empty = reductions.masked_mean(values, jnp.zeros_like(mask))
    self.assertEqual(empty, (0.0, 0.0))
    self.assertEqual(empty.value(), 0.0)

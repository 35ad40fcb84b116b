"""Log-probs and entropy against closed forms and numpy in float64."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.algorithms import log_probs


def _softmax(logits: np.ndarray) -> np.ndarray:
  exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
  return exponentials / exponentials.sum(axis=-1, keepdims=True)


class LogProbsTest(chex.TestCase):
  @parameterized.parameters(0.5, 1.0, 2.0)
  def test_matches_numpy_in_float64(self, temperature):
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=5.0, size=(2, 3, 7))
    tokens = rng.integers(0, 7, size=(2, 3), dtype=np.int32)
    probs = _softmax(logits / temperature)

    actual_log_probs, actual_entropy = jax.jit(
      lambda logits, tokens: (
        log_probs.token_log_probs(logits, tokens, temperature=temperature),
        log_probs.entropy(logits, temperature=temperature),
      )
    )(jnp.asarray(logits, jnp.float32), jnp.asarray(tokens))

    expected = np.log(np.take_along_axis(probs, tokens[..., None], -1))[..., 0]
    np.testing.assert_allclose(actual_log_probs, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
      actual_entropy, -(probs * np.log(probs)).sum(-1), rtol=1e-5, atol=1e-6
    )

  def test_uniform_logits_have_log_vocabulary_entropy(self):
    logits = jnp.full((1, 8), 3.0)
    tokens = jnp.asarray([5], jnp.int32)
    np.testing.assert_allclose(
      log_probs.token_log_probs(logits, tokens, temperature=0.3),
      [-np.log(8.0)],
      rtol=1e-6,
    )
    np.testing.assert_allclose(
      log_probs.entropy(logits, temperature=0.3), [np.log(8.0)], rtol=1e-6
    )

  def test_huge_and_forbidden_logits_stay_finite(self):
    logits = jnp.asarray([[1e4, 1e4, -jnp.inf, -1e4]])
    tokens = jnp.asarray([1], jnp.int32)

    def total(logits):
      chosen = log_probs.token_log_probs(logits, tokens, temperature=1.0)
      return jnp.sum(chosen + log_probs.entropy(logits, temperature=1.0))

    # Two tokens of probability 1/2: -log 2 + log 2.
    np.testing.assert_allclose(jax.jit(total)(logits), 0.0, atol=1e-6)
    np.testing.assert_allclose(
      jax.jit(jax.grad(total))(logits), [[-0.5, 0.5, 0.0, 0.0]], atol=1e-6
    )

  def test_gradient_is_one_hot_less_probs(self):
    logits = jnp.asarray([[0.3, -1.2, 2.0]])
    tokens = jnp.asarray([2], jnp.int32)
    gradient = jax.jit(
      jax.grad(
        lambda x: log_probs.token_log_probs(x, tokens, temperature=2.0)[0]
      )
    )(logits)
    probs = _softmax(np.asarray([[0.15, -0.6, 1.0]]))
    np.testing.assert_allclose(
      gradient, (np.asarray([[0.0, 0.0, 1.0]]) - probs) / 2.0, rtol=1e-5
    )

  def test_low_precision_logits_are_scored_in_float32(self):
    logits = jnp.asarray([[1.0, 2.0, 3.0]], jnp.bfloat16)  # Exact in bfloat16.
    actual = log_probs.token_log_probs(
      logits, jnp.asarray([0], jnp.int32), temperature=1.0
    )
    self.assertEqual(actual.dtype, jnp.float32)
    np.testing.assert_allclose(
      actual, np.log(_softmax(np.asarray([1.0, 2.0, 3.0])))[:1], rtol=1e-6
    )

  @parameterized.parameters(0.0, -1.0)
  def test_temperature_must_be_positive(self, temperature):
    with self.assertRaisesRegex(ValueError, f'above 0, got {temperature}'):
      log_probs.entropy(jnp.zeros((1, 2)), temperature=temperature)

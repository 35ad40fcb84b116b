"""AIPO against a loop in numpy, finite differences and exact expectations."""

import functools

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.algorithms import aipo
from llamarl_jax.algorithms import importance
from llamarl_jax.algorithms import log_probs as log_probs_lib
from llamarl_jax.algorithms import reductions
from llamarl_jax.types import Trajectories

_RHO = 2.0


def _batch(*, mask, behavior_log_probs, advantages, segment_ids=None):
  mask = np.asarray(mask, bool)
  ones = jnp.ones(mask.shape, jnp.int32)
  return Trajectories(
    tokens=ones,
    completion_mask=jnp.asarray(mask),
    segment_ids=ones if segment_ids is None else jnp.asarray(segment_ids),
    positions=ones,
    behavior_log_probs=jnp.asarray(behavior_log_probs, jnp.float32),
    policy_version=ones,
    advantages=jnp.asarray(advantages, jnp.float32),
  )


def _random_problem(seed):
  """Returns logits f64[R, T, V], tokens, mask and the rest, in numpy."""
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(2, 5, 4))
  tokens = rng.integers(0, 4, size=(2, 5), dtype=np.int32)
  mask = np.asarray([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]], bool)
  behavior = rng.normal(loc=-2.0, size=(2, 5))
  advantages = np.where(mask, rng.normal(size=(2, 5)), 0.0)
  return logits, tokens, mask, behavior, advantages


def _log_prob(logits, token):
  """Returns log softmax(logits)[token], by plain loops."""
  total = 0.0
  for logit in logits:
    total += np.exp(logit)
  return logits[token] - np.log(total)


def _oracle(logits, tokens, mask, behavior, advantages, rho):
  """Returns paper.md's sum over tokens of min(r, rho) A grad log pi, negated.

  The gradient with respect to the logits, token by token and entry by entry, in
  float64: grad log pi(y) = onehot(y) - pi.
  """
  gradient = np.zeros_like(logits)
  num_tokens = 0
  num_truncated = 0
  for row in range(logits.shape[0]):
    for t in range(logits.shape[1]):
      if not mask[row, t]:
        continue
      num_tokens += 1
      chosen = tokens[row, t]
      ratio = np.exp(_log_prob(logits[row, t], chosen) - behavior[row, t])
      weight = ratio
      if ratio > rho:
        weight = rho
        num_truncated += 1
      for v in range(logits.shape[2]):
        score = (v == chosen) - np.exp(_log_prob(logits[row, t], v))
        gradient[row, t, v] = -weight * advantages[row, t] * score
  return gradient, num_tokens, num_truncated


class AipoTest(chex.TestCase):
  @parameterized.parameters(0, 1, 2)
  def test_gradient_matches_the_loop(self, seed):
    logits, tokens, mask, behavior, advantages = _random_problem(seed)
    batch = _batch(
      mask=mask, behavior_log_probs=behavior, advantages=advantages
    )

    def loss(logits):
      log_probs = log_probs_lib.token_log_probs(
        logits, jnp.asarray(tokens), temperature=1.0
      )
      output = aipo.aipo_loss(log_probs, batch, max_importance_ratio=_RHO)
      return output.loss.total, output

    gradient, output = jax.jit(jax.grad(loss, has_aux=True))(
      jnp.asarray(logits, jnp.float32)
    )
    expected, num_tokens, num_truncated = _oracle(
      logits, tokens, mask, behavior, advantages, _RHO
    )
    # Both kinds of tokens must be there for the comparison to mean something.
    self.assertBetween(num_truncated, 1, num_tokens - 1)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    self.assertEqual(output.loss.count, num_tokens)
    self.assertEqual(
      output.metrics['truncated_fraction'], (num_truncated, num_tokens)
    )

  def test_gradient_matches_finite_differences(self):
    logits, tokens, mask, behavior, advantages = _random_problem(3)
    batch = _batch(
      mask=mask, behavior_log_probs=behavior, advantages=advantages
    )

    def loss(logits):
      log_probs = log_probs_lib.token_log_probs(
        logits, jnp.asarray(tokens), temperature=1.0
      )
      return aipo.aipo_loss(
        log_probs, batch, max_importance_ratio=_RHO
      ).loss.total

    places = list(zip(*np.nonzero(mask), strict=True))
    coefficients = [
      min(np.exp(_log_prob(logits[p], tokens[p]) - behavior[p]), _RHO)
      for p in places
    ]

    def surrogate(logits):  # In float64; its coefficients were frozen above.
      return -sum(
        c * advantages[p] * _log_prob(logits[p], tokens[p])
        for c, p in zip(coefficients, places, strict=True)
      )

    step = 1e-5
    expected = np.zeros_like(logits)
    for index in np.ndindex(*logits.shape):
      shift = np.zeros_like(logits)
      shift[index] = step
      expected[index] = (
        surrogate(logits + shift) - surrogate(logits - shift)
      ) / (2 * step)
    actual = jax.jit(jax.grad(loss))(jnp.asarray(logits, jnp.float32))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)

  def test_truncated_token_still_contributes(self):
    # Ratios 3 and 1.5 with rho 2, A = 5 and 7. The gradient with respect to
    # log pi is -rho A = -10 above rho and -ratio A = -10.5 below. A clip that
    # is differentiated agrees below rho, and drops the token above it.
    log_probs = jnp.log(jnp.asarray([[0.6, 0.3]]))
    batch = _batch(
      mask=[[True, True]],
      behavior_log_probs=np.log([[0.2, 0.2]]),
      advantages=[[5.0, 7.0]],
    )

    def loss(log_probs):
      return aipo.aipo_loss(
        log_probs, batch, max_importance_ratio=_RHO
      ).loss.total

    def differentiated_clip(log_probs):
      ratio = importance.importance_ratio(
        log_probs, batch.behavior_log_probs, batch.completion_mask
      )
      return -jnp.sum(jnp.minimum(ratio, _RHO) * batch.advantages)

    np.testing.assert_allclose(
      jax.jit(jax.grad(loss))(log_probs), [[-10.0, -10.5]], rtol=1e-5
    )
    np.testing.assert_allclose(
      jax.jit(jax.grad(differentiated_clip))(log_probs),
      [[0.0, -10.5]],
      rtol=1e-5,
    )

  def test_untruncated_correction_is_exact_in_expectation(self):
    # A single choice among three tokens: row v chose token v, and the row's
    # weight mu(v) is carried by the advantage. Summed over the rows that is the
    # expectation over mu, and must be the gradient of E_pi[A], by autodiff.
    mu = np.asarray([0.5, 0.3, 0.2])
    values = np.asarray([1.0, -2.0, 0.5])
    tokens = jnp.arange(3, dtype=jnp.int32)[:, None]
    batch = _batch(
      mask=np.ones((3, 1)),
      behavior_log_probs=np.log(mu)[:, None],
      advantages=(mu * values)[:, None],
    )

    def loss(logits):
      log_probs = log_probs_lib.token_log_probs(
        jnp.broadcast_to(logits, (3, 1, 3)), tokens, temperature=1.0
      )
      return aipo.aipo_loss(
        log_probs, batch, max_importance_ratio=1e6
      ).loss.total

    def expected_value(logits):
      return jnp.sum(jax.nn.softmax(logits) * jnp.asarray(values, jnp.float32))

    logits = jnp.asarray([0.2, -0.4, 1.0])
    np.testing.assert_allclose(
      jax.jit(jax.grad(loss))(logits),
      -jax.jit(jax.grad(expected_value))(logits),
      rtol=1e-5,
      atol=1e-6,
    )

  def test_loss_is_the_documented_surrogate(self):
    # Ratios 3 and 1/2 in two sequences, and a mean over sequences.
    log_probs = jnp.log(jnp.asarray([[0.6, 0.1]]))
    batch = _batch(
      mask=[[True, True]],
      segment_ids=np.asarray([[1, 2]], np.int32),
      behavior_log_probs=np.log([[0.2, 0.2]]),
      advantages=[[5.0, -1.0]],
    )
    loss_fn = functools.partial(
      aipo.aipo_loss,
      max_importance_ratio=_RHO,
      reduction_fn=reductions.sequence_reduction,
    )
    loss = jax.jit(loss_fn)(log_probs, batch).loss
    np.testing.assert_allclose(
      loss.value(),
      -(2.0 * 5.0 * np.log(0.6) - 0.5 * np.log(0.1)) / 2.0,
      rtol=1e-5,
    )

  def test_shapes_are_checked(self):
    batch = _batch(
      mask=np.ones((1, 2)),
      behavior_log_probs=np.zeros((1, 2)),
      advantages=np.zeros((1, 2)),
    )
    with self.assertRaises(AssertionError):
      aipo.aipo_loss(jnp.zeros((2, 1)), batch, max_importance_ratio=_RHO)

"""Log-probs of chosen tokens, and entropy, from logits.

Both are of the softmax at the sampling temperature, in float32, so that the
trainer scores a token under the distribution the generator drew it from.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class TokenScores(NamedTuple):
  """What is to be known of a chosen token, and of the softmax it is from.

  p = exp(logits / temperature - maximum) / total

  Attributes:
    log_probs: f32[...], of the chosen tokens.
    entropy: f32[...], in nats.
    maximum: f32[...], of logits / temperature.
    total: f32[...], of the exponentials.
  """

  log_probs: jax.Array
  entropy: jax.Array
  maximum: jax.Array
  total: jax.Array


def score_tokens(
  logits: jax.Array, tokens: jax.Array, *, temperature: float
) -> tuple[TokenScores, jax.Array]:
  """Returns `token_log_probs` and `entropy`, and what their gradient needs.

  Only sums over the vocabulary are taken, never a look-up in it: where the
  vocabulary is spread over devices, each sums its part.

  Args:
    logits: f[..., V]; -inf forbids a token.
    tokens: i32[...], each in 0 .. V - 1.
    temperature: of the softmax, above 0.

  Returns:
    The scores, and the exponentials f32[..., V] that p is made of.

  Raises:
    ValueError: if the temperature is not above 0.
  """
  chex.assert_type([logits, tokens], [float, int])
  chex.assert_shape(tokens, logits.shape[:-1])
  scaled = _scaled_logits(logits, temperature)
  maximum = jnp.max(scaled, axis=-1)
  shifted = scaled - maximum[..., None]
  exponentials = jnp.exp(shifted)
  total = jnp.sum(exponentials, axis=-1)
  chosen = jnp.sum(jnp.where(_is_chosen(logits, tokens), shifted, 0.0), axis=-1)
  # A forbidden token adds nothing, where 0 * -inf would be NaN.
  finite = jnp.where(jnp.isneginf(shifted), 0.0, shifted)
  log_normalizer = jnp.log(total)
  scores = TokenScores(
    log_probs=chosen - log_normalizer,
    entropy=log_normalizer - jnp.sum(exponentials * finite, axis=-1) / total,
    maximum=maximum,
    total=total,
  )
  return scores, exponentials


def exponentials_of(
  logits: jax.Array, scores: TokenScores, *, temperature: float
) -> jax.Array:
  """Returns the exponentials of `score_tokens` once more, f32[..., V]."""
  scaled = _scaled_logits(logits, temperature)
  return jnp.exp(scaled - scores.maximum[..., None])


def logits_gradient(
  exponentials: jax.Array,
  tokens: jax.Array,
  scores: TokenScores,
  gradient: jax.Array,
  *,
  temperature: float,
) -> jax.Array:
  """Returns the gradient by the logits of the sum of gradient * log-prob.

  gradient (one_hot(token) - p) / temperature

  Args:
    exponentials: f32[..., V], from `score_tokens`.
    tokens: i32[...].
    scores: from `score_tokens`.
    gradient: f32[...], by the log-probs.
    temperature: as for the scores.

  Returns:
    f32[..., V].
  """
  factor = gradient / temperature
  others = exponentials * (factor / scores.total)[..., None]
  here = _is_chosen(exponentials, tokens)
  return jnp.where(here, factor[..., None] - others, -others)


def token_log_probs(
  logits: jax.Array, tokens: jax.Array, *, temperature: float
) -> jax.Array:
  """Returns the log-prob of each chosen token.

  log_softmax(logits / temperature)[token]

  The arrays are aligned by the caller: `logits[..., :]` is what `tokens[...]`
  was, or might have been, drawn from.

  Args:
    logits: f[..., V], of any float type; computed in float32.
    tokens: i32[...], each in 0 .. V - 1.
    temperature: of the softmax, above 0.

  Returns:
    f32[...].

  Raises:
    ValueError: if the temperature is not above 0.
  """
  chex.assert_type([logits, tokens], [float, int])
  chex.assert_shape(tokens, logits.shape[:-1])
  shifted = _shifted_logits(logits, temperature)
  chosen = jnp.take_along_axis(shifted, tokens[..., None], axis=-1)
  return jnp.squeeze(chosen, axis=-1) - _log_normalizer(shifted)


def entropy(logits: jax.Array, *, temperature: float) -> jax.Array:
  """Returns the entropy of the softmax, in nats.

  -sum_v p_v log p_v, p = softmax(logits / temperature)

  Args:
    logits: f[..., V]; -inf forbids a token.
    temperature: of the softmax, above 0.

  Returns:
    f32[...].

  Raises:
    ValueError: if the temperature is not above 0.
  """
  chex.assert_type(logits, float)
  shifted = _shifted_logits(logits, temperature)
  log_normalizer = _log_normalizer(shifted)
  probs = jnp.exp(shifted - log_normalizer[..., None])
  # A forbidden token adds nothing, where 0 * -inf would be NaN.
  finite = jnp.where(jnp.isneginf(shifted), 0.0, shifted)
  return log_normalizer - jnp.sum(probs * finite, axis=-1)


def _is_chosen(logits: jax.Array, tokens: jax.Array) -> jax.Array:
  """Returns bool[..., V], True at the chosen token."""
  place = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
  return place == tokens[..., None]


def _scaled_logits(logits: jax.Array, temperature: float) -> jax.Array:
  """Returns logits / temperature, in float32."""
  if temperature <= 0:
    raise ValueError(
      f'temperature must be above 0, got {temperature}: score tokens that'
      ' were taken greedily at temperature 1'
    )
  return logits.astype(jnp.float32) / temperature


def _shifted_logits(logits: jax.Array, temperature: float) -> jax.Array:
  """Returns logits / temperature less their maximum."""
  scaled = _scaled_logits(logits, temperature)
  # A constant of the softmax: the gradient need not pass through it.
  return scaled - jax.lax.stop_gradient(jnp.max(scaled, axis=-1, keepdims=True))


def _log_normalizer(shifted: jax.Array) -> jax.Array:
  """Returns log sum_v exp(shifted_v), which cannot overflow."""
  return jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))

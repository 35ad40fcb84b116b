"""Log-probs of chosen tokens, and entropy, from logits.

Both are of the softmax at the sampling temperature, in float32, so that the
trainer scores a token under the distribution the generator drew it from.
"""

import chex
import jax
import jax.numpy as jnp


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


def _shifted_logits(logits: jax.Array, temperature: float) -> jax.Array:
  """Returns logits / temperature, in float32, less their maximum."""
  if temperature <= 0:
    raise ValueError(
      f'temperature must be above 0, got {temperature}: score tokens that'
      ' were taken greedily at temperature 1'
    )
  scaled = logits.astype(jnp.float32) / temperature
  # A constant of the softmax: the gradient need not pass through it.
  return scaled - jax.lax.stop_gradient(jnp.max(scaled, axis=-1, keepdims=True))


def _log_normalizer(shifted: jax.Array) -> jax.Array:
  """Returns log sum_v exp(shifted_v), which cannot overflow."""
  return jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))

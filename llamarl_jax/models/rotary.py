"""Rotary position embedding, half-split layout.

Su et al. (2021), RoFormer, section 3.4. Channel i is rotated with channel
i + A / 2 (the layout of Hugging Face checkpoints), not with its neighbor.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.models import config as config_lib


class Rotation(NamedTuple):
  """The rotation of each position.

  Attributes:
    cosines: f32[..., A / 2].
    sines: f32[..., A / 2].
  """

  cosines: jax.Array
  sines: jax.Array


def frequencies(
  head_dim: int,
  theta: float,
  scaling: config_lib.RopeScaling | None = None,
) -> np.ndarray:
  """Returns the angle a position turns each pair of channels by, f32[A / 2].

  theta ** (-2 i / A)

  With `scaling`, the rule of Llama 3.1 (Grattafiori et al. 2024, section 3.4.3;
  the numbers of each model are in its published config): with n wavelengths in
  the original context,

    frequency * (kept + (1 - kept) / factor),
    kept = clip((n - low) / (high - low), 0, 1)

  Args:
    head_dim: width of one head (A).
    theta: base of the wavelengths.
    scaling: of long wavelengths, None = none.
  """
  # Constants of the program: in float64 on the host they are rounded once.
  plain = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
  if scaling is None:
    return plain.astype(np.float32)
  low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
  waves = scaling.original_max_position * plain / (2 * np.pi)
  kept = np.clip((waves - low) / (high - low), 0, 1)
  return (plain * (kept + (1 - kept) / scaling.factor)).astype(np.float32)


def rotation(
  positions: jax.Array,
  *,
  head_dim: int,
  theta: float,
  scaling: config_lib.RopeScaling | None = None,
) -> Rotation:
  """Returns cosines and sines of position * frequency; see `frequencies`.

  Args:
    positions: i32[...], place of each token in its sequence, from 0.
    head_dim: width of one head (A).
    theta: base of the wavelengths.
    scaling: of long wavelengths, None = none.
  """
  # Positions are integers, exact in float32 up to 2 ** 24.
  angles = jnp.multiply.outer(
    positions.astype(jnp.float32), frequencies(head_dim, theta, scaling)
  )
  return Rotation(jnp.cos(angles), jnp.sin(angles))


@jax.custom_vjp
def rotate(x: jax.Array, turn: Rotation) -> jax.Array:
  """Returns heads rotated by their positions.

  (a, b) -> (a cos - b sin, b cos + a sin), computed in float32.

  Args:
    x: f[..., heads, A], queries or keys.
    turn: the rotation of each position, f32[..., A / 2].
  """
  half = x.shape[-1] // 2
  chex.assert_shape(turn.cosines, (*x.shape[:-2], half))
  cosines = turn.cosines[..., None, :]
  sines = turn.sines[..., None, :]
  first = x[..., :half].astype(jnp.float32)
  second = x[..., half:].astype(jnp.float32)
  rotated = jnp.concatenate(
    [first * cosines - second * sines, second * cosines + first * sines],
    axis=-1,
  )
  return rotated.astype(x.dtype)


def _forward(x: jax.Array, turn: Rotation) -> tuple[jax.Array, Rotation]:
  return rotate(x, turn), turn


def _backward(turn: Rotation, gradient: jax.Array) -> tuple[jax.Array, None]:
  """Turns back. Positions are given: angles have no gradient.

  Differentiated as it is written, the concatenation becomes two padded arrays
  and their sum.
  """
  return rotate(gradient, Rotation(turn.cosines, -turn.sines)), None


rotate.defvjp(_forward, _backward)

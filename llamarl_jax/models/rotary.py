"""Rotary position embedding, half-split layout.

Su et al. (2021), RoFormer, section 3.4. Channel i is rotated with channel
i + A / 2 (the layout of Hugging Face checkpoints), not with its neighbor.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class Rotation(NamedTuple):
  """The rotation of each position.

  Attributes:
    cosines: f32[..., A / 2].
    sines: f32[..., A / 2].
  """

  cosines: jax.Array
  sines: jax.Array


def rotation(positions: jax.Array, *, head_dim: int, theta: float) -> Rotation:
  """Returns cosines and sines of position * theta ** (-2 i / A).

  Args:
    positions: i32[...], place of each token in its sequence, from 0.
    head_dim: width of one head (A).
    theta: base of the wavelengths.
  """
  exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  frequencies = theta**-exponents
  # Positions are integers, exact in float32 up to 2 ** 24.
  angles = jnp.multiply.outer(positions.astype(jnp.float32), frequencies)
  return Rotation(jnp.cos(angles), jnp.sin(angles))


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

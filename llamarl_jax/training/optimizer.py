"""The optimizer, an optax chain built from plain arguments.

Clipping by global norm, then AdamW. Loshchilov & Hutter (2019),
https://arxiv.org/abs/1711.05101.
"""

from collections.abc import Callable
import math

import jax
import jax.numpy as jnp
import optax

from llamarl_jax.types import Params


def _warmup(count: jax.Array, warmup_steps: int) -> jax.Array:
  # Not 0 at the first update, which would be computed for nothing.
  return jnp.minimum(1.0, (count + 1) / max(warmup_steps, 1))


def _constant(peak: float, warmup_steps: int, num_steps: int) -> optax.Schedule:
  del num_steps
  return lambda count: peak * _warmup(count, warmup_steps)


def _cosine(peak: float, warmup_steps: int, num_steps: int) -> optax.Schedule:
  def rate(count: jax.Array) -> jax.Array:
    done = (count - warmup_steps) / (num_steps - warmup_steps)
    decay = 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.clip(done, 0.0, 1.0)))
    return peak * _warmup(count, warmup_steps) * decay

  return rate


# (peak, warmup_steps, num_steps) -> schedule over applied updates
SCHEDULES: dict[str, Callable[[float, int, int], optax.Schedule]] = {
  'constant': _constant,
  'cosine': _cosine,
}


def learning_rate_schedule(
  name: str, *, learning_rate: float, warmup_steps: int, num_steps: int
) -> optax.Schedule:
  """Returns the learning rate as a function of the updates applied so far.

  Args:
    name: a key of `SCHEDULES`.
    learning_rate: the peak, reached after the warm-up and kept or decayed.
    warmup_steps: updates over which it rises linearly: the first of w has
      1 / w of the peak, the last has the peak. 0 is no warm-up.
    num_steps: updates at which 'cosine' arrives at 0, warm-up included.

  Raises:
    ValueError: if the name is unknown or a number is out of its range.
  """
  if name not in SCHEDULES:
    raise ValueError(
      f'unknown learning rate schedule {name!r}: choose one of '
      f'{sorted(SCHEDULES)}'
    )
  if not (math.isfinite(learning_rate) and learning_rate >= 0):
    raise ValueError(f'learning_rate must be 0 or more, got {learning_rate}')
  if warmup_steps < 0:
    raise ValueError(f'warmup_steps must be 0 or more, got {warmup_steps}')
  if name == 'cosine' and num_steps <= warmup_steps:
    raise ValueError(
      f"schedule 'cosine' needs num_steps above warmup_steps = {warmup_steps}, "
      f'got {num_steps}'
    )
  return SCHEDULES[name](learning_rate, warmup_steps, num_steps)


def decay_mask(params: Params) -> Params:
  """Returns which leaves weight decay acts on: all but norms and biases.

  Names tell, as a stacked scale has the rank of a matrix.
  """

  def decays(path: jax.tree_util.KeyPath, leaf: jax.Array) -> bool:
    del leaf
    name = jax.tree_util.keystr(path)
    return 'norm' not in name and 'bias' not in name

  return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(
  *,
  learning_rate: float,
  b1: float = 0.9,
  b2: float = 0.95,
  epsilon: float = 1e-8,
  weight_decay: float = 0.0,
  clip_norm: float = 1.0,
  schedule: str = 'constant',
  warmup_steps: int = 0,
  num_steps: int = 0,
) -> optax.GradientTransformation:
  """Returns clipping by global norm followed by AdamW.

  Args:
    learning_rate: peak learning rate.
    b1: decay of the first moment, in [0, 1).
    b2: decay of the second moment, in [0, 1).
    epsilon: added to the root of the second moment, above 0.
    weight_decay: decoupled, times the learning rate; norms and biases
      are exempt.
    clip_norm: largest global norm of a gradient; `math.inf` never clips.
    schedule: a key of `SCHEDULES`.
    warmup_steps: see `learning_rate_schedule`.
    num_steps: see `learning_rate_schedule`; 'constant' ignores it.

  Raises:
    ValueError: if a value is out of its range.
  """
  for name, value in (('b1', b1), ('b2', b2)):
    if not 0 <= value < 1:
      raise ValueError(f'{name} must be in [0, 1), got {value}')
  for name, value in (('epsilon', epsilon), ('clip_norm', clip_norm)):
    if not value > 0:
      raise ValueError(f'{name} must be above 0, got {value}')
  if not (math.isfinite(weight_decay) and weight_decay >= 0):
    raise ValueError(f'weight_decay must be 0 or more, got {weight_decay}')
  rate = learning_rate_schedule(
    schedule,
    learning_rate=learning_rate,
    warmup_steps=warmup_steps,
    num_steps=num_steps,
  )
  adamw = optax.adamw(
    rate,
    b1=b1,
    b2=b2,
    eps=epsilon,
    weight_decay=weight_decay,
    mask=decay_mask,
  )
  if math.isinf(clip_norm):
    return adamw
  return optax.chain(optax.clip_by_global_norm(clip_norm), adamw)

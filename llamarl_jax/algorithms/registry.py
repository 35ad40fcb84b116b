"""What can be chosen by name, and how a name and plain numbers become a loss.

The makers check their arguments at once, so that a bad value is reported before
anything is traced or started.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import functools
import inspect
from typing import Any

from llamarl_jax.algorithms import advantages
from llamarl_jax.algorithms import aipo
from llamarl_jax.algorithms import baselines
from llamarl_jax.algorithms import grpo
from llamarl_jax.algorithms import ppo
from llamarl_jax.algorithms import reductions
from llamarl_jax.algorithms import regularizers
from llamarl_jax.types import AdvantageFn
from llamarl_jax.types import LossFn
from llamarl_jax.types import LossOutput

LOSSES: Mapping[str, Callable[..., LossOutput]] = {
  'aipo': aipo.aipo_loss,
  'ppo': ppo.ppo_loss,
  'decoupled_ppo': ppo.decoupled_ppo_loss,
  'grpo': grpo.grpo_loss,
  'decoupled_grpo': grpo.decoupled_grpo_loss,
  'reinforce': baselines.reinforce_loss,
  'plain_ppo': baselines.plain_ppo_loss,
  'plain_grpo': baselines.plain_grpo_loss,
}

# Those that read `proximal_log_probs`. It must be filled in where a batch makes
# more than one update, and may be None where it makes one.
NEEDS_PROXIMAL = frozenset(
  {'decoupled_ppo', 'decoupled_grpo', 'plain_ppo', 'plain_grpo'}
)


def make_loss(
  name: str,
  *,
  max_importance_ratio: float,
  clip_low: float,
  clip_high: float,
  reduction: str | None = None,
  constant_length: int = 0,
  kl_estimator: str = 'k3',
  kl_coefficient: float = 0.0,
) -> LossFn:
  """Returns the named loss, bound to those of the numbers that it takes.

  Args:
    name: a key of LOSSES.
    max_importance_ratio: rho, above 0.
    clip_low: width of the trust region below 1, above 0 and at most 1.
    clip_high: width of the trust region above 1, above 0.
    reduction: a key of REDUCTIONS; None takes the loss's own.
    constant_length: tokens that stand for a sequence; read by 'constant'.
    kl_estimator: a key of KL_ESTIMATORS.
    kl_coefficient: weight of the KL penalty; 0 leaves it out, and then no
      reference log-probs are needed.

  Raises:
    ValueError: if a name is not known or a number is out of its range.
  """
  _check_known('loss', name, LOSSES)
  _check_known('kl_estimator', kl_estimator, regularizers.KL_ESTIMATORS)
  _check_range(
    'max_importance_ratio',
    max_importance_ratio,
    max_importance_ratio > 0,
    '> 0',
  )
  _check_range('clip_low', clip_low, 0 < clip_low <= 1, '> 0 and <= 1')
  _check_range('clip_high', clip_high, clip_high > 0, '> 0')
  _check_range('kl_coefficient', kl_coefficient, kl_coefficient >= 0, '>= 0')
  function = LOSSES[name]
  accepted = inspect.signature(function).parameters
  if reduction is None:
    reduction_fn = accepted['reduction_fn'].default
  else:
    reduction_fn = make_reduction(reduction, constant_length=constant_length)
  settings = {
    'max_importance_ratio': max_importance_ratio,
    'clip_low': clip_low,
    'clip_high': clip_high,
    'reduction_fn': reduction_fn,
  }
  loss_fn = functools.partial(
    function,
    **{key: value for key, value in settings.items() if key in accepted},
  )
  if kl_coefficient == 0:
    return loss_fn
  return regularizers.with_kl(
    loss_fn,
    estimator_fn=regularizers.KL_ESTIMATORS[kl_estimator],
    coefficient=kl_coefficient,
    reduction_fn=reduction_fn,
  )


def make_reduction(
  name: str, *, constant_length: int = 0
) -> reductions.ReductionFn:
  """Returns the named reduction.

  Args:
    name: a key of REDUCTIONS.
    constant_length: read by 'constant', and then at least 1.

  Raises:
    ValueError: if the name is not known or the length is out of its range.
  """
  _check_known('reduction', name, reductions.REDUCTIONS)
  function = reductions.REDUCTIONS[name]
  if 'constant_length' not in inspect.signature(function).parameters:
    return function
  _check_range('constant_length', constant_length, constant_length >= 1, '>= 1')
  return functools.partial(function, constant_length=constant_length)


def make_advantage(
  name: str, *, normalize_std: bool = False, epsilon: float = 1e-6
) -> AdvantageFn:
  """Returns the named advantage function.

  Args:
    name: a key of ADVANTAGES.
    normalize_std: divide by the standard deviation of the group.
    epsilon: added to the standard deviation, above 0.

  Raises:
    ValueError: if the name is not known or epsilon is not above 0.
  """
  _check_known('advantage', name, advantages.ADVANTAGES)
  _check_range('epsilon', epsilon, epsilon > 0, '> 0')
  return functools.partial(
    advantages.ADVANTAGES[name], normalize_std=normalize_std, epsilon=epsilon
  )


def _check_known(what: str, name: str, known: Iterable[str]) -> None:
  if name not in set(known):
    raise ValueError(
      f'unknown {what} {name!r}: choose one of {", ".join(sorted(known))}'
    )


def _check_range(what: str, value: Any, is_valid: bool, wanted: str) -> None:
  if not is_valid:
    raise ValueError(f'{what} must be {wanted}, got {value!r}')

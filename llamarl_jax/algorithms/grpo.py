"""GRPO: PPO's surrogate, each sequence weighing alike.

What else makes it GRPO is chosen elsewhere: advantages normalized over the
group (`advantages.group_mean`) and a KL penalty (`regularizers.with_kl`).
https://arxiv.org/abs/2402.03300
"""

import jax

from llamarl_jax.algorithms import ppo
from llamarl_jax.algorithms import reductions
from llamarl_jax.types import LossOutput
from llamarl_jax.types import Trajectories


def grpo_loss(
  log_probs: jax.Array,
  batch: Trajectories,
  *,
  clip_low: float,
  clip_high: float,
  reduction_fn: reductions.ReductionFn = reductions.sequence_reduction,
) -> LossOutput:
  """Returns `ppo.ppo_loss`, as a mean over sequences of their means.

  Args:
    log_probs: f32[R, T], of the policy that is trained.
    batch: as `ppo.ppo_loss` reads it.
    clip_low: width of the trust region below 1.
    clip_high: width of the trust region above 1.
    reduction_fn: weighs the tokens.
  """
  return ppo.ppo_loss(
    log_probs,
    batch,
    clip_low=clip_low,
    clip_high=clip_high,
    reduction_fn=reduction_fn,
  )


def decoupled_grpo_loss(
  log_probs: jax.Array,
  batch: Trajectories,
  *,
  max_importance_ratio: float,
  clip_low: float,
  clip_high: float,
  reduction_fn: reductions.ReductionFn = reductions.sequence_reduction,
) -> LossOutput:
  """Returns `ppo.decoupled_ppo_loss`, as a mean over sequences of their means.

  Args:
    log_probs: f32[R, T], of the policy that is trained.
    batch: as `ppo.decoupled_ppo_loss` reads it.
    max_importance_ratio: rho, the limit on proximal / behavior.
    clip_low: width of the trust region below 1.
    clip_high: width of the trust region above 1.
    reduction_fn: weighs the tokens.
  """
  return ppo.decoupled_ppo_loss(
    log_probs,
    batch,
    max_importance_ratio=max_importance_ratio,
    clip_low=clip_low,
    clip_high=clip_high,
    reduction_fn=reduction_fn,
  )

"""The train state: how it starts, and where its leaves live on a mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from llamarl_jax.types import Params
from llamarl_jax.types import TrainState


def init_train_state(
  params: Params, optimizer: optax.GradientTransformation
) -> TrainState:
  """Returns the state before the first batch.

  Args:
    params: float32 master weights. They are copied: a train step donates its
      state, and the caller may have other uses for them.
    optimizer: the chain that will update them.
  """
  return TrainState(
    params=jax.tree.map(jnp.copy, params),
    opt_state=optimizer.init(params),
    batches_consumed=jnp.zeros((), jnp.int32),
    skipped_steps=jnp.zeros((), jnp.int32),
  )


def train_state_shardings(
  params: Params,
  optimizer: optax.GradientTransformation,
  param_shardings: Params,
  replicated: Any,
) -> TrainState:
  """Returns a tree of shardings in the shape of the train state.

  Optimizer moments live where their parameter lives; counters are replicated.

  Args:
    params: arrays or `jax.ShapeDtypeStruct`s.
    optimizer: the chain that will update them.
    param_shardings: a sharding for each leaf of `params`.
    replicated: the `Sharding` of scalars, on the same mesh.
  """
  abstract = jax.eval_shape(lambda p: init_train_state(p, optimizer), params)
  return TrainState(
    params=param_shardings,
    opt_state=optax.tree.map_params(
      optimizer,
      lambda _, sharding: sharding,
      abstract.opt_state,
      param_shardings,
      transform_non_params=lambda _: replicated,
    ),
    batches_consumed=replicated,
    skipped_steps=replicated,
  )


def abstract_train_state(
  params: Params,
  optimizer: optax.GradientTransformation,
  shardings: TrainState,
) -> TrainState:
  """Returns the state as `jax.ShapeDtypeStruct`s, for restoring into.

  Args:
    params: arrays or `jax.ShapeDtypeStruct`s.
    optimizer: the chain that will update them.
    shardings: from `train_state_shardings`.
  """
  abstract = jax.eval_shape(lambda p: init_train_state(p, optimizer), params)
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding
    ),
    abstract,
    shardings,
  )

"""The train state: how it starts, and where its leaves live on a mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.models import lora
from llamarl_jax.sharding import offload
from llamarl_jax.sharding import rules
from llamarl_jax.types import Params
from llamarl_jax.types import TrainState


def init_train_state(
  params: Params, optimizer: optax.GradientTransformation
) -> TrainState:
  """Returns the state before the first batch.

  There is optimizer state for what `lora.split_trainable` says is trained.

  Args:
    params: float32 master weights. They are copied: a train step donates its
      state, and the caller may have other uses for them.
    optimizer: the chain that will update them.
  """
  return TrainState(
    params=jax.tree.map(jnp.copy, params),
    opt_state=optimizer.init(lora.split_trainable(params)[0]),
    batches_consumed=jnp.zeros((), jnp.int32),
    skipped_steps=jnp.zeros((), jnp.int32),
  )


def train_state_shardings(
  params: Params,
  optimizer: optax.GradientTransformation,
  param_shardings: Params,
  replicated: Any,
  *,
  offload_optimizer: bool = False,
) -> TrainState:
  """Returns a tree of shardings in the shape of the train state.

  Optimizer moments live where their parameter lives; counters are replicated.

  Args:
    params: arrays or `jax.ShapeDtypeStruct`s.
    optimizer: the chain that will update them.
    param_shardings: a sharding for each leaf of `params`.
    replicated: the `Sharding` of scalars, on the same mesh.
    offload_optimizer: whether the moments rest in the memory of the host, and
      come to the devices for the update alone.

  Raises:
    ValueError: they are to rest there, and the devices cannot read it.
  """
  abstract = jax.eval_shape(lambda p: init_train_state(p, optimizer), params)
  return TrainState(
    params=param_shardings,
    opt_state=optax.tree.map_params(
      optimizer,
      lambda _, sharding: (
        offload.on_host(sharding) if offload_optimizer else sharding
      ),
      abstract.opt_state,
      lora.split_trainable(param_shardings)[0],
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


def plan_train_state(
  config: config_lib.LlamaConfig,
  optimizer: optax.GradientTransformation,
  mesh: rules.AnyMesh,
  *,
  offload_optimizer: bool = False,
) -> TrainState:
  """Returns the state of a trainer as `jax.ShapeDtypeStruct`s.

  Args:
    config: of the model that is trained.
    optimizer: the chain that will update it.
    mesh: where it will live; may be abstract, of devices that are not there.
    offload_optimizer: see `train_state_shardings`.
  """
  specs = llama.abstract_params(config)
  param_shardings, _ = rules.shardings(specs, mesh, rules.TRAINER_RULES)
  params = jax.tree.map(
    lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs
  )
  shardings = train_state_shardings(
    params,
    optimizer,
    param_shardings,
    rules.replicated(mesh),
    offload_optimizer=offload_optimizer,
  )
  return abstract_train_state(params, optimizer, shardings)

"""The workloads as this project's own train step takes them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import workload as workload_lib
from llamarl_jax.algorithms import baselines
from llamarl_jax.checkpoints import hf_tensors
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.sharding import spec
from llamarl_jax.training import batching
from llamarl_jax.training import optimizer as optimizer_lib
from llamarl_jax.training import scoring
from llamarl_jax.training import state as state_lib
from llamarl_jax.training import step as step_lib
from llamarl_jax.types import LossOutput
from llamarl_jax.types import Params
from llamarl_jax.types import TrainState
from llamarl_jax.types import Trajectories


def llama_config(workload: workload_lib.Workload) -> config_lib.LlamaConfig:
  """Returns the config of the workload's model."""
  return config_lib.LlamaConfig(
    vocab_size=workload.vocab_size,
    width=workload.width,
    num_layers=workload.num_layers,
    num_heads=workload.num_heads,
    num_kv_heads=workload.num_kv_heads,
    head_dim=workload.head_dim,
    mlp_width=workload.mlp_width,
    rope_theta=workload.rope_theta,
    norm_epsilon=workload.norm_epsilon,
    tie_embeddings=True,
  )


def load_params(workload: workload_lib.Workload) -> Params:
  """Returns the workload's weights in this project's layout."""
  config = llama_config(workload)
  abstract = llama.abstract_params(config)
  leaves = {
    name: np.empty(leaf.shape, leaf.dtype)
    for name, leaf in spec.named_leaves(abstract).items()
  }
  places = {place.name: place for place in hf_tensors.places(config)}
  for name, value in workload_lib.weights(workload):
    place = places[name]
    value = value.reshape(place.view).transpose(place.order)
    leaves[place.leaf][... if place.layer is None else place.layer] = value
  treedef = jax.tree.structure(abstract)
  return jax.tree.unflatten(treedef, [jnp.asarray(x) for x in leaves.values()])


def load_batch(workload: workload_lib.Workload) -> Trajectories:
  """Returns the workload's batch, on the device."""
  tokens, advantages = workload_lib.batch(workload)
  rows = batching.empty_rows(*tokens.shape, pad_token=0)
  for i, row in enumerate(tokens):
    where = batching.place_sequence(
      rows, i, row[: workload.prompt], row[workload.prompt :]
    )
    rows.advantages[i, where] = advantages[i]
  return jax.device_put(rows)


def make_optimizer() -> optax.GradientTransformation:
  """Returns the optimizer of all workloads."""
  return optimizer_lib.make_optimizer(
    learning_rate=workload_lib.LEARNING_RATE,
    b1=workload_lib.B1,
    b2=workload_lib.B2,
    epsilon=workload_lib.EPSILON,
    weight_decay=workload_lib.WEIGHT_DECAY,
    clip_norm=workload_lib.CLIP_NORM,
  )


def load_state(workload: workload_lib.Workload) -> TrainState:
  """Returns the train state before the first step."""
  return state_lib.init_train_state(load_params(workload), make_optimizer())


def make_train_step(workload: workload_lib.Workload) -> step_lib.TrainStepFn:
  """Returns the train step, as the trainer makes it."""
  return step_lib.make_train_step(
    llama_config(workload),
    baselines.reinforce_loss,
    make_optimizer(),
    temperature=1.0,
    max_completion=workload.completion,
  )


def loss(
  workload: workload_lib.Workload, params: Params, batch: Trajectories
) -> jax.Array:
  """Returns the loss as the train step computes it, f32[]."""
  log_probs, _ = scoring.policy_log_probs(
    llama_config(workload),
    params,
    batch,
    temperature=1.0,
    max_completion=workload.completion,
  )
  output: LossOutput = baselines.reinforce_loss(log_probs, batch)
  return output.loss.value()

"""The trainer: turns scored groups into updates, and publishes the result.

It owns the master parameters, the optimizer state and the checkpoints.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from llamarl_jax import types
from llamarl_jax.algorithms import registry
from llamarl_jax.channels import registry as channels
from llamarl_jax.channels import weights
from llamarl_jax.checkpoints import run_policy
from llamarl_jax.checkpoints import run_state
from llamarl_jax.executors import adapters
from llamarl_jax.executors import policy
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.scheduling import admission
from llamarl_jax.sharding import digest
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import rules
from llamarl_jax.training import batching
from llamarl_jax.training import facts as facts_lib
from llamarl_jax.training import optimizer as optimizer_lib
from llamarl_jax.training import packing
from llamarl_jax.training import scoring
from llamarl_jax.training import state as state_lib
from llamarl_jax.training import step as step_lib
from llamarl_jax.training import supervised


@dataclasses.dataclass(frozen=True)
class TrainerSettings:
  """Plain settings of a trainer.

  Attributes:
    source: the model and its first parameters.
    mesh: sizes of the axes data, fsdp, sequence and tensor.
    loss: arguments of `registry.make_loss`.
    advantage: arguments of `registry.make_advantage`.
    optimizer: arguments of `optimizer.make_optimizer`.
    supervised_optimizer: likewise, for supervised steps.
    temperature: of the softmax the completions were sampled from.
    max_new_tokens: tokens of the longest completion.
    pad_token: token id that fills rows.
    num_micro_batches: forward and backward passes an update, where rows are
      not packed.
    num_minibatches: updates a batch.
    layout: how sequences become rows.
    computation: how the policy is computed.
    group_size: completions a problem (G).
    checkpoints: folder of this run's checkpoints.
    keep_checkpoints: how many of the newest to keep.
    transport: name of the weight transport.
    transport_settings: of that transport.
    reference_folder: where the first policy is kept for a reference executor;
      empty where there is none.
    offload_optimizer: whether optimizer state rests in host memory.
    lora: adapters to train in place of the weights; None trains the weights.
    quantization: of what is published, a key of `quantization.DTYPES`; empty
      publishes what is trained.
    max_token_age: versions behind the batch, from which on tokens are left out
      of the loss; 0 = none are.
  """

  source: policy.PolicySource
  mesh: Mapping[str, int]
  loss: Mapping[str, Any]
  advantage: Mapping[str, Any]
  optimizer: Mapping[str, Any]
  supervised_optimizer: Mapping[str, Any]
  temperature: float
  max_new_tokens: int
  pad_token: int
  num_micro_batches: int
  num_minibatches: int
  layout: packing.Layout
  computation: scoring.Computation
  group_size: int
  checkpoints: str
  keep_checkpoints: int
  transport: str
  transport_settings: weights.TransportSettings
  reference_folder: str
  offload_optimizer: bool = False
  lora: config_lib.LoRAConfig | None = None
  quantization: str = ''
  max_token_age: int = 0


class TrainerExecutor:
  """Consumes batches of scored groups; see `types.Executor`."""

  def __init__(
    self, *, devices: Sequence[jax.Device], settings: TrainerSettings
  ):
    self._settings = settings
    self._mesh = mesh_lib.make_mesh(settings.mesh, devices)
    model = dataclasses.replace(settings.source.model, lora=settings.lora)
    self._model = model
    specs = llama.abstract_params(model)
    self._param_shardings, _ = rules.shardings(
      specs, self._mesh, rules.TRAINER_RULES
    )
    self._abstract_params = jax.tree.map(
      lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs
    )
    self._merge, self._published = (
      adapters.make_published(model, self._mesh, rules.TRAINER_RULES, kind)
      for kind in ('', settings.quantization)
    )
    self._optimizer = optimizer_lib.make_optimizer(**settings.optimizer)
    self._state_shardings = self._shardings(self._optimizer)
    self._advantage_fn = jax.jit(registry.make_advantage(**settings.advantage))
    self._train_step = make_step(
      settings, model, self._optimizer, self._state_shardings
    )
    self._supervised: tuple[step_lib.TrainStepFn, types.TrainState] | None = (
      None
    )
    self._checkpointer = run_state.RunStateCheckpointer(
      settings.checkpoints, keep=settings.keep_checkpoints
    )
    self._publisher = channels.TRANSPORTS[settings.transport].publisher(
      settings.transport_settings
    )
    self._incarnation = 0
    self._trained = admission.Trained()
    self._state = self._first_state()

  def step(
    self, inputs: Sequence[types.Group], commit_version: types.Version | None
  ) -> types.StepReport:
    """Consumes one batch; the parameters are one version newer then.

    Args:
      inputs: the N scored groups of the batch, in admission order.
      commit_version: not used: the trainer makes versions.
    """
    del commit_version
    start = time.time()
    settings = self._settings
    version = self.version().batches
    rewards, valid = facts_lib.group_rewards(inputs)
    advantages = jax.device_get(self._advantage_fn(rewards, valid))
    plan, row_length = batching.plan_rows(inputs, settings.layout)
    rows = batching.build_trajectories(
      inputs,
      advantages,
      row_length=row_length,
      pad_token=settings.pad_token,
      share_prompts=settings.layout.share_prompts,
      plan=plan,
    )
    facts: dict[str, Any] = dict(
      facts_lib.batch_facts(inputs, advantages, version)
    )
    if settings.max_token_age:
      rows, facts['too_old_fraction'] = batching.mask_old_tokens(
        rows, version, settings.max_token_age
      )
    batch = jax.device_put(rows, rules.batch_sharding(self._mesh))
    self._state, metrics = self._train_step(self._state, batch)
    self._trained = self._trained.add(
      group.request.admission_index for group in inputs
    )
    values = {k: float(v) for k, v in jax.device_get(metrics).items()}
    values |= _effective_sample_size(values)
    if not values.get('fresh_fraction'):
      values.pop('log_prob_gap_fresh', None)
    facts['real_token_fraction'] = packing.real_token_fraction(rows.segment_ids)
    facts['staleness_counts'] = facts_lib.staleness_counts(inputs, version)
    stop = time.time()
    span = types.Span('train_step', start, stop, {'version': version})
    return types.StepReport(
      types.Status.PROGRESSED,
      metrics={**values, **facts, 'train_seconds': stop - start},
      spans=[span],
    )

  def supervise(
    self, examples: Sequence[tuple[Sequence[int], Sequence[int]]]
  ) -> types.StepReport:
    """Makes one supervised update; its optimizer state is kept apart.

    Args:
      examples: (prompt tokens, completion tokens); as many in every call.
    """
    start = time.time()
    settings = self._settings
    limit = settings.max_new_tokens
    longest = max(len(answer) for _, answer in examples)
    if longest > limit:
      raise ValueError(
        f'an answer of {longest} tokens exceeds generator.max_new_tokens='
        f'{limit}; raise it'
      )
    step, state = self._supervised or self._start_supervised()
    rows = supervised.supervised_trajectories(
      examples,
      layout=dataclasses.replace(settings.layout, num_minibatches=1),
      pad_token=settings.pad_token,
    )
    batch = jax.device_put(rows, rules.batch_sharding(self._mesh))
    state, metrics = step(state, batch)
    self._supervised = (step, state)
    self._state = dataclasses.replace(self._state, params=state.params)
    values = {k: float(v) for k, v in jax.device_get(metrics).items()}
    span = types.Span('supervised_step', start, time.time())
    return types.StepReport(
      types.Status.PROGRESSED, metrics=values, spans=[span]
    )

  def _start_supervised(
    self,
  ) -> tuple[step_lib.TrainStepFn, types.TrainState]:
    """Returns the supervised step and a state with optimizer state anew."""
    optimizer = optimizer_lib.make_optimizer(
      **self._settings.supervised_optimizer
    )
    shardings = self._shardings(optimizer)
    layout = self._settings.layout
    step = supervised.make_supervised_step(
      self._model,
      optimizer,
      max_completion=layout.pack_tokens or self._settings.max_new_tokens,
      num_micro_batches=_packed_micro_batches(layout) or 1,
      computation=self._settings.computation,
      state_shardings=shardings,
    )
    return step, self._initial(self._state.params, optimizer, shardings)

  def resume(self) -> types.Version:
    """Continues from the newest checkpoint of this run, if there is one."""
    step = self._checkpointer.latest_step()
    if step is not None:
      self.restore({'step': step})
    return self.version()

  def version(self) -> types.Version:
    """Returns the version of the parameters."""
    return types.Version(self._incarnation, int(self._state.batches_consumed))

  def trained(self) -> admission.Trained:
    """Returns which groups the parameters were trained on."""
    return self._trained

  def publish(self) -> types.StepReport:
    """Pins a copy of the parameters, to be offered to replicas."""
    start = time.time()
    self._supervised = None
    version = self.version()
    params = self._published(self._state.params)
    self._publisher.publish(types.VersionedParams(version, params))
    span = types.Span(
      'publish', start, time.time(), {'version': version.batches}
    )
    return types.StepReport(types.Status.PROGRESSED, spans=[span])

  def offer(self, destination: weights.Destination) -> weights.Manifest:
    """Returns what a replica needs to fetch the published version."""
    return self._publisher.offer(destination)

  def save(self) -> types.StepReport:
    """Writes a checkpoint of the train state, unless this one is there."""
    start = time.time()
    version = self.version()
    if self._checkpointer.latest_step() != version.batches:
      metadata = {
        'incarnation': self._incarnation,
        'trained': self._trained.state(),
        **run_policy.lora_metadata(self._model),
      }
      self._checkpointer.save(version.batches, self._state, metadata)
    span = types.Span(
      'checkpoint', start, time.time(), {'version': version.batches}
    )
    return types.StepReport(types.Status.PROGRESSED, spans=[span])

  def save_reference(self) -> None:
    """Keeps the parameters as those of the reference policy."""
    checkpointer = run_state.RunStateCheckpointer(
      self._settings.reference_folder
    )
    bare = dataclasses.replace(
      self._state, params=self._merge(self._state.params), opt_state=()
    )
    checkpointer.save(self.version().batches, bare, {})
    checkpointer.close()

  def digest(self) -> str:
    """Returns a digest of what is published, independent of its sharding."""
    return digest.params_digest(self._published(self._state.params))

  def state(self) -> Mapping[str, Any]:
    """Returns where the state of this version lies on disk."""
    self.save()
    return {'step': self.version().batches}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continues from a checkpoint of this run, as a new incarnation."""
    abstract = state_lib.abstract_train_state(
      self._abstract_params, self._optimizer, self._state_shardings
    )
    step = state['step']
    run_policy.check_lora(self._model, self._checkpointer.metadata(step))
    self._state, metadata = self._checkpointer.restore(abstract, step)
    self._incarnation = metadata['incarnation'] + 1
    self._trained = admission.Trained.restore(metadata['trained'])

  def close(self) -> None:
    """Closes publisher and checkpoints."""
    self._publisher.close()
    self._checkpointer.close()

  def _first_state(self) -> types.TrainState:
    params = adapters.load(
      self._settings.source, self._settings.lora, self._param_shardings
    )
    return self._initial(params, self._optimizer, self._state_shardings)

  def _initial(
    self,
    params: types.Params,
    optimizer: Any,
    shardings: types.TrainState,
  ) -> types.TrainState:
    """Returns a state of version 0 that shares no buffer with `params`."""
    initialize = jax.jit(
      lambda p: state_lib.init_train_state(
        jax.tree.map(jnp.copy, p), optimizer
      ),
      out_shardings=shardings,
    )
    return initialize(params)

  def _shardings(self, optimizer: Any) -> types.TrainState:
    return state_lib.train_state_shardings(
      self._abstract_params,
      optimizer,
      self._param_shardings,
      rules.replicated(self._mesh),
      offload_optimizer=self._settings.offload_optimizer,
    )


def make_step(
  settings: TrainerSettings,
  model: config_lib.LlamaConfig,
  optimizer: optax.GradientTransformation,
  state_shardings: types.TrainState,
) -> step_lib.TrainStepFn:
  """Returns the train step of a trainer; its mesh may be abstract.

  Args:
    settings: of the trainer.
    model: that of the settings, with its adapters.
    optimizer: made from the settings.
    state_shardings: of the train state.
  """
  layout = settings.layout
  row_completions = settings.group_size if layout.share_prompts else 1
  return step_lib.make_train_step(
    model,
    registry.make_loss(**settings.loss),
    optimizer,
    temperature=settings.temperature,
    max_completion=layout.pack_tokens
    or settings.max_new_tokens * row_completions,
    num_micro_batches=_packed_micro_batches(layout)
    or settings.num_micro_batches,
    num_minibatches=settings.num_minibatches,
    recompute_proximal=settings.loss['name'] in registry.NEEDS_PROXIMAL,
    computation=settings.computation,
    state_shardings=state_shardings,
  )


def _packed_micro_batches(layout: packing.Layout) -> step_lib.CountFn | None:
  """Returns how many micro-batches packed rows make; None if none are."""
  if not layout.pack_tokens:
    return None
  return functools.partial(packing.num_micro_batches, layout=layout)


def _effective_sample_size(values: Mapping[str, float]) -> dict[str, float]:
  """Returns (mean of ratios) ** 2 / mean of squares: 1 on-policy, 0 worst."""
  square = values.get('importance_ratio_squared', 0.0)
  if not square > 0:
    return {}
  return {'effective_sample_size': values['importance_ratio'] ** 2 / square}

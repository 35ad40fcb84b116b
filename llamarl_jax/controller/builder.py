"""The door: reads a config once and gives plain parts to everything behind it.

Nothing here starts a process or touches a device, so that every fault of a
config, a model file or a problem file shows before anything runs.
"""

from collections.abc import Callable
import dataclasses
import pathlib
from typing import Any

import ml_collections

from llamarl_jax import types
from llamarl_jax.algorithms import registry
from llamarl_jax.channels import registry as channels
from llamarl_jax.channels import weights
from llamarl_jax.controller import checks
from llamarl_jax.controller import memory_notes
from llamarl_jax.controller import problems
from llamarl_jax.controller import program as program_lib
from llamarl_jax.controller import tails
from llamarl_jax.executors import generator
from llamarl_jax.executors import reference
from llamarl_jax.executors import reward
from llamarl_jax.executors import trainer
from llamarl_jax.models import catalog
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.models import quantization
from llamarl_jax.scheduling import admission
from llamarl_jax.training import optimizer
from llamarl_jax.training import packing
from llamarl_jax.training import scoring


@dataclasses.dataclass(frozen=True)
class Plan:
  """Everything a run is made of, checked and not yet started.

  Attributes:
    program: executors and channels.
    rule: of admission.
    task: problems as requests.
    transport: name of the weight transport in use.
    capacity: completions a generator replica may hold at a time.
    make_request: gives the training request of an admission index.
  """

  program: program_lib.Program
  rule: admission.AdmissionRule
  task: problems.Task
  transport: str
  capacity: int
  make_request: Callable[[int], types.Request]


def build(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> Plan:
  """Returns the plan of a run.

  Args:
    config: as in configs/base.py.
    workdir: where the run writes; nothing is written yet.

  Raises:
    ValueError: the config or one of its files is at fault; says which field
      or line, and the remedy.
    FileNotFoundError: a file is missing; says how to get it.
  """
  checks.check_config(config)
  model = problems.load_model(config)
  catalog.check(config.model.architecture, model.source.model)
  task = problems.make_task(config, model)
  plan = generator.cache_plan(generator_settings(config, model))
  program = make_program(config, model, workdir)
  return Plan(
    program=program,
    rule=admission.make_rule(
      config.batch_order,
      config.batch_size,
      config.num_steps,
      config.max_staleness,
    ),
    task=task,
    transport=_transport(config),
    capacity=_capacity(config, plan.num_slots),
    make_request=_make_request(config, task),
  )


def _make_request(
  config: ml_collections.ConfigDict, task: problems.Task
) -> Callable[[int], types.Request]:
  tail = tails.LongTail(
    config.seed, config.generator.tail_share, checks.longest_completion(config)
  )
  return lambda index: tail.apply(task.training_request(index))


def _capacity(config: ml_collections.ConfigDict, num_slots: int) -> int:
  """Returns the completions that a replica may hold at a time.

  A single replica has a second round waiting, which fills slots as they fall
  free. Several would take work from each other if they held that much: one
  group is enough for its prompt to be read ahead.
  """
  size = config.group_size
  if config.generator.num_replicas == 1:
    return max(2 * num_slots, size)
  return num_slots + size


def make_program(
  config: ml_collections.ConfigDict,
  model: problems.Model,
  workdir: pathlib.Path,
) -> program_lib.Program:
  """Returns executors and channels of a run; reads no file.

  Args:
    config: checked by `checks.check_config`.
    model: that of the config.
    workdir: where the run will write.

  Raises:
    ValueError: a loss, an advantage or an optimizer refuses its settings.
  """
  transport = _transport(config)
  settings = weights.TransportSettings(
    deadline_seconds=config.weights.deadline_seconds,
    directory=str(workdir / 'weights'),
  )
  nodes = [
    _trainer_node(config, model, workdir, transport, settings),
    *(
      _generator_node(config, model, i, transport, settings)
      for i in range(config.generator.num_replicas)
    ),
    _reward_node(config),
  ]
  if config.algorithm.kl_coefficient > 0:
    nodes.append(_reference_node(config, model, workdir))
  program = program_lib.Program(
    nodes=nodes,
    edges=_edges(config, model.source.model, transport),
    notes=memory_notes.notes(
      config, model.source.model, generator_settings(config, model)
    ),
  )
  program.validate()
  return program


def _transport(config: ml_collections.ConfigDict) -> str:
  if config.launcher.name == 'local' and config.weights.transport == 'transfer':
    return 'device_put'
  return channels.select_transport(config.weights.transport).name


def _loss_arguments(config: ml_collections.ConfigDict) -> dict[str, Any]:
  algorithm = config.algorithm
  return {
    'name': algorithm.loss,
    'max_importance_ratio': algorithm.max_importance_ratio,
    'clip_low': algorithm.clip_low,
    'clip_high': algorithm.clip_high,
    'reduction': algorithm.reduction,
    'constant_length': checks.longest_completion(config),
    'kl_estimator': algorithm.kl_estimator,
    'kl_coefficient': algorithm.kl_coefficient,
  }


def _trainer_node(
  config: ml_collections.ConfigDict,
  model: problems.Model,
  workdir: pathlib.Path,
  transport: str,
  settings: weights.TransportSettings,
) -> program_lib.Node:
  c = config.trainer
  advantage = {
    'name': config.algorithm.advantage,
    'normalize_std': config.algorithm.normalize_advantage,
  }
  shared = {
    'b1': c.b1,
    'b2': c.b2,
    'epsilon': c.epsilon,
    'weight_decay': c.weight_decay,
    'clip_norm': c.clip_norm,
  }
  update = {
    'learning_rate': c.learning_rate,
    'schedule': c.schedule,
    'warmup_steps': c.warmup_steps,
    'num_steps': config.num_steps * c.num_minibatches,
    **shared,
  }
  supervised_update = {
    'learning_rate': config.supervised.learning_rate,
    'warmup_steps': config.supervised.warmup_steps,
    **shared,
  }
  # Made here only to be checked: the trainer makes its own.
  registry.make_loss(**_loss_arguments(config))
  registry.make_advantage(**advantage)
  optimizer.make_optimizer(**update)
  optimizer.make_optimizer(**supervised_update)
  mesh = checks.trainer_mesh(config)
  return program_lib.Node(
    name='trainer',
    role='trainer',
    factory=trainer.TrainerExecutor,
    arguments={
      'settings': trainer.TrainerSettings(
        source=model.source,
        mesh=mesh,
        loss=_loss_arguments(config),
        advantage=advantage,
        optimizer=update,
        supervised_optimizer=supervised_update,
        temperature=config.generator.temperature,
        max_new_tokens=checks.longest_completion(config),
        pad_token=model.tokenizer.pad_id,
        num_micro_batches=checks.num_micro_batches(config),
        num_minibatches=c.num_minibatches,
        layout=_layout(config),
        computation=_computation(config),
        group_size=config.group_size,
        checkpoints=str(workdir / 'checkpoints'),
        keep_checkpoints=c.keep_checkpoints,
        transport=transport,
        transport_settings=settings,
        reference_folder=str(workdir / 'reference'),
        offload_optimizer=c.offload_optimizer,
        lora=checks.lora(config),
        quantization=config.generator.quantization,
        max_token_age=config.max_token_age,
      )
    },
    num_devices=c.num_devices,
    mesh=mesh,
  )


def _layout(config: ml_collections.ConfigDict) -> packing.Layout:
  c = config.trainer
  return packing.Layout(
    length_multiple=c.length_multiple,
    share_prompts=c.share_prompts,
    pack_tokens=c.pack_tokens,
    pack_rows=c.pack_rows,
    num_minibatches=c.num_minibatches,
    num_shards=c.data * c.fsdp,
  )


def _computation(config: ml_collections.ConfigDict) -> scoring.Computation:
  c = config.trainer
  return scoring.Computation(
    dtype=c.compute_dtype,
    remat=c.remat,
    attention=c.attention,
    max_logits_bytes=c.max_logits_bytes,
  )


def generator_settings(
  config: ml_collections.ConfigDict, model: problems.Model
) -> generator.GeneratorSettings:
  """Returns the settings of a generator, as evaluation uses them too."""
  c = config.generator
  return generator.GeneratorSettings(
    model=model.source.model,
    mesh=checks.generator_mesh(config),
    tokenizer=model.tokenizer,
    seed=config.seed,
    num_slots=c.num_slots,
    segment_length=c.segment_length,
    max_prompt_length=c.max_prompt_length,
    max_new_tokens=checks.longest_completion(config),
    compute_dtype=c.compute_dtype or config.trainer.compute_dtype,
    prefill_tokens=c.prefill_tokens,
    cache_bytes=c.cache_bytes,
    cache_dtype=c.cache_dtype,
    refresh_cache=c.refresh_cache,
    max_versions=c.max_versions,
    quantization=c.quantization,
    warm_up=c.warm_up,
  )


def _generator_node(
  config: ml_collections.ConfigDict,
  model: problems.Model,
  index: int,
  transport: str,
  settings: weights.TransportSettings,
) -> program_lib.Node:
  name = f'generator_{index}'
  return program_lib.Node(
    name=name,
    role='generator',
    factory=generator.GeneratorExecutor,
    arguments={
      'name': name,
      'settings': generator_settings(config, model),
      'transport': transport,
      'transport_settings': settings,
    },
    num_devices=config.generator.num_devices,
    mesh=checks.generator_mesh(config),
  )


def _reward_node(config: ml_collections.ConfigDict) -> program_lib.Node:
  return program_lib.Node(
    name='reward',
    role='reward',
    factory=_make_reward,
    arguments=problems.reward_arguments(config),
    num_devices=0,
  )


def _make_reward(devices: object, **arguments: Any) -> reward.RewardExecutor:
  """Makes a reward executor, which has no use for devices."""
  del devices
  return reward.RewardExecutor(**arguments)


def _reference_node(
  config: ml_collections.ConfigDict,
  model: problems.Model,
  workdir: pathlib.Path,
) -> program_lib.Node:
  c = config.generator
  mesh = checks.trainer_mesh(config)
  layout = _layout(config)
  row_completions = config.group_size if layout.share_prompts else 1
  return program_lib.Node(
    name='reference',
    role='reference',
    factory=reference.ReferenceExecutor,
    arguments={
      'settings': reference.ReferenceSettings(
        model=model.source.model,
        mesh=mesh,
        folder=str(workdir / 'reference'),
        temperature=c.temperature,
        max_completion=layout.pack_tokens
        or checks.longest_completion(config) * row_completions,
        pad_token=model.tokenizer.pad_id,
        layout=layout,
        rows=layout.pack_rows
        if layout.pack_tokens
        else config.trainer.micro_batch_size // row_completions,
        computation=_computation(config),
      )
    },
    num_devices=config.trainer.num_devices,
    mesh=mesh,
  )


def _edges(
  config: ml_collections.ConfigDict,
  model: config_lib.LlamaConfig,
  transport: str,
) -> list[program_lib.Edge]:
  """Returns the channels, in the order of the data flow."""
  with_reference = config.algorithm.kl_coefficient > 0
  judge = 'reference' if with_reference else 'reward'
  size = quantization.num_bytes(
    quantization.abstract(
      llama.abstract_params(model), config.generator.quantization
    )
  )
  edges = [
    program_lib.Edge('controller', 'generator', 'SCATTER', 'prompts'),
    program_lib.Edge('generator', 'reward', 'GATHER', 'completions'),
  ]
  if with_reference:
    edges.append(
      program_lib.Edge('reward', 'reference', 'BROADCAST', 'scored groups')
    )
  edges += [
    program_lib.Edge(judge, 'trainer', 'BROADCAST', 'batches'),
    program_lib.Edge(
      'trainer',
      'generator',
      'WEIGHTS',
      f'{transport}, {size / 1e6:.1f} MB a publication and replica',
    ),
  ]
  return edges

"""Checks of a config that need nothing but the config.

Each fault is one error that names the field, its value and the remedy. What
the parts check of themselves (losses, optimizer, problem files, mesh) is left
to them; the builder makes those parts before anything starts.
"""

import math

import ml_collections

from llamarl_jax.executors import generator as generator_lib
from llamarl_jax.models import attention
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import quantization
from llamarl_jax.models import remat
from llamarl_jax.sampling import plan
from llamarl_jax.scheduling import admission

_POSITIVE = (
  'num_steps',
  'batch_size',
  'group_size',
  'reward.num_workers',
  'reward.timeout_seconds',
  'generator.num_replicas',
  'generator.num_slots',
  'generator.segment_length',
  'generator.max_prompt_length',
  'generator.max_new_tokens',
  'generator.prefill_tokens',
  'generator.tail_factor',
  'generator.temperature',
  'generator.num_devices',
  'generator.tensor',
  'trainer.micro_batch_size',
  'trainer.num_minibatches',
  'trainer.length_multiple',
  'trainer.max_logits_bytes',
  'trainer.pack_rows',
  'trainer.num_devices',
  'trainer.data',
  'trainer.fsdp',
  'trainer.sequence',
  'trainer.tensor',
  'trainer.checkpoint_every',
  'trainer.keep_checkpoints',
  'supervised.batch_size',
  'evaluation.num_problems',
  'weights.deadline_seconds',
  'launcher.max_simulated_devices',
  'launcher.command_timeout_seconds',
)
_NOT_NEGATIVE = (
  'max_staleness',
  'max_token_age',
  'supervised.num_steps',
  'generator.cache_bytes',
  'generator.max_versions',
  'generator.tail_share',
  'report.num_samples',
  'trainer.pack_tokens',
)
_DTYPES = ('bfloat16', 'float32')
# Fields of the generator with the value that samples among all tokens.
_NEUTRAL = {'top_k': 0, 'top_p': 1.0, 'min_p': 0.0, 'min_new_tokens': 0}
_CHOICES = {
  'batch_order': (admission.ADMISSION, admission.COMPLETION),
  'model.source': ('gguf', 'hf', 'scratch'),
  'generator.compute_dtype': ('', *_DTYPES),
  'generator.cache_dtype': ('', 'int8'),
  'generator.quantization': ('', *quantization.DTYPES),
  'generator.refresh_cache': generator_lib.REFRESH,
  'generator.swap': ('in_flight', 'drain'),
  'trainer.attention': tuple(attention.IMPLEMENTATIONS),
  'trainer.compute_dtype': _DTYPES,
  'trainer.remat': tuple(remat.POLICIES),
  'launcher.name': ('local', 'ray'),
  'launcher.platform': ('cpu', 'gpu', 'tpu'),
  'weights.transport': ('collective', 'device_put', 'filesystem', 'transfer'),
}


def check_config(config: ml_collections.ConfigDict) -> None:
  """Checks numbers, names and how they go together.

  Raises:
    ValueError: names the first field at fault, its value and the remedy.
  """
  for field in _POSITIVE:
    value = _get(config, field)
    if not value > 0:
      raise ValueError(f'{field}={value} must be above 0')
  for field in _NOT_NEGATIVE:
    value = _get(config, field)
    if value < 0:
      raise ValueError(f'{field}={value} must be 0 or more')
  for field, choices in _CHOICES.items():
    value = _get(config, field)
    if value not in choices:
      raise ValueError(f'{field}={value!r} must be one of {list(choices)}')
  _check_group(config)
  _check_order(config)
  _check_sampling(config)
  _check_devices(config)
  if config.trainer.pack_tokens:
    _check_packing(config)
  else:
    _check_batch(config)
  _check_attention(config)
  _check_transport(config)
  lora(config)


def num_micro_batches(config: ml_collections.ConfigDict) -> int:
  """Returns the forward and backward passes of one update.

  Where rows are packed, their number is not known before the batch.
  """
  if config.trainer.pack_tokens:
    return 1
  rows = config.batch_size * config.group_size
  return rows // (
    config.trainer.num_minibatches * config.trainer.micro_batch_size
  )


def longest_completion(config: ml_collections.ConfigDict) -> int:
  """Returns the tokens of the longest completion, forced ones included."""
  c = config.generator
  return c.max_new_tokens * (c.tail_factor if c.tail_share else 1)


def longest_sequence(config: ml_collections.ConfigDict) -> int:
  """Returns the tokens of the longest prompt with its completion."""
  return config.generator.max_prompt_length + longest_completion(config)


def trainer_mesh(config: ml_collections.ConfigDict) -> dict[str, int]:
  """Returns the sizes of the trainer's mesh axes."""
  trainer = config.trainer
  # The last axis changes fastest: its devices are the nearest neighbors.
  return {
    'data': trainer.data,
    'fsdp': trainer.fsdp,
    'sequence': trainer.sequence,
    'tensor': trainer.tensor,
  }


def generator_mesh(config: ml_collections.ConfigDict) -> dict[str, int]:
  """Returns the sizes of a generator's mesh axes."""
  return {'tensor': config.generator.tensor}


def lora(config: ml_collections.ConfigDict) -> config_lib.LoRAConfig | None:
  """Returns the adapters the trainer trains, None where it trains weights.

  Raises:
    ValueError: a field is out of its range.
  """
  trainer = config.trainer
  if trainer.lora_rank < 0:
    raise ValueError(
      f'trainer.lora_rank={trainer.lora_rank} must be 0 or more; 0 trains the'
      ' weights'
    )
  if trainer.lora_rank == 0:
    return None
  if not trainer.lora_alpha > 0:
    raise ValueError(
      f'trainer.lora_alpha={trainer.lora_alpha} must be above 0; twice the'
      ' rank is common'
    )
  targets = tuple(trainer.lora_targets.split(','))
  known = config_lib.PROJECTIONS
  if len(set(targets)) < len(targets) or set(targets) - {*known}:
    raise ValueError(
      f'trainer.lora_targets={trainer.lora_targets!r} must name some of'
      f' {",".join(known)}, each once'
    )
  return config_lib.LoRAConfig(trainer.lora_rank, trainer.lora_alpha, targets)


def _check_group(config: ml_collections.ConfigDict) -> None:
  size = config.group_size
  if size < 2:
    raise ValueError(
      f'group_size={size}: advantages compare the completions of a group, so'
      ' it must be at least 2'
    )


def _check_order(config: ml_collections.ConfigDict) -> None:
  age = config.max_token_age
  if 0 < age < config.max_staleness:
    raise ValueError(
      f'max_token_age={age} is less than max_staleness={config.max_staleness}:'
      ' it would leave tokens out of the loss that are sampled as planned;'
      ' raise it, or set it to 0 to leave out none'
    )
  share = config.generator.tail_share
  if share > 1:
    raise ValueError(
      f'generator.tail_share={share} is a share of the problems: at most 1'
    )


def _check_sampling(config: ml_collections.ConfigDict) -> None:
  for field, neutral in _NEUTRAL.items():
    value = config.generator[field]
    if value != neutral:
      raise ValueError(
        f'generator.{field}={value}: training needs {neutral}, as the trainer'
        ' scores tokens among all of the vocabulary, and what is left out'
        f' would look as if it were improbable; set evaluation.{field} to'
        ' evaluate with it'
      )
  evaluation = config.evaluation
  plan.check_sampling(
    'evaluation',
    temperature=config.generator.temperature,
    top_k=evaluation.top_k,
    top_p=evaluation.top_p,
    min_p=evaluation.min_p,
  )
  longest = config.generator.max_new_tokens
  if not 0 <= evaluation.min_new_tokens <= longest:
    raise ValueError(
      f'evaluation.min_new_tokens={evaluation.min_new_tokens} must be between'
      f' 0 and generator.max_new_tokens={longest}'
    )
  strings = config.generator.stop_strings
  if isinstance(strings, str) or not all(strings):
    raise ValueError(
      f'generator.stop_strings={strings!r} must hold texts that are not empty,'
      " such as ('stop',)"
    )


def _check_batch(config: ml_collections.ConfigDict) -> None:
  rows = config.batch_size * config.group_size
  trainer = config.trainer
  part = trainer.num_minibatches * trainer.micro_batch_size
  if rows % part:
    raise ValueError(
      f'trainer.micro_batch_size={trainer.micro_batch_size} (times'
      f' num_minibatches={trainer.num_minibatches}) does not divide the batch'
      f' of batch_size * group_size = {rows} completions; choose a divisor'
    )
  # Completions that cannot be split: those of one row.
  unit = config.group_size if trainer.share_prompts else 1
  if trainer.micro_batch_size % unit:
    raise ValueError(
      f'trainer.micro_batch_size={trainer.micro_batch_size} does not hold whole'
      f' groups of group_size={unit}; choose a multiple, or set'
      ' trainer.share_prompts=False'
    )
  if trainer.length_multiple % trainer.sequence:
    raise ValueError(
      f'trainer.length_multiple={trainer.length_multiple} does not divide over'
      f' trainer.sequence={trainer.sequence} devices; choose a multiple'
    )
  shards = trainer.data * trainer.fsdp
  for field, size, least in (
    ('trainer.micro_batch_size', trainer.micro_batch_size, unit * shards),
    ('supervised.batch_size', config.supervised.batch_size, shards),
  ):
    if size % least:
      raise ValueError(
        f'{field}={size} does not divide over trainer.data * trainer.fsdp ='
        f' {shards} devices; choose a multiple of {least}'
      )


def _check_packing(config: ml_collections.ConfigDict) -> None:
  trainer = config.trainer
  tokens = trainer.pack_tokens
  longest = longest_sequence(config)
  if tokens < longest:
    raise ValueError(
      f'trainer.pack_tokens={tokens} is less than the longest sequence,'
      f' generator.max_prompt_length + completion = {longest}; raise it, or'
      ' set it to 0 to pack nothing'
    )
  if tokens % trainer.sequence:
    raise ValueError(
      f'trainer.pack_tokens={tokens} does not divide over trainer.sequence='
      f'{trainer.sequence} devices; choose a multiple'
    )
  shards = trainer.data * trainer.fsdp
  if trainer.pack_rows % shards:
    raise ValueError(
      f'trainer.pack_rows={trainer.pack_rows} does not divide over trainer.data'
      f' * trainer.fsdp = {shards} devices; choose a multiple'
    )


def _check_attention(config: ml_collections.ConfigDict) -> None:
  trainer, platform = config.trainer, config.launcher.platform
  for name, home in (('cudnn', 'gpu'), ('splash', 'tpu')):
    if trainer.attention == name and platform != home:
      raise ValueError(
        f'trainer.attention={name!r} is for launcher.platform={home!r}, not'
        f" {platform!r}; set it to 'auto'"
      )
  if trainer.attention == 'cudnn' and trainer.compute_dtype == 'float32':
    raise ValueError(
      "trainer.attention='cudnn' has no float32; set trainer.compute_dtype to"
      " 'bfloat16', or trainer.attention to 'auto'"
    )
  if trainer.attention == 'splash' and trainer.share_prompts:
    raise ValueError(
      "trainer.attention='splash' cannot share prompts; set"
      ' trainer.share_prompts=False, with trainer.pack_tokens to fill rows'
    )


def _check_devices(config: ml_collections.ConfigDict) -> None:
  meshes = {
    'trainer': trainer_mesh(config),
    'generator': generator_mesh(config),
  }
  for role, mesh in meshes.items():
    num_devices = config[role].num_devices
    axes = ' * '.join(f'{role}.{axis}' for axis in mesh)
    if math.prod(mesh.values()) != num_devices:
      raise ValueError(
        f'{role}.num_devices={num_devices} must be {axes} ='
        f' {math.prod(mesh.values())}'
      )
    limit = config.launcher.max_simulated_devices
    if config.launcher.platform == 'cpu' and num_devices > limit:
      raise ValueError(
        f'{role}.num_devices={num_devices}: a CPU process simulates at most'
        f' launcher.max_simulated_devices={limit}; ask for fewer'
      )


def _check_transport(config: ml_collections.ConfigDict) -> None:
  name, launcher = config.weights.transport, config.launcher.name
  if name == 'device_put' and launcher == 'ray':
    raise ValueError(
      "weights.transport='device_put' works inside one process only; with"
      " launcher.name='ray' use 'transfer' or 'filesystem'"
    )
  if name == 'collective' and launcher == 'ray':
    raise ValueError(
      "weights.transport='collective' needs trainer and generators in one"
      " jax.distributed world, and those of launcher.name='ray' are worlds of"
      " their own; use 'transfer' or 'filesystem'"
    )


def _get(config: ml_collections.ConfigDict, field: str) -> float:
  value = config
  for name in field.split('.'):
    value = value[name]
  return value

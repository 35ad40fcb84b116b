"""What devices will hold, and what sharding could not do as asked.

Computed from shapes alone: nothing here touches a device.
"""

import dataclasses

import ml_collections

from llamarl_jax.controller import checks
from llamarl_jax.executors import generator
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.models import lora
from llamarl_jax.models import quantization
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import rules


def notes(
  config: ml_collections.ConfigDict,
  model: config_lib.LlamaConfig,
  settings: generator.GeneratorSettings,
) -> list[str]:
  """Returns one line for each thing a reader should know.

  Args:
    config: of the run.
    model: sizes of the network.
    settings: of a generator.
  """
  trained = dataclasses.replace(model, lora=checks.lora(config))
  trainer_mesh = mesh_lib.abstract_mesh(checks.trainer_mesh(config))
  specs = llama.abstract_params(trained)
  shardings, replicated = rules.shardings(
    specs, trainer_mesh, rules.TRAINER_RULES
  )
  lines = [f'trainer: {note}' for note in replicated]
  held = rules.device_bytes(specs, shardings)
  if not config.trainer.offload_optimizer:
    # Two moments of what is trained. Counted, as asking the optimizer would
    # start a JAX backend in this process.
    held += 2 * rules.device_bytes(
      lora.split_trainable(specs)[0], lora.split_trainable(shardings)[0]
    )
  lines.append(
    f'trainer: {held / 1e9:.3g} GB a device for parameters and optimizer state'
  )
  generator_mesh = mesh_lib.abstract_mesh(checks.generator_mesh(config))
  plan = generator.cache_plan(settings)
  specs = {
    **quantization.abstract(
      llama.abstract_params(model), settings.quantization
    ),
    'slots': plan.slots,
    'prompts': plan.lines,
  }
  shardings, replicated = rules.shardings(
    specs, generator_mesh, rules.GENERATOR_RULES
  )
  lines += [f'generator: {note}' for note in replicated]
  held = rules.device_bytes(specs, shardings)
  lines.append(
    f'generator: {held / 1e9:.3g} GB a device for parameters and cache'
  )
  lines.append(f'generator: {plan.describe()}')
  return lines

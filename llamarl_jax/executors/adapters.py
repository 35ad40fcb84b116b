"""A policy with adapters at the trainer: how it begins, and what is published.

Everyone else has the same policy without adapters: they are merged into the
weights before these leave the trainer.
"""

from collections.abc import Callable
import dataclasses
import functools

import jax

from llamarl_jax.executors import policy
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import lora
from llamarl_jax.types import Params


def load(
  source: policy.PolicySource,
  adapters: config_lib.LoRAConfig | None,
  shardings: Params,
) -> Params:
  """Returns the parameters of a source, with adapters that add nothing yet.

  Args:
    source: the model without adapters, and where it comes from.
    adapters: to train; None trains the weights themselves.
    shardings: a sharding for each parameter, adapters included.
  """
  if adapters is None:
    return policy.load(source, shardings)
  trainable, frozen = lora.split_trainable(shardings)
  model = dataclasses.replace(source.model, lora=adapters)
  initialize = jax.jit(
    functools.partial(lora.init_adapters, model), out_shardings=trainable
  )
  first = initialize(jax.random.key(source.seed))
  return lora.combine(first, policy.load(source, frozen))


def make_merge(
  model: config_lib.LlamaConfig, shardings: Params
) -> Callable[[Params], Params]:
  """Returns what turns parameters into those to publish, of the same policy.

  Args:
    model: as it is trained; without adapters its parameters are published.
    shardings: a sharding for each parameter, adapters included.
  """
  if model.lora is None:
    return lambda params: params
  _, frozen = lora.split_trainable(shardings)
  return jax.jit(
    lambda params: lora.merge(model, params)[1], out_shardings=frozen
  )

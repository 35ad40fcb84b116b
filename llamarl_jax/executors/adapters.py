"""A policy at the trainer: how it begins, and what is published of it.

Everyone else has the same policy without adapters: they are merged into the
weights before these leave the trainer. Generators may have it quantized; that
is done before it travels, so that fewer bytes do.
"""

from collections.abc import Callable
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.executors import policy
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.models import lora
from llamarl_jax.models import quantization as quantization_lib
from llamarl_jax.sharding import rules
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


def make_published(
  model: config_lib.LlamaConfig,
  mesh: jax.sharding.Mesh,
  table: rules.Rules,
  quantization: str = '',
) -> Callable[[Params], Params]:
  """Returns what turns parameters into those that generators sample from.

  Args:
    model: of the parameters it is given; its adapters are merged.
    mesh: where those are, and the result.
    table: how they are laid out over it.
    quantization: of the result, a key of `quantization.DTYPES`; '' for none.

  Raises:
    ValueError: the devices have no such elements.
  """
  if model.lora is None and not quantization:
    return lambda params: params
  if quantization:
    _check_elements(quantization, mesh.local_devices[0])
  bare = dataclasses.replace(model, lora=None)
  shardings, _ = rules.shardings(
    quantization_lib.abstract(llama.abstract_params(bare), quantization),
    mesh,
    table,
  )
  return jax.jit(
    lambda params: quantization_lib.quantize(
      lora.merge(model, params)[1], quantization
    ),
    out_shardings=shardings,
  )


def _check_elements(kind: str, device: jax.Device) -> None:
  """Raises ValueError where a device does not round as the kind says."""
  dtype = quantization_lib.DTYPES[kind]
  numbers = np.array([-100.0, -0.26, 0.0, 1.0, 3.0, 23.0], np.float32)
  # The host rounds in the same way, without the device.
  expected = numbers.astype(dtype).astype(np.float32)
  remedy = "set generator.quantization to 'int8' or ''"
  try:
    found = jax.jit(lambda x: x.astype(dtype).astype(jnp.float32))(
      jax.device_put(numbers, device)
    )
    same = np.array_equal(np.asarray(found), expected)
  except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
    raise ValueError(
      f'generator.quantization={kind!r}: {device} has no '
      f'{jnp.dtype(dtype).name} ({error}); {remedy}'
    ) from error
  if not same:
    raise ValueError(
      f'generator.quantization={kind!r}: {device} rounds {numbers} to {found}, '
      f'not to {expected}; {remedy}'
    )

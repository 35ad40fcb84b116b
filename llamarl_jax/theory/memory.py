"""Bytes of one device: weights, gradients, optimizer, activations, cache.

Each side is a table of named parts, so that a user sees what does not fit and
what would have to shrink. Allocators and fragmentation take the rest: plan
with `RESERVE` of a device left free.
"""

from collections.abc import Mapping
import dataclasses
import math

from llamarl_jax.models import config as config_lib
from llamarl_jax.theory import arithmetic
from llamarl_jax.theory import cost_model
from llamarl_jax.theory import devices

# Share of a device's memory that plans leave free.
RESERVE = 0.1
# Of a chunk of float32 logits, as trainer.max_logits_bytes of a config.
MAX_LOGITS_BYTES = 2.0**28

# Part -> bytes on one device.
Parts = Mapping[str, float]


def total(parts: Parts) -> float:
  """Returns the bytes of all parts."""
  return sum(parts.values())


def usable_bytes(device: devices.Device, reserve: float = RESERVE) -> float:
  """Returns the bytes of a device that a plan may fill."""
  return device.memory_bytes * (1.0 - reserve)


def trainer_state(
  config: config_lib.LlamaConfig, layout: cost_model.TrainLayout
) -> Parts:
  """Returns the parts that do not depend on the batch (k_t W0)."""
  share = arithmetic.num_parameters(config) / layout.replica_devices
  element = devices.DTYPE_BYTES[layout.compute_dtype]
  embedding = arithmetic.head_weights(config) / layout.tensor
  layer = arithmetic.layer_weights(config) / layout.tensor
  # A layer in use, the next arriving; the largest is an embedding's.
  gathered = max(2 * layer, embedding) if layout.fsdp > 1 else layer
  return {
    'weights': share * layout.master_bytes,
    'gradients': share * layout.gradient_bytes,
    'optimizer': share * layout.moment_bytes,
    'gathered layers': gathered * element,
  }


def activations(
  config: config_lib.LlamaConfig,
  layout: cost_model.TrainLayout,
  *,
  tokens: float,
  max_logits_bytes: float = MAX_LOGITS_BYTES,
) -> Parts:
  """Returns the parts that grow with the micro-batch (A_t b_t).

  Args:
    config: sizes of the model.
    layout: of the trainer.
    tokens: a sequence, as padded or packed.
    max_logits_bytes: of a chunk of logits, float32, on a device.
  """
  element = devices.DTYPE_BYTES[layout.compute_dtype]
  local = layout.micro_batch * tokens / layout.fsdp
  whole, split = arithmetic.saved_elements(config, layout.remat)
  kept = local * config.num_layers * (whole + split / layout.tensor)
  # While a layer is differentiated all of its intermediates are there, and
  # the gradients of half of them.
  whole, split = arithmetic.saved_elements(config, 'none')
  working = 1.5 * local * (whole + split / layout.tensor)
  logits = local * config.vocab_size * 4 / layout.tensor
  return {
    'activations': kept * element,
    'layer at work': working * element,
    # The chunk and its gradient.
    'logits': 2 * min(logits, max_logits_bytes),
  }


def trainer(
  config: config_lib.LlamaConfig,
  layout: cost_model.TrainLayout,
  *,
  tokens: float,
  max_logits_bytes: float = MAX_LOGITS_BYTES,
  send_bytes: float = 0.0,
) -> Parts:
  """Returns all parts of a trainer's device.

  Args:
    config: sizes of the model.
    layout: of the trainer.
    tokens: a sequence, as padded or packed.
    max_logits_bytes: of a chunk of logits, float32, on a device.
    send_bytes: of the copy that generators fetch from.
  """
  return {
    **trainer_state(config, layout),
    **activations(
      config, layout, tokens=tokens, max_logits_bytes=max_logits_bytes
    ),
    'transfer buffers': send_bytes,
  }


def generator_weights(
  config: config_lib.LlamaConfig, layout: cost_model.GeneratorLayout
) -> float:
  """Returns the bytes of all weight copies on a device (k_g W0)."""
  parameters = arithmetic.num_parameters(config)
  matrices = config.num_layers * arithmetic.layer_weights(config)
  # Quantized are the matrices of the layers; all else stays in bfloat16.
  nbytes = matrices * devices.DTYPE_BYTES[layout.weight_dtype]
  nbytes += (parameters - matrices) * max(
    2, devices.DTYPE_BYTES[layout.weight_dtype]
  )
  return layout.weight_copies * nbytes / layout.tensor


def cache_bytes(
  config: config_lib.LlamaConfig,
  layout: cost_model.GeneratorLayout,
  *,
  tokens: float,
) -> float:
  """Returns the cache bytes of one response on a device (K_g).

  Args:
    config: sizes of the model.
    layout: of the generator.
    tokens: positions held for a response, prompt included.
  """
  shared = min(layout.tensor, config.num_kv_heads)
  element = devices.DTYPE_BYTES[layout.cache_dtype]
  return arithmetic.cache_elements(config) * tokens * element / shared


def generator(
  config: config_lib.LlamaConfig,
  layout: cost_model.GeneratorLayout,
  *,
  tokens: float,
  prefill_tokens: float = 8192.0,
) -> Parts:
  """Returns all parts of a generator's device.

  Args:
    config: sizes of the model.
    layout: of the generator.
    tokens: positions held for a response, prompt included.
    prefill_tokens: read at once.
  """
  whole, split = arithmetic.saved_elements(config, 'none')
  working = prefill_tokens * (whole + split / layout.tensor)
  return {
    'weights': generator_weights(config, layout),
    'cache': layout.slots * cache_bytes(config, layout, tokens=tokens),
    'prefill': working * devices.DTYPE_BYTES['bfloat16'],
    'logits': layout.slots * config.vocab_size * 4 / layout.tensor,
  }


def most_slots(
  config: config_lib.LlamaConfig,
  layout: cost_model.GeneratorLayout,
  *,
  tokens: float,
  room: float,
) -> int:
  """Returns how many slots fit into `room` bytes of a device; below 1 if none.

  Args:
    config: sizes of the model.
    layout: of the generator; its slots are not read.
    tokens: positions held for a response, prompt included.
    room: bytes for the generator, its weights included.
  """
  layouts = [dataclasses.replace(layout, slots=count) for count in (0, 1)]
  used, more = (
    total(generator(config, sized, tokens=tokens)) for sized in layouts
  )
  return math.floor((room - used) / (more - used))


def most_sequences(
  config: config_lib.LlamaConfig,
  layout: cost_model.TrainLayout,
  *,
  tokens: float,
  room: float,
) -> int:
  """Returns the largest micro-batch that fits into `room` bytes of a device.

  Args:
    config: sizes of the model.
    layout: of the trainer; its micro-batch is not read.
    tokens: a sequence, as padded or packed.
    room: bytes for the trainer, its state included.

  Returns:
    A multiple of layout.fsdp, over which a micro-batch is spread; 0 if none.
  """
  one = activations(
    config,
    dataclasses.replace(layout, micro_batch=layout.fsdp),
    tokens=tokens,
    max_logits_bytes=math.inf,
  )
  left = room - total(trainer_state(config, layout))
  # Logits are either all there at once or a chunk of bounded size: whichever
  # is less, so a micro-batch fits if it fits with one of the two.
  chunk = 2 * MAX_LOGITS_BYTES
  whole = left // total(one)
  chunked = (left - chunk) // (total(one) - one['logits'])
  return max(0, int(max(whole, chunked))) * layout.fsdp


def explain(parts: Parts, room: float) -> str:
  """Returns one line: what the parts take, and by how much it is too much."""
  listed = ', '.join(
    f'{name} {size / 1e9:.1f}' for name, size in parts.items() if size > 0
  )
  needed = total(parts)
  verdict = (
    'fits' if needed <= room else f'{(needed - room) / 1e9:.1f} GB too much'
  )
  return f'{needed / 1e9:.1f} of {room / 1e9:.1f} GB, {verdict} ({listed} GB)'

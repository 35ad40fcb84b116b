"""Seconds of training, prefill and decoding of a Llama on a type of device.

A roofline with stated efficiencies: arithmetic at a share of the peak rate,
bytes at a share of the memory's, collectives by latency and bytes, and no less
than the host needs to start the kernels. Where a batch grows, weights are read
or gathered for more samples at once: that is why seconds a sample fall.
"""

import dataclasses
from typing import Any
from typing import NamedTuple

import numpy as np

from llamarl_jax.models import config as config_lib
from llamarl_jax.theory import arithmetic
from llamarl_jax.theory import devices

# One number, or an array of them where many batches are costed at once.
Number = Any


@dataclasses.dataclass(frozen=True)
class Efficiency:
  """How much of a device's peak rates programs reach; our choices.

  Attributes:
    compute: share of the peak FLOP/s in products; 0.43 is what pre-training
      of Llama 3 405B reached in all, https://arxiv.org/abs/2407.21783 table 4.
    memory: share of the memory bandwidth.
    link: share of a link's rate.
    kernel_seconds: from the start of one kernel to that of the next, at least:
      what the host needs to start it.
    kernels_per_layer: kernels of a layer's forward pass.
  """

  compute: float = 0.43
  memory: float = 0.8
  link: float = 0.8
  kernel_seconds: float = 3e-6
  kernels_per_layer: int = 12


class Cost(NamedTuple):
  """Seconds, by what they are spent on.

  Attributes:
    compute: products, and the bytes they wait for.
    memory: what is bound by the memory beside them.
    collective: between devices, where nothing hides it.
    launch: of the host, starting kernels.
  """

  compute: Number
  memory: Number
  collective: Number
  launch: Number

  @property
  def seconds(self) -> Number:
    """All of it: the host starts kernels while the device works."""
    return np.maximum(self.compute + self.memory + self.collective, self.launch)


@dataclasses.dataclass(frozen=True)
class TrainLayout:
  """How a trainer is spread over devices.

  Attributes:
    tensor: devices that share each layer.
    fsdp: such groups that share the parameters; tensor * fsdp = m devices are
      one model replica.
    data: replicas.
    micro_batch: sequences of one pass of a replica (b_t).
    remat: what layers keep for the backward pass; a key of
      arithmetic.TRAIN_PASSES.
    compute_dtype: of products, activations and gathered weights.
    master_bytes: of a parameter.
    gradient_bytes: of a parameter's gradient.
    moment_bytes: of a parameter's optimizer state.
  """

  tensor: int
  fsdp: int
  data: int
  micro_batch: int
  remat: str = 'full'
  compute_dtype: str = 'bfloat16'
  master_bytes: int = 4
  gradient_bytes: int = 4
  moment_bytes: int = 8

  @property
  def replica_devices(self) -> int:
    """Devices of one model replica (m)."""
    return self.tensor * self.fsdp

  @property
  def num_devices(self) -> int:
    """All devices."""
    return self.replica_devices * self.data


@dataclasses.dataclass(frozen=True)
class GeneratorLayout:
  """How a generator is spread over devices.

  Attributes:
    tensor: devices of one replica (m), which share each layer.
    replicas: of the generator.
    slots: responses that a replica decodes side by side (b_g).
    weight_dtype: of the weights as stored and multiplied with.
    cache_dtype: of keys and values.
    weight_copies: copies of the weights; a second one arrives in the
      background.
  """

  tensor: int
  replicas: int
  slots: int
  weight_dtype: str = 'bfloat16'
  cache_dtype: str = 'bfloat16'
  weight_copies: int = 1

  @property
  def num_devices(self) -> int:
    """All devices."""
    return self.tensor * self.replicas


def train_pass(
  config: config_lib.LlamaConfig,
  device: devices.Device,
  efficiency: Efficiency,
  layout: TrainLayout,
  *,
  tokens: float,
  pairs: float,
) -> Cost:
  """Returns the cost of one micro-batch, forward and backward.

  Args:
    config: sizes of the model.
    device: type of all devices.
    efficiency: what is reached of its rates.
    layout: of the trainer.
    tokens: a sequence, mean.
    pairs: of attention, a sequence, mean.
  """
  batch_tokens = layout.micro_batch * tokens
  batch_pairs = layout.micro_batch * pairs
  passes = arithmetic.TRAIN_PASSES[layout.remat]
  forward = arithmetic.forward_flops(
    config,
    num_tokens=batch_tokens,
    num_pairs=batch_pairs,
    num_scored=batch_tokens,
  )
  flops = passes * forward
  if layout.remat == 'dots':
    flops += arithmetic.attention_flops(config, batch_pairs)
  rate = devices.peak(device, layout.compute_dtype) * efficiency.compute
  compute = flops / layout.replica_devices / rate
  element = devices.DTYPE_BYTES[layout.compute_dtype]
  whole, split = arithmetic.saved_elements(config, 'none')
  # Every intermediate is written once and read once, in each pass.
  moved = (whole + split / layout.tensor) * config.num_layers * element
  memory = 2 * passes * moved * batch_tokens / layout.fsdp
  # Two sums across a tensor group in each direction, and two recomputed.
  sums = (6 if layout.remat == 'full' else 4) * config.num_layers
  size = batch_tokens / layout.fsdp * config.width * element
  tensor_seconds = sums * devices.all_reduce_seconds(
    device, size, layout.tensor, efficiency.link
  )
  hidden = compute + memory / (device.memory_bandwidth * efficiency.memory)
  gather = _gather_seconds(config, device, efficiency, layout)
  kernels = 3 * efficiency.kernels_per_layer * config.num_layers
  return Cost(
    compute,
    memory / (device.memory_bandwidth * efficiency.memory),
    # Weights of the next layer arrive while this one computes.
    tensor_seconds + max(0.0, gather - hidden),
    kernels * efficiency.kernel_seconds,
  )


def _gather_seconds(
  config: config_lib.LlamaConfig,
  device: devices.Device,
  efficiency: Efficiency,
  layout: TrainLayout,
) -> float:
  """Returns the seconds a pass takes to gather weights and scatter gradients.

  Weights are gathered forward and again backward, gradients are scattered
  once, each in the compute dtype: 3 (f - 1) / f W / tensor bytes a device.
  """
  if layout.fsdp == 1:
    return 0.0
  element = devices.DTYPE_BYTES[layout.compute_dtype]
  weights = element * arithmetic.num_parameters(config) / layout.tensor
  sent = 3 * (layout.fsdp - 1) / layout.fsdp * weights
  link = devices.link_between(device, layout.replica_devices)
  return sent / (link * efficiency.link)


def train_step(
  config: config_lib.LlamaConfig,
  device: devices.Device,
  efficiency: Efficiency,
  layout: TrainLayout,
  *,
  samples: float,
  tokens: float,
  pairs: float,
) -> Cost:
  """Returns the cost of one update on a batch.

  The replica with most micro-batches sets the time; the gradients are then
  summed over replicas, and the optimizer reads and writes its state once.

  Args:
    config: sizes of the model.
    device: type of all devices.
    efficiency: what is reached of its rates.
    layout: of the trainer.
    samples: sequences of the batch, over all replicas.
    tokens: a sequence, mean.
    pairs: of attention, a sequence, mean.
  """
  passes = np.ceil(samples / (layout.data * layout.micro_batch))
  one = train_pass(
    config, device, efficiency, layout, tokens=tokens, pairs=pairs
  )
  parameters = arithmetic.num_parameters(config)
  share = parameters / layout.replica_devices
  gradient = share * layout.gradient_bytes
  link = devices.link_between(device, layout.num_devices) * efficiency.link
  summed = 2 * (layout.data - 1) / layout.data * gradient / link
  state = layout.master_bytes + layout.moment_bytes
  update = share * (2 * state + layout.gradient_bytes)
  update /= device.memory_bandwidth * efficiency.memory
  return Cost(
    passes * one.compute,
    passes * one.memory + update,
    passes * one.collective + summed,
    passes * one.launch,
  )


def decode_step(
  config: config_lib.LlamaConfig,
  device: devices.Device,
  efficiency: Efficiency,
  layout: GeneratorLayout,
  *,
  active: Number,
  context: Number,
) -> Cost:
  """Returns the cost of one token more for every active slot of a replica.

  compute = max(FLOPs / rate, (weights + caches) / bandwidth)

  Args:
    config: sizes of the model.
    device: type of all devices.
    efficiency: what is reached of its rates.
    layout: of the generator; its slots are not read.
    active: responses being decoded, a number or f64[...].
    context: tokens that each attends to, mean, of the same shape.
  """
  flops = arithmetic.forward_flops(
    config, num_tokens=active, num_pairs=active * context, num_scored=active
  )
  rate = devices.peak(device, layout.weight_dtype) * efficiency.compute
  weights = config.num_layers * arithmetic.layer_weights(config)
  nbytes = float(weights * devices.DTYPE_BYTES[layout.weight_dtype])
  # The output projection is not quantized.
  nbytes += arithmetic.head_weights(config) * max(
    devices.DTYPE_BYTES['bfloat16'], devices.DTYPE_BYTES[layout.weight_dtype]
  )
  nbytes /= layout.tensor
  # A head of keys and values is not split: beyond K devices it is repeated.
  shared = min(layout.tensor, config.num_kv_heads)
  cache = arithmetic.cache_elements(config) * active * context
  cache = cache * devices.DTYPE_BYTES[layout.cache_dtype] / shared
  bandwidth = device.memory_bandwidth * efficiency.memory
  size = active * config.width * devices.DTYPE_BYTES['bfloat16']
  sums = 2 * config.num_layers + 1
  kernels = efficiency.kernels_per_layer * config.num_layers
  return Cost(
    np.maximum(flops / layout.tensor / rate, (nbytes + cache) / bandwidth),
    0.0,
    sums
    * devices.all_reduce_seconds(device, size, layout.tensor, efficiency.link),
    kernels * efficiency.kernel_seconds,
  )


def prefill(
  config: config_lib.LlamaConfig,
  device: devices.Device,
  efficiency: Efficiency,
  layout: GeneratorLayout,
  *,
  prompts: Number,
  tokens: float,
) -> Cost:
  """Returns the cost of reading prompts into the cache of one replica.

  Args:
    config: sizes of the model.
    device: type of all devices.
    efficiency: what is reached of its rates.
    layout: of the generator; its slots are not read.
    prompts: read together, a number or f64[...].
    tokens: a prompt.
  """
  total = prompts * tokens
  flops = arithmetic.forward_flops(
    config,
    num_tokens=total,
    num_pairs=prompts * tokens * (tokens + 1) / 2,
    num_scored=0.0,
  )
  rate = devices.peak(device, layout.weight_dtype) * efficiency.compute
  element = devices.DTYPE_BYTES['bfloat16']
  size = total * config.width * element
  whole, split = arithmetic.saved_elements(config, 'none')
  moved = (whole + split / layout.tensor) * config.num_layers * element
  bandwidth = device.memory_bandwidth * efficiency.memory
  kernels = efficiency.kernels_per_layer * config.num_layers
  return Cost(
    flops / layout.tensor / rate,
    2 * moved * total / bandwidth,
    2
    * config.num_layers
    * devices.all_reduce_seconds(device, size, layout.tensor, efficiency.link),
    kernels * efficiency.kernel_seconds,
  )


def publication_seconds(
  nbytes: float,
  device: devices.Device,
  efficiency: Efficiency,
  *,
  senders: int,
  receivers: int,
  replicas: int,
) -> float:
  """Returns the seconds weights take from trainer to generators.

  seconds = max(replicas W / senders, W / receivers) / link

  Every device sends an equal part of what is sent in all, and receives its own
  shard: no device holds more (Wu et al. 2025, DDMA).

  Args:
    nbytes: of the weights as they travel (W).
    device: type of all devices.
    efficiency: what is reached of its rates.
    senders: devices of the trainer.
    receivers: devices of one generator replica.
    replicas: of the generator.
  """
  sent = replicas * nbytes / senders
  received = nbytes / receivers
  return max(sent, received) / (device.slow_link * efficiency.link)

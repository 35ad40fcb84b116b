"""Accelerators as the models see them: rates, memory and links, with sources.

Rates are a device's peak without sparsity; what of it is reached is stated
apart, in `cost_model.Efficiency`. Links are bytes a second in one direction.
"""

from collections.abc import Mapping
import dataclasses
import math

# Bytes of one element, by the names that layouts use.
DTYPE_BYTES: Mapping[str, int] = {
  'float32': 4,
  'bfloat16': 2,
  'int8': 1,
  'float8': 1,
}


@dataclasses.dataclass(frozen=True)
class Device:
  """One type of accelerator, and the network it is usually built into.

  Attributes:
    name: as users write it.
    peak_flops: by dtype of the operands, FLOP/s.
    memory_bytes: of one device.
    memory_bandwidth: bytes/s between the memory and the cores.
    domain_size: devices that the fast links connect.
    fast_link: bytes/s a device sends within its domain.
    slow_link: bytes/s a device sends to another domain.
    host_link: bytes/s between a device and the memory of its host.
    base_latency: seconds any collective takes, however small.
    fast_latency: seconds a hop within the domain adds.
    slow_latency: seconds a hop between domains adds.
    sources: addresses the figures are from.
  """

  name: str
  peak_flops: Mapping[str, float]
  memory_bytes: float
  memory_bandwidth: float
  domain_size: int
  fast_link: float
  slow_link: float
  host_link: float
  base_latency: float
  fast_latency: float
  slow_latency: float
  sources: tuple[str, ...]


# Latencies of GPUs: the constants of NCCL's own model for tree all-reduces of
# small messages (protocol LL): base 6.8 us, 0.6 us an NVLink hop, 5 us a hop
# over the network.
_NCCL = 'https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc'
_GPU_LATENCY = {
  'base_latency': 6.8e-6,
  'fast_latency': 0.6e-6,
  'slow_latency': 5e-6,
}
# A hop between neighbors takes about 1 us.
_SCALING_BOOK = 'https://jax-ml.github.io/scaling-book/sharding/'
_TPU_LATENCY = {
  'base_latency': 2e-6,
  'fast_latency': 1e-6,
  'slow_latency': 1e-5,
}
_DGX_H100 = (
  'https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html'
)
_HOPPER_FLOPS = {
  'float32': 494.7e12,  # TF32.
  'bfloat16': 989.4e12,
  'float8': 1978.9e12,
  'int8': 1978.9e12,
}

DEVICES: Mapping[str, Device] = {
  'h100': Device(
    name='h100',
    peak_flops=_HOPPER_FLOPS,
    memory_bytes=80e9,
    memory_bandwidth=3.35e12,
    domain_size=8,
    fast_link=450e9,
    slow_link=50e9,  # 400 Gb/s a GPU.
    host_link=64e9,  # PCIe 5 x16.
    **_GPU_LATENCY,
    sources=(
      'https://www.nvidia.com/en-us/data-center/h100/',
      _DGX_H100,
      _NCCL,
    ),
  ),
  'h200': Device(
    name='h200',
    peak_flops=_HOPPER_FLOPS,
    memory_bytes=141e9,
    memory_bandwidth=4.8e12,
    domain_size=8,
    fast_link=450e9,
    slow_link=50e9,
    host_link=64e9,
    **_GPU_LATENCY,
    sources=(
      'https://www.nvidia.com/en-us/data-center/h200/',
      _DGX_H100,
      _NCCL,
    ),
  ),
  'a100': Device(
    name='a100',
    peak_flops={
      'float32': 156e12,  # TF32.
      'bfloat16': 312e12,
      'int8': 624e12,
    },
    memory_bytes=80e9,
    memory_bandwidth=2.039e12,
    domain_size=8,
    fast_link=300e9,
    slow_link=25e9,  # 200 Gb/s a GPU.
    host_link=32e9,  # PCIe 4 x16.
    **_GPU_LATENCY,
    sources=(
      'https://www.nvidia.com/en-us/data-center/a100/',
      'https://docs.nvidia.com/dgx/dgxa100-user-guide/'
      'introduction-to-dgxa100.html',
      _NCCL,
    ),
  ),
  # Fast links of a TPU: half of its bidirectional inter-chip bandwidth. A slow
  # link is its share of the data center network. Products in float32 take six
  # passes in bfloat16. Links to the host, and latencies but for a hop's, are
  # estimates: no figures of the maker were found.
  'tpu_v5e': Device(
    name='tpu_v5e',
    peak_flops={
      'float32': 197e12 / 6,
      'bfloat16': 197e12,
      'int8': 393e12,
    },
    memory_bytes=16e9,
    memory_bandwidth=819e9,
    domain_size=256,
    fast_link=200e9,
    slow_link=3.125e9,  # 6.4 Tb/s a pod.
    host_link=16e9,
    **_TPU_LATENCY,
    sources=('https://docs.cloud.google.com/tpu/docs/v5e', _SCALING_BOOK),
  ),
  'tpu_v5p': Device(
    name='tpu_v5p',
    peak_flops={
      'float32': 459e12 / 6,
      'bfloat16': 459e12,
      'float8': 459e12,
      'int8': 918e12,
    },
    memory_bytes=95e9,
    memory_bandwidth=2.765e12,
    domain_size=8960,
    fast_link=600e9,
    slow_link=6.25e9,  # 50 Gb/s a chip.
    host_link=32e9,
    **_TPU_LATENCY,
    sources=('https://docs.cloud.google.com/tpu/docs/v5p', _SCALING_BOOK),
  ),
  'tpu_v6e': Device(
    name='tpu_v6e',
    peak_flops={
      'float32': 918e12 / 6,
      'bfloat16': 918e12,
      'float8': 918e12,
      'int8': 1836e12,
    },
    memory_bytes=32e9,
    memory_bandwidth=1.638e12,
    domain_size=256,
    fast_link=400e9,
    slow_link=12.5e9,  # 25.6 Tb/s a pod.
    host_link=64e9,
    **_TPU_LATENCY,
    sources=('https://docs.cloud.google.com/tpu/docs/v6e', _SCALING_BOOK),
  ),
}


def find(name: str) -> Device:
  """Returns the device of that name.

  Raises:
    ValueError: there is none; lists those there are.
  """
  if name not in DEVICES:
    raise ValueError(
      f'device {name!r} is not known: choose one of {sorted(DEVICES)}, or'
      ' describe yours as a devices.Device'
    )
  return DEVICES[name]


def peak(device: Device, dtype: str) -> float:
  """Returns the FLOP/s of products in `dtype`.

  Where the cores lack an 8-bit dtype, its values are widened: fewer bytes are
  read, at the rate of bfloat16.

  Raises:
    ValueError: the dtype has no meaning here.
  """
  if dtype not in DTYPE_BYTES:
    raise ValueError(f'dtype {dtype!r} is not one of {sorted(DTYPE_BYTES)}')
  return device.peak_flops.get(dtype, device.peak_flops['bfloat16'])


def all_reduce_latency(device: Device, group: int) -> float:
  """Returns the seconds that an all-reduce of nothing takes.

  latency = base + 2 ((n - 1) fast + ceil(log2 d) slow),

  n devices of the group in a domain, d domains: up and down a tree whose
  branches are chains within a domain, as NCCL models it.

  Args:
    device: type of all devices of the group.
    group: devices that take part.
  """
  if group <= 1:
    return 0.0
  inside = min(group, device.domain_size)
  domains = math.ceil(group / device.domain_size)
  # A torus is crossed along its axes, not device by device.
  hops = inside - 1 if device.domain_size <= 8 else 3 * inside ** (1 / 3)
  depth = math.ceil(math.log2(domains)) if domains > 1 else 0
  return device.base_latency + 2 * (
    hops * device.fast_latency + depth * device.slow_latency
  )


def all_reduce_seconds(
  device: Device, nbytes: float, group: int, link_efficiency: float
) -> float:
  """Returns the seconds of an all-reduce, latency and transport.

  seconds = latency + 2 (n-1)/n S / fast + 2 (d-1)/d S/n / slow

  Reduce-scatter in each domain, all-reduce of the parts across d domains,
  all-gather; n devices of the group in a domain, S bytes.

  Args:
    device: type of all devices of the group.
    nbytes: of the array on each device (S); an array of sizes is allowed.
    group: devices that take part.
    link_efficiency: share of the links' rates that is reached.
  """
  if group <= 1:
    return 0.0 * nbytes
  inside = min(group, device.domain_size)
  domains = math.ceil(group / device.domain_size)
  fast = 2 * (inside - 1) / inside * nbytes / device.fast_link
  slow = 2 * (domains - 1) / domains * nbytes / inside / device.slow_link
  return all_reduce_latency(device, group) + (fast + slow) / link_efficiency


def link_between(device: Device, group: int) -> float:
  """Returns the bytes/s of a device in a ring of `group` neighbors."""
  if group <= device.domain_size:
    return device.fast_link
  return device.slow_link

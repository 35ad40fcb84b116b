"""What is to be planned for: a job, and the ingredients a system may use."""

import dataclasses

from llamarl_jax.models import config as config_lib
from llamarl_jax.theory import cost_model
from llamarl_jax.theory import devices
from llamarl_jax.theory import lengths as lengths_lib


@dataclasses.dataclass(frozen=True)
class Job:
  """What is to be trained, and on what.

  Attributes:
    config: sizes of the model.
    device: type of all devices.
    num_devices: of the cluster (G0).
    batch_size: samples a step (B0).
    prompt_tokens: a prompt.
    lengths: of responses.
    efficiency: what is reached of the device's rates.
    group_size: responses of one prompt.
    max_staleness: steps of samples that may be under way (k).
    weight_copies: of the generator; 2 where the next one arrives meanwhile.
    quantized: dtype of an 8-bit generator.
    split_unit: devices that move between pools at a time; 0 = a domain, or 4
      where domains are larger.
    max_tensor: most devices that share a layer of the trainer.
  """

  config: config_lib.LlamaConfig
  device: devices.Device
  num_devices: int
  batch_size: int
  prompt_tokens: float
  lengths: lengths_lib.Lengths
  efficiency: cost_model.Efficiency = dataclasses.field(
    default_factory=cost_model.Efficiency
  )
  group_size: int = 1
  max_staleness: int = 1
  weight_copies: int = 1
  quantized: str = 'float8'
  split_unit: int = 0
  max_tensor: int = 8

  @property
  def sample_tokens(self) -> float:
    """Mean tokens of a sample, prompt and response."""
    return self.prompt_tokens + self.lengths.expected()

  @property
  def sample_pairs(self) -> float:
    """Mean pairs of attention of a sample, E[T (T + 1) / 2]."""
    square = (
      self.prompt_tokens**2
      + 2 * self.prompt_tokens * self.lengths.expected()
      + self.lengths.expected_square()
    )
    return (square + self.sample_tokens) / 2

  @property
  def slot_tokens(self) -> float:
    """Positions that a slot holds."""
    return self.prompt_tokens + self.lengths.limit


@dataclasses.dataclass(frozen=True)
class Design:
  """Which ingredients a system has; all off is the synchronous baseline.

  Attributes:
    two_pools: trainer and generator have devices of their own, with one
      memory constraint each.
    offloaded: they share devices, but swap each other out between phases.
    own_parallelism: a generator replica may have another size than a
      trainer's.
    quantized: the generator may use 8-bit weights.
    overlapped: both work at the same time, on different steps.
    refilled: a decode slot that is free takes the next sample.
    partial_rollouts: unfinished responses go on in the next step.
  """

  two_pools: bool = False
  offloaded: bool = False
  own_parallelism: bool = False
  quantized: bool = False
  overlapped: bool = False
  refilled: bool = False
  partial_rollouts: bool = False

  def __post_init__(self) -> None:
    if self.overlapped and not self.two_pools:
      raise ValueError(
        'overlapped=True needs two_pools=True: on shared devices the two take'
        ' turns'
      )
    if self.offloaded and self.two_pools:
      raise ValueError(
        'offloaded=True is for shared devices; set two_pools=False'
      )


SYNCHRONOUS = Design()
ASYNCHRONOUS = Design(
  two_pools=True,
  own_parallelism=True,
  quantized=True,
  overlapped=True,
  refilled=True,
  partial_rollouts=True,
)

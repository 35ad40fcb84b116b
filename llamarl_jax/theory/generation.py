"""Seconds to generate a batch, with responses of unequal lengths.

Three ways to fill decode slots: waves that end with their longest response
(static), slots refilled until the batch is out (continuous), and slots that
are always full because unfinished responses go on in the next step (partial
rollouts, Wu et al. 2025). Only the last one pays the mean length.
"""

import dataclasses
import math

import numpy as np

from llamarl_jax.models import config as config_lib
from llamarl_jax.theory import cost_model
from llamarl_jax.theory import devices
from llamarl_jax.theory import lengths as lengths_lib


@dataclasses.dataclass(frozen=True)
class Decoder:
  """One generator replica at work.

  Attributes:
    config: sizes of the model.
    device: type of its devices.
    efficiency: what is reached of their rates.
    layout: of the generator.
    prompt_tokens: a prompt.
    lengths: of responses.
    group_size: responses that share one prefill.
  """

  config: config_lib.LlamaConfig
  device: devices.Device
  efficiency: cost_model.Efficiency
  layout: cost_model.GeneratorLayout
  prompt_tokens: float
  lengths: lengths_lib.Lengths
  group_size: int = 1

  def step_seconds(
    self, active: cost_model.Number, context: cost_model.Number
  ) -> cost_model.Number:
    """Returns the seconds of one decode step of the replica."""
    return cost_model.decode_step(
      self.config,
      self.device,
      self.efficiency,
      self.layout,
      active=active,
      context=context,
    ).seconds

  def prefill_seconds(self, samples: float) -> float:
    """Returns the seconds of reading the prompts of so many samples."""
    return float(
      cost_model.prefill(
        self.config,
        self.device,
        self.efficiency,
        self.layout,
        prompts=math.ceil(samples / self.group_size),
        tokens=self.prompt_tokens,
      ).seconds
    )


def wave_seconds(decoder: Decoder, samples: int) -> float:
  """Returns the expected seconds until all of one wave are done.

  seconds = prefill + sum over steps i of P(some active) step(E[active | some])

  Args:
    decoder: the replica; its slots hold all samples.
    samples: responses started together.
  """
  middle, width, survival = decoder.lengths.cells()
  some = 1.0 - (1.0 - survival) ** samples
  going = some > 1e-12
  some, middle, width = some[going], middle[going], width[going]
  active = samples * survival[going] / some
  step = decoder.step_seconds(active, decoder.prompt_tokens + middle)
  decode = float(np.sum(some * step * width))
  return decoder.prefill_seconds(samples) + decode


def sample_seconds(decoder: Decoder) -> float:
  """Returns seconds a sample with all slots always full: eta_g(b_g).

  Slots hold long responses more often than short ones are drawn, in proportion
  to their length: the mean context is prompt + E[n^2] / (2 E[n]).

  Args:
    decoder: the replica; b_g is its slots.
  """
  slots = decoder.layout.slots
  mean = decoder.lengths.expected()
  context = decoder.lengths.expected_square() / (2 * mean)
  step = decoder.step_seconds(float(slots), decoder.prompt_tokens + context)
  # Prompts of a slot's worth of samples are read together.
  fill = decoder.prefill_seconds(slots) / slots
  return float(mean * step / slots + fill)


def batch_seconds(decoder: Decoder, samples: int, *, static: bool) -> float:
  """Returns the expected seconds until a replica has made all samples.

  Args:
    decoder: the replica.
    samples: its share of a batch.
    static: whether slots are only filled again when all are free; else each
      is, until no sample is left to start.
  """
  slots = decoder.layout.slots
  if samples <= slots:
    return wave_seconds(decoder, samples)
  if static:
    whole, rest = divmod(samples, slots)
    seconds = whole * wave_seconds(decoder, slots)
    return seconds + (wave_seconds(decoder, rest) if rest else 0.0)
  # Full slots until the last sample starts. What runs then is taken to be a
  # fresh wave, which is exact for equal lengths and a little long otherwise.
  steady = (samples - slots) * sample_seconds(decoder)
  return steady + wave_seconds(decoder, slots)

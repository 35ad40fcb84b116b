"""The paper's scaling tables, predicted: rows, calibration, ladder.

Paper figures carry the mark of how they are known: [P] the paper's own words,
[S] reported by others who read it, [U] recollection that nobody checked; [C]
is our own choice where the paper's is unknown. One efficiency factor a side
is fitted, on the 8B row alone; 70B and 405B are predicted.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import NamedTuple

import scipy.optimize

from llamarl_jax.models import catalog
from llamarl_jax.theory import cost_model
from llamarl_jax.theory import devices
from llamarl_jax.theory import jobs
from llamarl_jax.theory import lengths as lengths_lib
from llamarl_jax.theory import memory
from llamarl_jax.theory import schedule


class Figure(NamedTuple):
  """A figure of the paper, with the mark of how it is known."""

  value: float | None
  mark: str

  def __str__(self) -> str:
    if self.value is None:
      return 'not given'
    return f'{self.value:g} [{self.mark}]'


@dataclasses.dataclass(frozen=True)
class PaperRow:
  """What is known of one model in the paper's tables.

  Attributes:
    name: for people.
    architecture: key of the model catalog.
    num_devices: of the cluster.
    baseline: step of the synchronous baseline, seconds.
    llamarl: step of LlamaRL, seconds.
    speedup: of the two.
    gathered_sync: weights to generators in OpenRLHF, seconds.
    direct_sync: likewise in LlamaRL.
  """

  name: str
  architecture: str
  num_devices: Figure
  baseline: Figure
  llamarl: Figure
  speedup: Figure
  gathered_sync: Figure
  direct_sync: Figure


ROWS = (
  PaperRow(
    '8B',
    'llama-3.1-8b',
    Figure(256, 'U'),
    Figure(22.45, 'U'),
    Figure(8.90, 'S'),
    Figure(2.52, 'S'),
    Figure(4.32, 'S'),
    Figure(0.04, 'S'),
  ),
  PaperRow(
    '70B',
    'llama-3.1-70b',
    Figure(256, 'U'),
    Figure(82.32, 'U'),
    Figure(20.67, 'S'),
    Figure(3.98, 'S'),
    Figure(111.65, 'S'),
    Figure(1.15, 'S'),
  ),
  PaperRow(
    '405B',
    'llama-3.1-405b',
    Figure(1024, 'S'),
    Figure(635.8, 'S'),
    Figure(59.5, 'S'),
    Figure(10.7, 'P'),
    Figure(None, ''),
    Figure(2.31, 'S'),
  ),
)

BATCH_SIZE = Figure(2048, 'U')
DEVICE = 'h100'  # [U]


@dataclasses.dataclass(frozen=True)
class Workload:
  """Lengths, which the paper's readers do not report: [C].

  Attributes:
    prompt_tokens: a prompt.
    lengths: of responses.
  """

  prompt_tokens: float
  lengths: lengths_lib.Lengths

  def __str__(self) -> str:
    given = self.lengths
    return (
      f'prompt {self.prompt_tokens:g}, response mean {given.mean:g}, sigma'
      f' {given.sigma:g}, limit {given.limit:g}'
    )


WORKLOAD = Workload(256, lengths_lib.Lengths(1024, 0.5, 2048))
# Others as likely; the fit is done anew for each.
WORKLOADS = (
  Workload(256, lengths_lib.Lengths(512, 0.5, 1024)),
  Workload(256, lengths_lib.Lengths(1024, 0.0, 1024)),
  Workload(256, lengths_lib.Lengths(1024, 0.75, 4096)),
  Workload(1024, lengths_lib.Lengths(1024, 0.5, 2048)),
  Workload(256, lengths_lib.Lengths(2048, 0.5, 4096)),
)

# The factor that is fitted multiplies one of these rates; the paper's systems
# start their kernels from Python, which is what small models wait for.
FACTORS = ('kernel', 'memory', 'compute', 'link')
FACTOR = 'kernel'
_FACTOR_RANGE = (0.01, 4.0)


def efficiency(factor: str, value: float) -> cost_model.Efficiency:
  """Returns the stated efficiencies with one rate times `value`.

  Args:
    factor: one of FACTORS; 'kernel' is the rate at which kernels start.
    value: what it is multiplied by.
  """
  stated = cost_model.Efficiency()
  if factor == 'kernel':
    return dataclasses.replace(
      stated, kernel_seconds=stated.kernel_seconds / value
    )
  return dataclasses.replace(
    stated, **{factor: getattr(stated, factor) * value}
  )


def job(
  row: PaperRow,
  reached: cost_model.Efficiency,
  workload: Workload = WORKLOAD,
) -> jobs.Job:
  """Returns the job of a row."""
  return jobs.Job(
    config=catalog.find(row.architecture),
    device=devices.find(DEVICE),
    num_devices=int(row.num_devices.value or 0),
    batch_size=int(BATCH_SIZE.value or 0),
    prompt_tokens=workload.prompt_tokens,
    lengths=workload.lengths,
    efficiency=reached,
  )


def fit(
  design: jobs.Design, target: float, factor: str, workload: Workload
) -> float | None:
  """Returns the factor at which the 8B row takes `target` seconds, or None.

  Args:
    design: of the side that is fitted.
    target: the paper's seconds.
    factor: one of FACTORS.
    workload: lengths.
  """

  def seconds(value: float) -> float:
    reached = efficiency(factor, value)
    return schedule.best(job(ROWS[0], reached, workload), design).step_seconds

  low, high = (math.log(value) for value in _FACTOR_RANGE)
  # Logarithms of the factor and of the time: close to a straight line.
  excess = functools.lru_cache(
    lambda value: math.log(seconds(math.exp(value)) / target)
  )
  if not excess(high) < 0 < excess(low):
    return None
  return math.exp(scipy.optimize.brentq(excess, low, high, xtol=1e-3))


@dataclasses.dataclass(frozen=True)
class Prediction:
  """Both sides, fitted on the 8B row, for all rows.

  Attributes:
    workload: lengths.
    factor: which rate was fitted.
    baseline_factor: its value for the synchronous side.
    llamarl_factor: its value for the asynchronous side.
    baseline: plans of the synchronous side, by row.
    llamarl: plans of the asynchronous side, by row.
  """

  workload: Workload
  factor: str
  baseline_factor: float
  llamarl_factor: float
  baseline: Sequence[schedule.Plan]
  llamarl: Sequence[schedule.Plan]

  def speedups(self) -> list[float]:
    """Returns the predicted speed-up of each row."""
    return [
      slow.step_seconds / fast.step_seconds
      for slow, fast in zip(self.baseline, self.llamarl, strict=True)
    ]


def predict(
  workload: Workload = WORKLOAD, factor: str = FACTOR
) -> Prediction | None:
  """Returns the predictions for all rows, or None where no factor fits."""
  sides: list[tuple[float, list[schedule.Plan]]] = []
  for design, target in (
    (jobs.SYNCHRONOUS, ROWS[0].baseline.value),
    (jobs.ASYNCHRONOUS, ROWS[0].llamarl.value),
  ):
    value = fit(design, target or 0.0, factor, workload)
    if value is None:
      return None
    reached = efficiency(factor, value)
    plans = [schedule.best(job(row, reached, workload), design) for row in ROWS]
    sides.append((value, plans))
  (slow, baseline), (fast, llamarl) = sides
  return Prediction(workload, factor, slow, fast, baseline, llamarl)


# What each rung adds to the one before it.
LADDER: tuple[tuple[str, Mapping[str, bool]], ...] = (
  ('synchronous baseline', {}),
  ('placement: two pools, taking turns', {'two_pools': True}),
  ('parallelism: each its own size', {'own_parallelism': True}),
  ('quantization: 8-bit generator', {'quantized': True}),
  ('asynchrony: both at once', {'overlapped': True}),
  (
    'partial rollouts: no waiting for the longest',
    {'refilled': True, 'partial_rollouts': True},
  ),
)


def ladder(prediction: Prediction, row: PaperRow) -> list[tuple[str, float]]:
  """Returns (what was added, step seconds), one ingredient at a time.

  All rungs have the baseline's fitted factor; the last line changes to the
  other side's, which is what the fit leaves unexplained. Factors depend on the
  order in which ingredients are added.
  """
  slow = efficiency(prediction.factor, prediction.baseline_factor)
  given = job(row, slow, prediction.workload)
  used: dict[str, bool] = {}
  rungs = []
  for name, added in LADDER:
    used |= added
    plan = schedule.best(given, jobs.Design(**used))
    rungs.append((name, plan.step_seconds))
  fast = efficiency(prediction.factor, prediction.llamarl_factor)
  plan = schedule.best(job(row, fast, prediction.workload), jobs.Design(**used))
  rungs.append(('software: the fitted factors differ', plan.step_seconds))
  return rungs


def variations(
  prediction: Prediction, row: PaperRow
) -> Iterator[tuple[str, float, float]]:
  """Yields (what is changed, baseline seconds, LlamaRL seconds).

  One assumption at a time is halved or doubled on both sides, the fitted
  factors kept.
  """
  sides = [
    (
      jobs.SYNCHRONOUS,
      job(
        row,
        efficiency(prediction.factor, prediction.baseline_factor),
        prediction.workload,
      ),
    ),
    (
      jobs.ASYNCHRONOUS,
      job(
        row,
        efficiency(prediction.factor, prediction.llamarl_factor),
        prediction.workload,
      ),
    ),
  ]

  def times(change: Mapping[str, object]) -> tuple[float, float]:
    slow, fast = (
      schedule.best(dataclasses.replace(given, **change), design).step_seconds
      for design, given in sides
    )
    return slow, fast

  yield ('nothing', *times({}))
  for name in ('compute', 'memory', 'link', 'kernel_seconds'):
    for scale in (0.5, 2.0):
      results = [
        schedule.best(
          dataclasses.replace(
            given,
            efficiency=dataclasses.replace(
              given.efficiency,
              **{name: getattr(given.efficiency, name) * scale},
            ),
          ),
          design,
        ).step_seconds
        for design, given in sides
      ]
      yield (f'efficiency: {name} x {scale:g}', results[0], results[1])
  given = sides[0][1]
  mean, sigma = given.lengths.mean, given.lengths.sigma
  limit = given.lengths.limit
  for label, change in (
    ('batch 1024', {'batch_size': 1024}),
    ('batch 4096', {'batch_size': 4096}),
    ('prompts x 4', {'prompt_tokens': 4 * given.prompt_tokens}),
    (
      'responses x 0.5',
      {'lengths': lengths_lib.Lengths(mean / 2, sigma, limit / 2)},
    ),
    (
      'responses x 2',
      {'lengths': lengths_lib.Lengths(2 * mean, sigma, 2 * limit)},
    ),
    ('no skew', {'lengths': lengths_lib.Lengths(mean, 0.0, limit)}),
    (
      'sigma 1, limit x 2',
      {'lengths': lengths_lib.Lengths(mean, 1.0, 2 * limit)},
    ),
    ('141 GB a device (H200)', {'device': devices.find('h200')}),
    (
      'latency of networks x 2',
      {
        'device': dataclasses.replace(
          given.device, slow_latency=2 * given.device.slow_latency
        )
      },
    ),
    ('two copies of generator weights', {'weight_copies': 2}),
    ('staleness 2', {'max_staleness': 2}),
  ):
    yield (label, *times(change))


def weight_sync() -> list[tuple[float, float]]:
  """Returns (gathered, direct) seconds of weight publication by row.

  Gathered: all weights in bfloat16 pass through one process and its one link.
  Direct: half of the devices send to replicas of the fewest devices that hold
  the weights in bfloat16, a whole node at least [C]. One factor each, fitted
  on the 8B row.
  """
  device = devices.find(DEVICE)
  raw = []
  for row in ROWS:
    config = catalog.find(row.architecture)
    layout = cost_model.GeneratorLayout(device.domain_size, 1, 1)
    while memory.generator_weights(config, layout) > memory.usable_bytes(
      device
    ):
      layout = dataclasses.replace(layout, tensor=2 * layout.tensor)
    whole = memory.generator_weights(config, layout) * layout.tensor
    half = int(row.num_devices.value or 0) // 2
    direct = cost_model.publication_seconds(
      whole,
      device,
      cost_model.Efficiency(),
      senders=half,
      receivers=layout.tensor,
      replicas=half // layout.tensor,
    )
    raw.append((whole / device.slow_link, direct))
  gathered = (ROWS[0].gathered_sync.value or 0.0) / raw[0][0]
  direct = (ROWS[0].direct_sync.value or 0.0) / raw[0][1]
  return [(gathered * a, direct * b) for a, b in raw]

"""The speed-up statement: our reconstruction, checkable on any instance.

The paper says it proves that its asynchronous design leads to strict speed-up;
its proof was not at hand. What is stated and checked here is a reconstruction:
one memory constraint shared by trainer and generator becomes two, the spare
memory of each side holds a larger batch, and larger batches cost less a
sample.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import math

import numpy as np

# (batch sizes f64[n], devices of the replica) -> seconds a sample f64[n].
SampleSeconds = Callable[[np.ndarray, float], np.ndarray]

_ROUNDS = 3  # Of refining the shared split of memory.
_POINTS = 65  # Of each round.


@dataclasses.dataclass(frozen=True)
class Instance:
  """A cluster, a model and its costs, in the symbols of the statement.

  Attributes:
    num_devices: of the cluster (G0).
    device_bytes: of each (M0).
    batch_size: samples a step (B0).
    weight_bytes: of one copy of the weights (W0).
    train_copies: trainer state in copies of the weights (k_t).
    train_sample_bytes: activations of a sample (A_t).
    generate_copies: generator weights in copies (k_g).
    generate_sample_bytes: cache of a sample (K_g).
    train_seconds: a sample, of one replica (eta_t).
    generate_seconds: likewise (eta_g).
    replica_sizes: devices that a replica may have (m).
  """

  num_devices: float
  device_bytes: float
  batch_size: float
  weight_bytes: float
  train_copies: float
  train_sample_bytes: float
  generate_copies: float
  generate_sample_bytes: float
  train_seconds: SampleSeconds
  generate_seconds: SampleSeconds
  replica_sizes: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Limits:
  """What a real cluster adds: each drops one assumption of the statement.

  Attributes:
    split_unit: devices that move between the pools at a time; 0 = any share.
    max_batch: most samples a replica takes at once, on either side.
    offloaded: synchronous phases swap each other out at no cost, so that each
      has all memory in its turn.
    waits: the asynchronous pools take turns (max_staleness 0).
    publication_seconds: of an asynchronous step, overlapped with nothing.
  """

  split_unit: float = 0.0
  max_batch: float = math.inf
  offloaded: bool = False
  waits: bool = False
  publication_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Synchronous:
  """A co-located configuration and its time.

  Attributes:
    step_seconds: T_s.
    replica_devices: m, the same for both sides.
    train_batch: b_t.
    generate_batch: b_g.
  """

  step_seconds: float
  replica_devices: float
  train_batch: float
  generate_batch: float


@dataclasses.dataclass(frozen=True)
class Asynchronous:
  """A configuration with two pools and its time.

  Attributes:
    step_seconds: T_a.
    train_share: of the devices (theta).
    train_devices: of a trainer replica (m_t).
    train_batch: b_t.
    generate_devices: of a generator replica (m_g).
    generate_batch: b_g.
  """

  step_seconds: float
  train_share: float
  train_devices: float
  train_batch: float
  generate_devices: float
  generate_batch: float


@dataclasses.dataclass(frozen=True)
class Witness:
  """Why the statement holds for an instance, step by step.

  Attributes:
    synchronous: the best synchronous configuration.
    split: the same replica and batches in two pools, theta = a / (a + c): the
      time does not change.
    grown: the same pools with batches grown into the spare memory.
    asynchronous: the best asynchronous configuration, at most `grown`.
    train_spare_bytes: that a trainer replica gains by the split.
    generate_spare_bytes: likewise.
    holds: whether asynchronous < synchronous.
  """

  synchronous: Synchronous
  split: Asynchronous
  grown: Asynchronous
  asynchronous: Asynchronous
  train_spare_bytes: float
  generate_spare_bytes: float
  holds: bool


NO_LIMITS = Limits()


def best_synchronous(
  instance: Instance, limits: Limits = NO_LIMITS
) -> Synchronous:
  """Returns the best co-located configuration.

  T_s = min over m, b_t, b_g of (B0 m / G0) (eta_t(b_t) + eta_g(b_g))
  s.t. k_t W0 + A_t b_t + k_g W0 + K_g b_g <= M0 m

  Both batches are as large as their parts of the memory allow, since seconds a
  sample fall; how it is parted is searched. Any parting that is not the best
  only makes T_s larger, so a witness built on it is as good.

  Args:
    instance: what is planned for.
    limits: of a real cluster.

  Raises:
    ValueError: no replica size holds the weights of both sides.
  """
  found: list[Synchronous] = []
  for m in instance.replica_sizes:
    if m > instance.num_devices:
      continue
    room = _sync_room(instance, m)
    if room <= 0:
      continue
    if limits.offloaded:
      batches = (
        np.array([_train_most(instance, m, limits)]),
        np.array([_generate_most(instance, m, limits)]),
      )
      found.append(_best_parting(instance, m, *batches))
      continue
    low, high = 0.0, 1.0
    for _ in range(_ROUNDS):
      parts = np.linspace(low, high, _POINTS + 2)[1:-1]
      train = parts * room / instance.train_sample_bytes
      generate = (1 - parts) * room / instance.generate_sample_bytes
      best = _best_parting(
        instance,
        m,
        np.minimum(train, limits.max_batch),
        np.minimum(generate, limits.max_batch),
      )
      found.append(best)
      width = (high - low) / (_POINTS + 1)
      middle = best.train_batch * instance.train_sample_bytes / room
      low, high = max(0.0, middle - width), min(1.0, middle + width)
  if not found:
    raise ValueError(
      'no synchronous configuration fits:'
      f' {instance.train_copies + instance.generate_copies} copies of'
      f' {instance.weight_bytes:.3g} bytes need more than'
      f' {instance.device_bytes:.3g} bytes on each of'
      f' {max(instance.replica_sizes)} devices; allow larger replicas'
    )
  return min(found, key=lambda item: item.step_seconds)


def best_asynchronous(
  instance: Instance, limits: Limits = NO_LIMITS
) -> Asynchronous:
  """Returns the best configuration with two pools, in closed form.

  T_a = (B0 / G0) (min m_t eta_t(b_t) + min m_g eta_g(b_g))
  s.t. k_t W0 + A_t b_t <= M0 m_t and k_g W0 + K_g b_g <= M0 m_g,

  at theta = a / (a + c), which makes the two sides take equally long.

  Args:
    instance: what is planned for.
    limits: of a real cluster.

  Raises:
    ValueError: no replica size holds the weights of a side.
  """
  train = _best_side(instance, limits, train=True)
  generate = _best_side(instance, limits, train=False)
  return _two_pools(instance, limits, *train, *generate)


def check(instance: Instance, limits: Limits = NO_LIMITS) -> Witness:
  """Returns whether T_a < T_s, with the configurations that show it.

  Our reconstruction of the paper's statement. It is proved by its own steps:
  the synchronous optimum, put into two pools with theta = a / (a + c), takes
  as long; each pool then has spare memory, batches grow into it, and seconds a
  sample fall strictly.

  Args:
    instance: what is planned for.
    limits: assumptions dropped; with NO_LIMITS and falling seconds a sample
      the statement holds for every instance.
  """
  sync = best_synchronous(instance, limits)
  m = sync.replica_devices
  a = m * _at(instance.train_seconds, sync.train_batch, m)
  c = m * _at(instance.generate_seconds, sync.generate_batch, m)
  split = _two_pools(
    instance, limits, a, m, sync.train_batch, c, m, sync.generate_batch
  )
  b_t = max(sync.train_batch, _train_most(instance, m, limits))
  b_g = max(sync.generate_batch, _generate_most(instance, m, limits))
  grown = _two_pools(
    instance,
    limits,
    m * _at(instance.train_seconds, b_t, m),
    m,
    b_t,
    m * _at(instance.generate_seconds, b_g, m),
    m,
    b_g,
  )
  best = min(
    grown,
    best_asynchronous(instance, limits),
    key=lambda item: item.step_seconds,
  )
  weights = instance.weight_bytes
  return Witness(
    synchronous=sync,
    split=split,
    grown=grown,
    asynchronous=best,
    train_spare_bytes=instance.generate_copies * weights
    + instance.generate_sample_bytes * sync.generate_batch,
    generate_spare_bytes=instance.train_copies * weights
    + instance.train_sample_bytes * sync.train_batch,
    holds=best.step_seconds < sync.step_seconds,
  )


def _two_pools(
  instance: Instance,
  limits: Limits,
  a: float,
  m_t: float,
  b_t: float,
  c: float,
  m_g: float,
  b_g: float,
) -> Asynchronous:
  """Returns the best split of the devices for given replicas and batches.

  max{ B0 a / (theta G0), B0 c / ((1 - theta) G0) }, a = m_t eta_t, c = m_g
  eta_g; their sum where the pools take turns, least at sqrt(a) : sqrt(c).
  """
  unit, whole = limits.split_unit, instance.num_devices
  share = a / (a + c)
  if limits.waits:
    share = math.sqrt(a) / (math.sqrt(a) + math.sqrt(c))
  shares = [share]
  if unit:
    below = math.floor(share * whole / unit) * unit / whole
    shares = [s for s in (below, below + unit / whole) if 0 < s < 1]
    if not shares:
      raise ValueError(
        f'{whole} devices in units of {unit} cannot be split in two pools'
      )
  times = []
  for theta in shares:
    sides = (
      instance.batch_size * a / (theta * whole),
      instance.batch_size * c / ((1 - theta) * whole),
    )
    times.append(sum(sides) if limits.waits else max(sides))
  best = int(np.argmin(times))
  seconds = times[best] + limits.publication_seconds
  return Asynchronous(seconds, shares[best], m_t, b_t, m_g, b_g)


def _best_side(
  instance: Instance, limits: Limits, *, train: bool
) -> tuple[float, float, float]:
  """Returns (m eta(b), m, b) of the cheapest replica of one side."""
  most = _train_most if train else _generate_most
  seconds = instance.train_seconds if train else instance.generate_seconds
  found = []
  for m in instance.replica_sizes:
    batch = most(instance, m, limits)
    if batch > 0 and m <= instance.num_devices:
      found.append((m * _at(seconds, batch, m), m, batch))
  if not found:
    raise ValueError(
      f'no replica of the {"trainer" if train else "generator"} fits; allow'
      ' larger replicas'
    )
  return min(found)


def _best_parting(
  instance: Instance, m: float, train: np.ndarray, generate: np.ndarray
) -> Synchronous:
  """Returns the best of several pairs of batches, f64[n] each."""
  times = (
    instance.batch_size
    * m
    / instance.num_devices
    * (
      instance.train_seconds(train, m) + instance.generate_seconds(generate, m)
    )
  )
  best = int(np.argmin(times))
  return Synchronous(
    float(times[best]), m, float(train[best]), float(generate[best])
  )


def _sync_room(instance: Instance, m: float) -> float:
  """Returns the bytes of a replica that both sides' batches share."""
  copies = instance.train_copies + instance.generate_copies
  return instance.device_bytes * m - copies * instance.weight_bytes


def _train_most(instance: Instance, m: float, limits: Limits) -> float:
  room = instance.device_bytes * m
  room -= instance.train_copies * instance.weight_bytes
  return min(limits.max_batch, room / instance.train_sample_bytes)


def _generate_most(instance: Instance, m: float, limits: Limits) -> float:
  room = instance.device_bytes * m
  room -= instance.generate_copies * instance.weight_bytes
  return min(limits.max_batch, room / instance.generate_sample_bytes)


def _at(seconds: SampleSeconds, batch: float, m: float) -> float:
  return float(seconds(np.array([batch]), m)[0])

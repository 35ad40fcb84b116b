"""A run as discrete events: executors, admission, staleness, publication.

What formulas average over is drawn here: response lengths, reward latencies,
failures. The timeline and the records of each step are those of a real run,
read off by the same functions, so that one report draws both.
"""

from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import numpy as np
import simpy

from llamarl_jax import types
from llamarl_jax.scheduling import admission
from llamarl_jax.scheduling import timeline_records
from llamarl_jax.theory import lengths as lengths_lib
from llamarl_jax.theory import simulated_state

# Events of a simpy process.
_Events = Generator[simpy.Event, Any, None]

ADMISSION = admission.ADMISSION
COMPLETION = admission.COMPLETION


@dataclasses.dataclass(frozen=True)
class Settings:
  """A run to be simulated.

  Attributes:
    num_steps: batches to be trained.
    batch_size: groups a batch (N).
    group_size: responses a group (G).
    lengths: of responses.
    num_replicas: of the generator.
    num_slots: responses a replica decodes side by side (S).
    segment_length: decode steps between two commands.
    max_staleness: versions a token may be behind its batch (k).
    decode_seconds: of one step, by active slots.
    train_seconds: of one update, by response tokens of the batch.
    prefill_seconds: of one prompt.
    reward_seconds: mean latency of scoring a group.
    reward_sigma: standard deviation of its logarithm; 0 is always the mean.
    num_reward_workers: groups scored side by side.
    publish_seconds: a replica needs to fetch a version, decoding meanwhile.
    swap_seconds: to hand shared devices over; only if colocated.
    batch_order: 'admission': batch v is the groups v N ... v N + N - 1.
      'completion': the first N groups to complete.
    colocated: whether trainer and generator share devices and take turns.
    failure_seconds: mean time between failures of a replica.
    repair_seconds: until a failed replica is back.
    seed: of everything that is drawn.
  """

  num_steps: int
  batch_size: int
  group_size: int
  lengths: lengths_lib.Lengths
  num_replicas: int
  num_slots: int
  segment_length: int
  max_staleness: int
  decode_seconds: Callable[[int], float]
  train_seconds: Callable[[int], float]
  prefill_seconds: float = 0.0
  reward_seconds: float = 0.0
  reward_sigma: float = 0.0
  num_reward_workers: int = 1_000_000
  publish_seconds: float = 0.0
  swap_seconds: float = 0.0
  batch_order: str = ADMISSION
  colocated: bool = False
  failure_seconds: float = math.inf
  repair_seconds: float = 0.0
  seed: int = 0

  def __post_init__(self) -> None:
    if self.batch_order not in (ADMISSION, COMPLETION):
      raise ValueError(
        f'batch_order is {self.batch_order!r}; it must be {ADMISSION!r} or'
        f' {COMPLETION!r}'
      )
    for name in ('num_replicas', 'num_slots', 'segment_length', 'group_size'):
      if getattr(self, name) < 1:
        raise ValueError(
          f'{name} is {getattr(self, name)}; it must be at least 1'
        )


@dataclasses.dataclass(frozen=True)
class Simulation:
  """What a simulated run did.

  Attributes:
    tracks: of the timeline, by executor process; seconds from 0.
    records: of each step, under the names of a real run's metrics; those of
      learning are absent.
    num_lost_groups: started again after a failure.
  """

  tracks: timeline_records.Tracks
  records: tuple[Mapping[str, Any], ...]
  num_lost_groups: int

  def step_seconds(self, skip: int = 0) -> float:
    """Returns the mean step, the first `skip` left out as warming up."""
    steps = [record['step_seconds'] for record in self.records[skip:]]
    return float(np.mean(steps))

  def bubble(self, track: str, skip: int = 0, drain: int = 0) -> float:
    """Returns the idle share of an executor, first and last steps left out."""
    count = len(self.records) - drain
    steps = [record['step_seconds'] for record in self.records[:count]]
    return timeline_records.bubble_fraction(
      self.tracks.get(track, ()),
      float(np.sum(steps[:skip])),
      float(np.sum(steps)),
      idle_names=timeline_records.IDLE_NAMES,
    )


def simulate(settings: Settings) -> Simulation:
  """Returns what a run with these settings does.

  Args:
    settings: of the run; equal settings give equal runs.
  """
  run = _Run(settings)
  run.env.run(until=run.finished)
  run.stop()
  return Simulation(run.tracks, tuple(run.records), run.num_lost_groups)


class _Run:
  """The processes of one run, around one simpy environment."""

  def __init__(self, settings: Settings):
    self.env = simpy.Environment()
    self._s = settings
    self._rng = np.random.default_rng(settings.seed)
    self._rule = admission.make_rule(
      settings.batch_order,
      settings.batch_size,
      settings.num_steps,
      settings.max_staleness,
    )
    self._ready: dict[int, simulated_state.Group] = {}
    self._lost: list[int] = []
    self._next_index = 0
    self._num_trained = 0
    self._version = 0
    self._published = 0
    self._changed = self.env.event()
    # Shared devices, one part for each replica; the trainer takes all parts.
    self._parts = simpy.Resource(self.env, settings.num_replicas)
    self._owners = ['generator'] * settings.num_replicas
    # By track, (name, start) of what is being done.
    self._under_way: dict[str, tuple[str, float]] = {}
    self._scorers = simpy.Resource(self.env, settings.num_reward_workers)
    self._replicas = [
      simulated_state.Replica(f'generator/{i}', settings.num_slots)
      for i in range(settings.num_replicas)
    ]
    self.finished = self.env.event()
    self.records: list[dict[str, Any]] = []
    self.tracks: dict[str, list[types.Span]] = {'trainer': [], 'reward': []}
    self.num_lost_groups = 0
    self.env.process(self._train())
    self.env.process(self._publish())
    for replica in self._replicas:
      self.tracks[replica.name] = []
      process = self.env.process(self._generate(replica))
      if math.isfinite(settings.failure_seconds):
        self.env.process(self._fail(process))

  def _change(self) -> None:
    """Wakes every process that waits for something to become possible."""
    changed, self._changed = self._changed, self.env.event()
    changed.succeed()

  def _span(self, track: str, name: str, start: float, **details: Any) -> None:
    self.tracks[track].append(types.Span(name, start, self.env.now, details))

  def stop(self) -> None:
    """Ends the spans of what is still being done."""
    for track, (name, start) in self._under_way.items():
      self._span(track, name, start)

  # Generation.

  def _generate(self, replica: simulated_state.Replica) -> _Events:
    while True:
      try:
        yield from self._decode_forever(replica)
      except simpy.Interrupt:
        self._under_way.pop(replica.name, None)
        lost = replica.fail()
        self.num_lost_groups += len(lost)
        self._lost = sorted(self._lost + lost)
        # Others may start the lost groups at once.
        self._change()
        yield self.env.timeout(self._s.repair_seconds)
        replica.held = replica.fetched = self._published

  def _decode_forever(self, replica: simulated_state.Replica) -> _Events:
    while True:
      replica.held = max(replica.held, replica.fetched)
      self._admit(replica)
      started = replica.fill_slots()
      if not replica.active:
        yield self._changed
        continue
      steps = min(self._s.segment_length, replica.most_remaining())
      seconds = steps * self._s.decode_seconds(replica.active)
      seconds += started * self._s.prefill_seconds
      yield from self._work(replica.name, 'segment', seconds)
      for group in replica.advance(steps):
        self.env.process(self._score(group))

  def _admit(self, replica: simulated_state.Replica) -> None:
    """Starts groups on a replica while it has slots for them."""
    while replica.room > 0:
      if self._lost and self._may_start(self._lost[0], replica.held):
        index = self._lost.pop(0)
      elif self._may_start(self._next_index, replica.held):
        index = self._next_index
        self._next_index += 1
      else:
        return
      # The lengths of a group depend on its index only, not on when it runs.
      rng = np.random.default_rng((self._s.seed, index))
      lengths = self._s.lengths.sample(rng, self._s.group_size)
      replica.take(simulated_state.Group(index, lengths))

  def _may_start(self, index: int, held: int) -> bool:
    # One that was lost is outstanding itself.
    others = self._next_index - (index < self._next_index)
    return self._rule.may_start(
      index,
      held,
      trainer_version=self._version,
      num_outstanding=others - self._num_trained * self._s.batch_size,
    )

  def _fail(self, process: simpy.Process) -> _Events:
    while True:
      yield self.env.timeout(self._rng.exponential(self._s.failure_seconds))
      process.interrupt()
      yield self.env.timeout(self._s.repair_seconds)

  # Scoring.

  def _score(self, group: simulated_state.Group) -> _Events:
    with self._scorers.request() as worker:
      yield worker
      start = self.env.now
      yield self.env.timeout(self._reward_latency(group.index))
      self._span('reward', 'score', start)
    self._ready[group.index] = group
    self._change()

  def _reward_latency(self, index: int) -> float:
    mean, sigma = self._s.reward_seconds, self._s.reward_sigma
    if not sigma or not mean:
      return mean
    rng = np.random.default_rng((self._s.seed, index, 1))
    return float(rng.lognormal(math.log(mean) - sigma**2 / 2, sigma))

  # Training.

  def _train(self) -> _Events:
    window = 0.0
    while self._num_trained < self._s.num_steps:
      batch = self._take_batch()
      if batch is None:
        yield self._changed
        continue
      tokens = sum(int(group.lengths.sum()) for group in batch)
      seconds = self._s.train_seconds(tokens)
      yield from self._work('trainer', 'train_step', seconds)
      self._record(batch, tokens, window)
      window = self.env.now
      self._num_trained += 1
      self._version += 1
      self._change()
    self.finished.succeed()

  def _take_batch(self) -> list[simulated_state.Group] | None:
    """Returns the next batch, or None while it is not complete."""
    size = self._s.batch_size
    if self._s.batch_order == ADMISSION:
      start = self._num_trained * size
      wanted = list(range(start, start + size))
    else:
      # Insertion order is the order of completion.
      wanted = list(self._ready)[:size]
    if len(wanted) < size or any(i not in self._ready for i in wanted):
      return None
    return [self._ready.pop(index) for index in wanted]

  def _record(
    self, batch: list[simulated_state.Group], tokens: int, window: float
  ) -> None:
    """Writes down a step under the names a real run uses."""
    now = self.env.now
    tracks = {track: self._recent(track, window) for track in self.tracks}
    versions = simulated_state.tokens_by_version(batch)
    counts = {self._version - key: versions[key] for key in versions}
    lengths = np.concatenate([group.lengths for group in batch])
    seconds = max(now - window, 1e-9)
    named = {'generate_seconds': 'segment', 'publish_seconds': 'fetch'}
    self.records.append(
      {
        'step': len(self.records),
        'step_seconds': seconds,
        'tokens_per_second': tokens / seconds,
        'response_length_mean': float(lengths.mean()),
        'response_length_max': float(lengths.max()),
        'staleness_counts': counts,
        'staleness_mean': timeline_records.staleness_mean(counts),
        'staleness_max': float(timeline_records.staleness_max(counts)),
        **{
          key: timeline_records.busy_seconds(
            timeline_records.spans_named(tracks, name), window, now
          )
          for key, name in named.items()
        },
        **{
          f'bubble_{track}': timeline_records.bubble_fraction(
            spans, window, now, idle_names=timeline_records.IDLE_NAMES
          )
          for track, spans in tracks.items()
        },
      }
    )

  def _work(self, track: str, name: str, seconds: float) -> _Events:
    """Works on a track, in turns where the devices are shared."""
    if not self._s.colocated:
      yield from self._timed(track, name, seconds)
      return
    trains = track == 'trainer'
    parts = (
      range(self._s.num_replicas) if trains else [int(track.split('/')[1])]
    )
    owner = 'trainer' if trains else 'generator'
    turns = [self._parts.request() for _ in parts]
    try:
      yield simpy.AllOf(self.env, turns)
      if any(self._owners[part] != owner for part in parts):
        yield from self._timed(track, 'swap', self._s.swap_seconds)
        for part in parts:
          self._owners[part] = owner
      yield from self._timed(track, name, seconds)
    finally:
      for turn in turns:
        turn.cancel() if not turn.triggered else self._parts.release(turn)

  def _timed(self, track: str, name: str, seconds: float) -> _Events:
    """Lets time pass on a track."""
    start = self.env.now
    self._under_way[track] = (name, start)
    yield self.env.timeout(seconds)
    del self._under_way[track]
    self._span(track, name, start)

  def _recent(self, track: str, start: float) -> list[types.Span]:
    """Returns spans that reach beyond `start`, with what is being done."""
    spans = []
    for span in reversed(self.tracks[track]):
      # In the order of their ends.
      if span.stop <= start:
        break
      spans.append(span)
    if track in self._under_way:
      name, since = self._under_way[track]
      spans.append(types.Span(name, since, self.env.now))
    return spans

  # Weights.

  def _publish(self) -> _Events:
    """Gives replicas the newest version, one publication at a time."""
    while True:
      if self._published == self._version:
        yield self._changed
        continue
      self._published = self._version
      start = self.env.now
      yield self.env.timeout(self._s.publish_seconds)
      for replica in self._replicas:
        replica.fetched = self._published
        self._span(replica.name, 'fetch', start, version=self._published)
      self._change()

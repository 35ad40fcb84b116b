"""The best synchronous and asynchronous configuration of a real cluster.

What `speedup` states for smooth curves, searched over what can be built:
whole devices, parallel sizes, whole micro-batches, slots that fit, an 8-bit or
a bfloat16 generator. A `jobs.Design` says which of the paper's ingredients are
used, so that each can be added by itself.
"""

from collections.abc import Iterator
import dataclasses
import math

from llamarl_jax.theory import arithmetic
from llamarl_jax.theory import cost_model
from llamarl_jax.theory import generation
from llamarl_jax.theory import jobs
from llamarl_jax.theory import memory


@dataclasses.dataclass(frozen=True)
class Plan:
  """A configuration with what it takes.

  Attributes:
    trainer: its layout.
    generator: its layout.
    train_seconds: an update.
    generate_seconds: a batch of samples.
    publish_seconds: weights from trainer to generators.
    swap_seconds: offloading, both ways.
    step_seconds: the whole step.
    trainer_bubble: share of the step in which the trainer waits.
    generator_bubble: likewise.
    trainer_parts: bytes of a trainer's device.
    generator_parts: bytes of a generator's device.
  """

  trainer: cost_model.TrainLayout
  generator: cost_model.GeneratorLayout
  train_seconds: float
  generate_seconds: float
  publish_seconds: float
  swap_seconds: float
  step_seconds: float
  trainer_bubble: float
  generator_bubble: float
  trainer_parts: memory.Parts
  generator_parts: memory.Parts


@dataclasses.dataclass(frozen=True)
class _Trainer:
  layout: cost_model.TrainLayout
  seconds: float
  nbytes: float  # Of a device.


@dataclasses.dataclass(frozen=True)
class _Generator:
  layout: cost_model.GeneratorLayout
  seconds: float


def best(job: jobs.Job, design: jobs.Design) -> Plan:
  """Returns the fastest configuration of a design.

  Args:
    job: what is to be trained, and on what.
    design: which ingredients may be used.

  Raises:
    ValueError: nothing fits; says what comes nearest and by how much it is
      too much.
  """
  search = _split_search if design.two_pools else _shared_search
  plans = list(search(job, design))
  if not plans:
    raise ValueError(_explain_misfit(job, design))
  return min(plans, key=lambda plan: plan.step_seconds)


def best_synchronous(job: jobs.Job) -> Plan:
  """Returns the fastest co-located configuration, taking turns."""
  return best(job, jobs.SYNCHRONOUS)


def best_asynchronous(job: jobs.Job) -> Plan:
  """Returns the fastest configuration with all of the paper's ingredients."""
  return best(job, jobs.ASYNCHRONOUS)


def step_seconds(
  train: float, generate: float, delays: float, *, max_staleness: int
) -> float:
  """Returns the time from one step to the next, in the steady state.

  step = max(train, generate, (train + generate + delays) / (k + 1))

  Each side works on one batch at a time; a batch goes around generation,
  scoring, training and publication, and k + 1 of them may be under way. With
  k = 0 the last term is the sum: a synchronous step. One publication at a time
  is assumed to take less than a step.

  Args:
    train: seconds of an update.
    generate: seconds of a batch of samples.
    delays: seconds in which a batch or its weights occupy neither side.
    max_staleness: versions a token may be behind its batch (k).
  """
  turn = (train + generate + delays) / (max_staleness + 1)
  return max(train, generate, turn)


def _split_search(job: jobs.Job, design: jobs.Design) -> Iterator[Plan]:
  """Yields plans with two pools, the best of each split of the devices."""
  unit = job.split_unit or min(job.device.domain_size, 8)
  if job.device.domain_size > 8 and not job.split_unit:
    unit = 4
  room = memory.usable_bytes(job.device)
  for count in range(unit, job.num_devices, unit):
    trainers = _fastest(_trainers(job, count, room, smaller=False))
    if not trainers:
      continue
    others = job.num_devices - count
    generators = _generators(job, design, others, room, {})
    if design.own_parallelism:
      trainers = {0: min(trainers.values(), key=lambda t: t.seconds)}
      pairs = [(trainers[0], generator) for generator in generators]
    else:
      pairs = [
        (trainers[generator.layout.tensor], generator)
        for generator in generators
        if generator.layout.tensor in trainers
      ]
    plans = [_plan(job, design, *pair) for pair in pairs]
    if plans:
      yield min(plans, key=lambda plan: plan.step_seconds)


def _shared_search(job: jobs.Job, design: jobs.Design) -> Iterator[Plan]:
  """Yields plans on shared devices; the shared memory couples the batches."""
  room = memory.usable_bytes(job.device)
  known: dict[cost_model.GeneratorLayout, float] = {}
  trainers = _trainers(job, job.num_devices, room, smaller=not design.offloaded)
  for trainer in trainers:
    left = room if design.offloaded else room - trainer.nbytes
    sizes = None
    if not design.own_parallelism:
      sizes = [trainer.layout.replica_devices]
    for generator in _generators(
      job, design, job.num_devices, left, known, sizes
    ):
      yield _plan(job, design, trainer, generator)


def _trainers(
  job: jobs.Job, num_devices: int, room: float, *, smaller: bool
) -> Iterator[_Trainer]:
  """Yields the trainer layouts on so many devices that fit into `room`.

  Args:
    job: what is to be trained.
    num_devices: of the trainer; what the replicas do not divide is idle.
    room: bytes of a device.
    smaller: whether to yield smaller micro-batches beside the largest; they
      are slower, but leave memory to a generator on the same devices.
  """
  for tensor in _powers_of_two(min(job.max_tensor, num_devices)):
    for fsdp in _powers_of_two(num_devices // tensor):
      data = num_devices // (tensor * fsdp)
      share = math.ceil(job.batch_size / data)
      for remat in arithmetic.TRAIN_PASSES:
        layout = cost_model.TrainLayout(tensor, fsdp, data, fsdp, remat)
        most = memory.most_sequences(
          job.config, layout, tokens=job.sample_tokens, room=room
        )
        if not most:
          continue
        passes = math.ceil(share / most)
        while True:
          # The least that does it in so many passes; each is of whole
          # sequences on every device.
          micro_batch = math.ceil(share / passes / fsdp) * fsdp
          layout = dataclasses.replace(layout, micro_batch=micro_batch)
          parts = memory.trainer(job.config, layout, tokens=job.sample_tokens)
          yield _Trainer(
            layout, _train_seconds(job, layout), memory.total(parts)
          )
          if not smaller or micro_batch == fsdp:
            break
          passes *= 2


def _generators(
  job: jobs.Job,
  design: jobs.Design,
  num_devices: int,
  room: float,
  known: dict[cost_model.GeneratorLayout, float],
  sizes: list[int] | None = None,
) -> list[_Generator]:
  """Returns the generator layouts on so many devices that fit into `room`.

  Args:
    job: what is to be trained.
    design: which ingredients may be used.
    num_devices: of the generator.
    room: bytes of a device.
    known: seconds of layouts, added to.
    sizes: devices of a replica to be tried, None = powers of two.
  """
  dtypes = ['bfloat16', job.quantized] if design.quantized else ['bfloat16']
  found = []
  for tensor in sizes or _powers_of_two(num_devices):
    replicas = num_devices // tensor
    share = math.ceil(job.batch_size / replicas)
    # With partial rollouts k steps of samples may be under way.
    wanted = share * max(1, job.max_staleness * design.partial_rollouts)
    for dtype in dtypes:
      layout = cost_model.GeneratorLayout(
        tensor, replicas, 1, dtype, weight_copies=job.weight_copies
      )
      slots = memory.most_slots(
        job.config, layout, tokens=job.slot_tokens, room=room
      )
      if slots >= 1:
        layout = dataclasses.replace(layout, slots=min(slots, wanted))
        if layout not in known:
          known[layout] = _generate(job, design, layout, share)
        found.append(_Generator(layout, known[layout]))
  return found


def _train_seconds(job: jobs.Job, layout: cost_model.TrainLayout) -> float:
  return float(
    cost_model.train_step(
      job.config,
      job.device,
      job.efficiency,
      layout,
      samples=job.batch_size,
      tokens=job.sample_tokens,
      pairs=job.sample_pairs,
    ).seconds
  )


def _generate(
  job: jobs.Job,
  design: jobs.Design,
  layout: cost_model.GeneratorLayout,
  share: int,
) -> float:
  """Returns the seconds a replica needs for its share of a batch."""
  decoder = generation.Decoder(
    job.config,
    job.device,
    job.efficiency,
    layout,
    job.prompt_tokens,
    job.lengths,
    job.group_size,
  )
  if design.partial_rollouts:
    return job.batch_size / layout.replicas * generation.sample_seconds(decoder)
  return generation.batch_seconds(decoder, share, static=not design.refilled)


def _plan(
  job: jobs.Job, design: jobs.Design, trainer: _Trainer, generator: _Generator
) -> Plan:
  """Returns the plan of a trainer and a generator, with its times."""
  publish = cost_model.publication_seconds(
    memory.generator_weights(job.config, generator.layout)
    * generator.layout.tensor
    / generator.layout.weight_copies,
    job.device,
    job.efficiency,
    senders=trainer.layout.num_devices,
    receivers=generator.layout.tensor,
    replicas=generator.layout.replicas,
  )
  swap = 0.0
  if design.offloaded:
    # Trainer state goes to the host before generation, and comes back.
    state = memory.total(memory.trainer_state(job.config, trainer.layout))
    swap = 2 * state / (job.device.host_link * job.efficiency.link)
  train, generate = trainer.seconds, generator.seconds
  step = step_seconds(
    train,
    generate,
    publish + swap,
    max_staleness=job.max_staleness if design.overlapped else 0,
  )
  return Plan(
    trainer=trainer.layout,
    generator=generator.layout,
    train_seconds=train,
    generate_seconds=generate,
    publish_seconds=publish,
    swap_seconds=swap,
    step_seconds=step,
    trainer_bubble=1.0 - train / step,
    generator_bubble=1.0 - generate / step,
    trainer_parts=memory.trainer(
      job.config, trainer.layout, tokens=job.sample_tokens
    ),
    generator_parts=memory.generator(
      job.config, generator.layout, tokens=job.slot_tokens
    ),
  )


def _fastest(trainers: Iterator[_Trainer]) -> dict[int, _Trainer]:
  """Returns the fastest trainer of each replica size."""
  found: dict[int, _Trainer] = {}
  for trainer in trainers:
    size = trainer.layout.replica_devices
    if size not in found or trainer.seconds < found[size].seconds:
      found[size] = trainer
  return found


def _explain_misfit(job: jobs.Job, design: jobs.Design) -> str:
  """Returns why nothing fits: each side alone, at its smallest."""
  room = memory.usable_bytes(job.device)
  whole = 2 ** int(math.log2(job.num_devices))
  tensor = min(job.max_tensor, whole)
  trainer = cost_model.TrainLayout(tensor, whole // tensor, 1, whole // tensor)
  dtype = job.quantized if design.quantized else 'bfloat16'
  generator = cost_model.GeneratorLayout(
    whole, 1, 1, dtype, weight_copies=job.weight_copies
  )
  lines = [
    f'no configuration fits on {job.num_devices} {job.device.name}; a device,'
    f' with {memory.RESERVE:.0%} of it left free, would hold',
    f'  the trainer alone on {whole}: '
    + memory.explain(
      memory.trainer(job.config, trainer, tokens=job.sample_tokens), room
    ),
    f'  the generator alone on {whole}: '
    + memory.explain(
      memory.generator(job.config, generator, tokens=job.slot_tokens), room
    ),
    'use more devices, or a device with more memory',
  ]
  return '\n'.join(lines)


def _powers_of_two(limit: int) -> list[int]:
  return [2**i for i in range(int(math.log2(limit)) + 1)]

"""The one loop of the project: sends commands, moves records, keeps order.

The controller owns all queues and decides what every executor does next;
executors obey. It never initializes a JAX backend. Under the local launcher
each command runs when it is sent, so the same loop is the sequential program.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import time
from typing import Any

from llamarl_jax import types
from llamarl_jax.channels import broadcast
from llamarl_jax.channels import gather
from llamarl_jax.channels import scatter
from llamarl_jax.channels import weights
from llamarl_jax.controller import observer as observer_lib
from llamarl_jax.controller import replicas
from llamarl_jax.controller.launchers import base
from llamarl_jax.scheduling import admission


@dataclasses.dataclass(frozen=True)
class Executors:
  """The started executors, by role."""

  trainer: base.Handle
  generators: Sequence[base.Handle]
  reward: base.Handle
  reference: base.Handle | None = None


@dataclasses.dataclass
class _Worker:
  """A reward or reference executor with the groups that wait for it."""

  handle: base.Handle
  queue: list[types.Group] = dataclasses.field(default_factory=list)
  busy: bool = False


class Controller:
  """Runs executors and channels until every batch is trained on."""

  def __init__(
    self,
    executors: Executors,
    launcher: base.Launcher,
    rule: admission.AdmissionRule,
    make_request: Callable[[int], types.Request],
    observer: observer_lib.Observer,
    *,
    start_version: types.Version,
    capacity: int,
    command_timeout_seconds: float,
    checkpoint_every: int,
    trained: admission.Trained | None = None,
    drain: bool = False,
  ):
    """Takes the parts.

    Args:
      executors: the started executors.
      launcher: that started them.
      rule: of admission, for the whole run.
      make_request: gives the training request of an admission index.
      observer: of what happens.
      start_version: of the trainer; its batches are those already trained.
      capacity: completions a generator replica may hold at a time, at least
        those of one group.
      command_timeout_seconds: silence of all executors that counts as failure.
      checkpoint_every: train steps between checkpoints.
      trained: groups that batches before `start_version` were made of; None
        for the first ones.
      drain: whether a replica finishes what it holds before each new version.
    """
    self._launcher = launcher
    self._rule = rule
    self._make_request = make_request
    self._observer = observer
    self._timeout = command_timeout_seconds
    self._checkpoint_every = checkpoint_every
    self._trainer = executors.trainer
    self._trainer_busy = False
    self._replicas = [
      replicas.Replica(handle, capacity, drain)
      for handle in executors.generators
    ]
    self._reward = _Worker(executors.reward)
    self._reference = (
      _Worker(executors.reference) if executors.reference else None
    )
    self._prompts = scatter.Scatter('controller', 'generator')
    self._completions = gather.Gather('generator', 'reward')
    self._batches = broadcast.Broadcast('reward', 'trainer')
    self._version = start_version
    self._published: types.Version | None = None
    num_trained = start_version.batches * rule.batch_size
    if trained is None:
      trained = admission.Trained(num_trained)
    self._trained = trained
    self._next_index = self._trained.first_missing()
    self._num_admitted = num_trained
    self._next_training: types.Request | None = None  # Of `_next_index`.
    self._assembler: admission.BatchAssembler[types.Group] = (
      admission.BatchAssembler(rule, trained)
    )
    self._training = False
    self._evaluation: list[types.Request] = []
    self._evaluated: list[types.Group] = []
    self._pending: dict[base.Future, Callable[[Any], None]] = {}
    # By executor with a 'step' under way, when the command was sent.
    self._busy_since: dict[str, float] = {}

  @property
  def version(self) -> types.Version:
    """The version of the trainer's parameters."""
    return self._version

  @property
  def num_lost_groups(self) -> int:
    """Groups admitted in this run that were not trained on."""
    return self._num_outstanding

  @property
  def _num_outstanding(self) -> int:
    """Groups that are admitted and not yet trained on."""
    return self._num_admitted - self._version.batches * self._rule.batch_size

  def evaluate(self, requests: Sequence[types.Request]) -> list[types.Group]:
    """Returns the requests answered by the current policy, and scored.

    Args:
      requests: of the evaluation stream, in admission order.
    """
    self._evaluation, self._evaluated = list(requests), []
    self._drive(lambda: len(self._evaluated) == len(requests))
    return sorted(
      self._evaluated, key=lambda group: group.request.admission_index
    )

  def train(self) -> None:
    """Trains until every batch is consumed and its policy is published."""
    self._training = True
    self._drive(
      lambda: (
        self._version.batches == self._rule.num_batches
        and not self._trainer_busy
        and all(r.held == self._version for r in self._replicas)
      )
    )
    self._training = False

  def _drive(self, done: Callable[[], bool]) -> None:
    """Dispatches commands and takes answers until `done()`."""
    while not done():
      self._dispatch()
      if not self._pending:
        raise RuntimeError(
          'deadlock: no executor has work. '
          f'trainer at {self._version}, next group {self._next_index},'
          f' replicas hold {[r.held for r in self._replicas]}'
        )
      ready = self._launcher.wait(list(self._pending), self._timeout)
      for future in ready:
        self._pending.pop(future)(future.result())

  def _call(
    self,
    handle: base.Handle,
    then: Callable[[Any], None],
    method: str,
    *args: Any,
  ) -> None:
    """Sends a command; its answer goes to `then`."""
    self._pending[handle.call(method, *args)] = then

  def _step(
    self,
    handle: base.Handle,
    then: Callable[[types.StepReport], None],
    inputs: Sequence[Any],
    commit_version: types.Version | None = None,
  ) -> None:
    """Sends the command `step`; its report goes to the observer and `then`."""

    def finish(report: types.StepReport) -> None:
      self._busy_since.pop(handle.name, None)
      self._observer.report(handle.name, report)
      then(report)

    self._busy_since[handle.name] = time.time()
    self._call(handle, finish, 'step', inputs, commit_version)

  def _dispatch(self) -> None:
    """Gives every idle executor what it may do now."""
    self._publish_if_due()
    self._offer_again()
    if self._training and not self._trainer_busy and self._assembler.ready():
      self._trainer_busy = True
      (batch,) = self._batches.route(self._assembler.take(), 1)
      self._step(
        self._trainer,
        functools.partial(self._after_train_step, batch),
        batch,
      )
    for worker in filter(None, (self._reward, self._reference)):
      if worker.queue and not worker.busy:
        self._feed(worker)
    self._dispatch_generators()

  # Weights.

  def _publish_if_due(self) -> None:
    """Publishes the newest version once no replica is fetching an older one.

    At most one version is outstanding, so the trainer keeps one copy; a
    version that was overtaken meanwhile is never published.
    """
    due = self._published is None or self._published < self._version
    idle = not any(
      r.fetching or r.manifest or r.draining for r in self._replicas
    )
    if self._trainer_busy or not due or not idle:
      return
    self._published = self._version
    self._call(self._trainer, self._note_trainer, 'publish')
    for replica in self._replicas:
      replica.fetching = True
      if replica.destination is None:
        replica.destination = base.ask(
          self._launcher, replica.handle, 'destination'
        )
      self._offer(replica)

  def _offer(self, replica: replicas.Replica) -> None:
    self._call(
      self._trainer,
      functools.partial(self._after_offer, replica),
      'offer',
      replica.destination,
    )

  def _offer_again(self) -> None:
    """Offers what replicas failed to fetch, a while after they said so."""
    for replica in self._replicas:
      if replica.retry_at is not None and replica.retry_at <= time.time():
        replica.retry_at = None
        self._offer(replica)

  def _after_offer(
    self, replica: replicas.Replica, manifest: weights.Manifest
  ) -> None:
    replica.manifest = manifest

  def _after_begin_fetch(self, replica: replicas.Replica, answer: None) -> None:
    del answer
    replica.busy = False

  def _note_trainer(self, report: types.StepReport) -> None:
    self._observer.report(self._trainer.name, report)

  # Training.

  def _after_train_step(
    self, batch: Sequence[types.Group], report: types.StepReport
  ) -> None:
    self._trainer_busy = False
    self._version = self._version._replace(batches=self._version.batches + 1)
    self._observer.train_step(batch, report.metrics, self._busy_since)
    last = self._version.batches == self._rule.num_batches
    if last or self._version.batches % self._checkpoint_every == 0:
      self._publish_if_due()  # Generators need not wait for the disk.
      self._call(self._trainer, self._note_trainer, 'save')

  # Generation.

  def _dispatch_generators(self) -> None:
    idle = [r for r in self._replicas if not r.busy]
    for replica in idle:
      if replica.manifest is not None:
        replica.busy = True
        manifest, replica.manifest = replica.manifest, None
        self._call(
          replica.handle,
          functools.partial(self._after_begin_fetch, replica),
          'begin_fetch',
          manifest,
        )
    idle = [r for r in idle if not r.busy]
    commits = [replica.next_version for replica in idle]
    requests = self._admit(idle)
    for replica, commit, inputs in zip(idle, commits, requests, strict=True):
      if inputs or commit or replica.outstanding or replica.fetching:
        replica.outstanding += sum(r.num_samples for r in inputs)
        replica.busy = True
        replica.held = commit or replica.held
        self._step(
          replica.handle,
          functools.partial(self._after_generation, replica),
          inputs,
          commit,
        )

  def _admit(
    self, idle: Sequence[replicas.Replica]
  ) -> Sequence[Sequence[types.Request]]:
    """Returns for each idle replica the requests it is to start now."""
    versions = [r.next_version or r.held for r in idle]
    room = [r.room for r in idle]
    admitted: list[list[types.Request]] = [[] for _ in idle]
    while (request := self._next_request(versions)) is not None:
      size = request.num_samples
      allowed = [
        left >= size and self._may_start(request, version)
        for left, version in zip(room, versions, strict=True)
      ]
      if not any(allowed):
        break
      place = self._prompts.place(room, allowed)
      room[place] -= size
      admitted[place].append(request)
      if request.stream == types.Stream.EVALUATION:
        self._evaluation.pop(0)
      else:
        self._num_admitted += 1
        self._next_index = self._trained.first_missing(self._next_index + 1)
        self._next_training = None
    return admitted

  def _next_request(
    self, versions: Sequence[types.Version | None]
  ) -> types.Request | None:
    """Returns the request that is first in line, if a version may start it."""
    if self._evaluation:
      return self._evaluation[0]
    held = max((v.batches for v in versions if v is not None), default=-1)
    if not self._training or not self._group_may_start(held):
      return None
    if self._next_training is None:
      self._next_training = self._make_request(self._next_index)
    return self._next_training

  def _may_start(
    self, request: types.Request, version: types.Version | None
  ) -> bool:
    """Returns whether a replica that holds `version` may start the request."""
    if version is None:
      return False
    if request.stream == types.Stream.EVALUATION:
      # An evaluation is of one policy: the newest.
      return version == self._version
    return self._group_may_start(version.batches)

  def _group_may_start(self, held: int) -> bool:
    """Returns whether the next group may start where `held` is in use."""
    return self._rule.may_start(
      self._next_index,
      held,
      trainer_version=self._version.batches,
      num_outstanding=self._num_outstanding,
    )

  def _after_generation(
    self, replica: replicas.Replica, report: types.StepReport
  ) -> None:
    replica.note(report, time.time())
    self._reward.queue = self._completions.merge(
      [self._reward.queue, report.outputs]
    )

  # Scoring.

  def _feed(self, worker: _Worker) -> None:
    groups, worker.queue = worker.queue, []
    worker.busy = True
    self._step(
      worker.handle,
      functools.partial(self._after_scoring, worker),
      groups,
    )

  def _after_scoring(self, worker: _Worker, report: types.StepReport) -> None:
    worker.busy = False
    for group in report.outputs:
      if group.request.stream == types.Stream.EVALUATION:
        self._evaluated.append(group)
      elif worker is self._reward and self._reference is not None:
        self._reference.queue.append(group)
      else:
        self._assembler.add(group.request.admission_index, group)

"""The controller against executors that answer after random delays.

No JAX and no processes: a launcher that finishes one command at a time, each
when its random delay is over, and executors that only keep count.
"""

import collections
import random

from absl.testing import parameterized
import numpy as np
import pytest

from llamarl_jax import types
from llamarl_jax.controller import controller as controller_lib
from llamarl_jax.controller import replicas
from llamarl_jax.scheduling import admission


class _Future:
  def __init__(self, due, answer):
    self.due = due
    self._answer = answer

  def result(self):
    return self._answer


class _Launcher:
  """Finishes the command whose delay ends first."""

  def __init__(self, seed):
    self.random = random.Random(seed)
    self.now = 0.0
    self.check = lambda: None

  def wait(self, futures, timeout):
    del timeout
    self.check()
    first = min(futures, key=lambda future: future.due)
    self.now = max(self.now, first.due)
    return [first]


class _Handle:
  """An executor whose commands run in order, each with a random delay."""

  def __init__(self, name, launcher, executor):
    self.name = name
    self._launcher = launcher
    self._executor = executor
    self._free_at = 0.0

  def call(self, method, *args):
    delay = self._launcher.random.lognormvariate(0.0, 1.5)
    self._free_at = max(self._free_at, self._launcher.now) + delay
    return _Future(self._free_at, getattr(self._executor, method)(*args))


class _Generator:
  """Keeps requests for a random number of steps.

  Fetches take time, too, and some fail.
  """

  def __init__(self, rng, drain):
    self._rng = rng
    self._drain = drain
    # By index, (version held, version of the trainer) when it was started.
    self.started = {}
    self.lengths = []
    self.trainer_version = lambda: 0
    self._open = []
    self._fetching = None
    self._fetched = None
    self.held = None

  def destination(self):
    return 'here'

  def begin_fetch(self, manifest):
    assert self._fetching is None
    # The spare buffer is free.
    assert self._fetched == self.held
    self._fetching = manifest

  def step(self, inputs, commit_version):
    if commit_version is not None:
      assert commit_version == self._fetched
      assert not (self._drain and self._open)
      # Versions committed by a replica strictly increase.
      assert self.held is None or self.held < commit_version
      self.held = commit_version
    if inputs and self._drain:
      assert self.held == self._fetched
    for request in inputs:
      self._open.append((request, self.held.batches))
      if request.stream == types.Stream.TRAIN:
        assert request.admission_index not in self.started
        versions = (self.held.batches, self.trainer_version())
        self.started[request.admission_index] = versions
    failed = self._fetching is not None and self._rng.random() < 0.2
    if failed:
      self._fetching = None
    elif self._fetching is not None and self._rng.random() < 0.5:
      self._fetched, self._fetching = self._fetching, None
    done = [item for item in self._open if self._ends(item[0])]
    self._open = [item for item in self._open if item not in done]
    return types.StepReport(
      types.Status.PROGRESSED,
      outputs=[self._group(*item) for item in done],
      fetched=self._fetched,
      # Of some groups a part is made.
      unfinished=sum(
        self._rng.randint(1, request.num_samples) for request, _ in self._open
      ),
      fetch_failed=failed,
    )

  def _ends(self, request):
    """Returns whether a group ends in this step; long ones rarely do."""
    return self._rng.random() < (0.4 if request.max_new_tokens == 2 else 0.1)

  def _group(self, request, started):
    length = request.max_new_tokens
    if request.stream == types.Stream.TRAIN:
      self.lengths.append(length)
    # The first token is of the version the group started under.
    versions = np.array([started] + [self.held.batches] * (length - 1))
    completion = types.Completion(
      admission_index=request.admission_index,
      sample_index=0,
      tokens=np.ones(length, int),
      log_probs=np.zeros(length),
      versions=versions,
      finish_reason=types.FinishReason.STOP,
      text='',
    )
    return types.Group(request, (completion,) * request.num_samples)


class _Reward:
  def step(self, groups, commit_version):
    assert commit_version is None
    return types.StepReport(types.Status.PROGRESSED, outputs=list(groups))


class _Trainer:
  """Keeps batches; the last checkpoint is what it had saved."""

  def __init__(self, saved=(), crash_at=None):
    self.version = types.Version(int(crash_at is None), len(saved))
    self.batches = list(saved)
    self.saved = list(saved)
    self._crash_at = crash_at
    self._published = None

  def publish(self):
    self._published = self.version
    return types.StepReport(types.Status.PROGRESSED)

  def offer(self, destination):
    assert destination == 'here'
    return self._published

  def step(self, groups, commit_version):
    assert commit_version is None
    if self.version.batches == self._crash_at:
      raise InterruptedError
    self.batches.append((self.version.batches, groups))
    self.version = self.version._replace(batches=self.version.batches + 1)
    return types.StepReport(types.Status.PROGRESSED)

  def save(self):
    self.saved = list(self.batches)
    return types.StepReport(types.Status.PROGRESSED)


class _Observer:
  def report(self, executor, report):
    del executor, report

  def train_step(self, groups, metrics, busy_since):
    del groups, metrics, busy_since


def _request(stream, index, size, length=2):
  return types.Request(
    admission_index=index,
    stream=stream,
    problem=types.Problem(index, '', ''),
    prompt_tokens=(1,),
    num_samples=size,
    temperature=1.0,
    max_new_tokens=length,
  )


class _Simulation:
  """A random program, run to its end, perhaps over a crash.

  Attributes:
    rule: of admission.
    batches: (version, groups) in the order they were trained on, those that a
      crash undid left out.
    generators: of the last life.
  """

  def __init__(self, seed, order, *, drain=False, crash=False):
    self._rng = random.Random(seed)
    rng, self._drain = self._rng, drain
    self.rule = admission.make_rule(
      order,
      batch_size=rng.randint(1, 4),
      num_batches=rng.randint(1, 6),
      max_staleness=rng.randint(0, 3),
    )
    self._size = rng.randint(1, 3)
    self._launcher = _Launcher(seed + 1)
    trainer = _Trainer()
    if crash:
      trainer = _Trainer(crash_at=rng.randrange(self.rule.num_batches))
      with pytest.raises(InterruptedError):
        self._controller(trainer).train()
      trainer = _Trainer(trainer.saved)
    self._run(self._controller(trainer), trainer.version.batches)
    self.batches = trainer.batches

  def _controller(self, trainer):
    rng, rule, launcher = self._rng, self.rule, self._launcher
    self.generators = [
      _Generator(rng, self._drain) for _ in range(rng.randint(1, 3))
    ]
    trained = admission.Trained()
    for _, groups in trainer.batches:
      trained = trained.add(g.request.admission_index for g in groups)
    controller = controller_lib.Controller(
      controller_lib.Executors(
        trainer=_Handle('trainer', launcher, trainer),
        generators=[
          _Handle(f'generator_{i}', launcher, generator)
          for i, generator in enumerate(self.generators)
        ],
        reward=_Handle('reward', launcher, _Reward()),
      ),
      launcher,
      rule,
      self._training_request,
      _Observer(),
      start_version=trainer.version,
      capacity=rng.randint(self._size, 5 * self._size),
      command_timeout_seconds=1.0,
      checkpoint_every=rng.randint(1, 4),
      trained=trained,
      drain=self._drain,
    )
    for generator in self.generators:
      generator.trainer_version = lambda: controller.version.batches
    launcher.check = lambda: self._check(controller, len(trained))
    return controller

  def _training_request(self, index):
    # One group in five is long, as addressed randomness says.
    length = 20 if random.Random(index).random() < 0.2 else 2
    return _request(types.Stream.TRAIN, index, self._size, length)

  def _run(self, controller, start):
    wanted = self._rng.randint(0, 5)
    requests = [_request(types.Stream.EVALUATION, i, 1) for i in range(wanted)]
    before = controller.evaluate(requests)
    controller.train()
    after = controller.evaluate(requests)
    for groups, version in ((before, start), (after, self.rule.num_batches)):
      assert [g.request.admission_index for g in groups] == list(range(wanted))
      for group in groups:
        np.testing.assert_array_equal(group.completions[0].versions, version)
    assert controller.num_lost_groups == 0

  def _check(self, controller, num_trained_before):
    """No replica idles for nothing, and no more is outstanding than may be."""
    for replica in controller._replicas:
      if replica.busy or not controller._training or replica.held is None:
        continue
      # It is not free while a group waits that it may start.
      assert replica.outstanding == 0
      assert not controller._group_may_start(replica.held.batches)
    rule = self.rule
    admitted = sum(len(generator.started) for generator in self.generators)
    trained = controller.version.batches * rule.batch_size - num_trained_before
    assert admitted - trained <= (rule.max_staleness + 1) * rule.batch_size


def _indices(groups):
  return [group.request.admission_index for group in groups]


def _oldest(groups):
  return min(group.completions[0].versions.min() for group in groups)


class SimulationTest(parameterized.TestCase):
  """A deadlock raises; what executors see is checked by themselves."""

  @pytest.fixture(autouse=True)
  def _no_waiting(self, monkeypatch):
    """Offers again at once what was not fetched."""
    monkeypatch.setattr(replicas, '_RETRY_SECONDS', 0.0)

  def test_admission_order_over_a_thousand_seeds(self):
    excess = []
    for seed in range(1000):
      # One in four finishes what it holds before each new version.
      run = _Simulation(seed, 'admission', drain=seed % 4 == 0)
      self.assertLen(run.batches, run.rule.num_batches)
      for version, groups in run.batches:
        start = version * run.rule.batch_size
        # Batch v is exactly its groups, in order, each trained on once.
        expected = list(range(start, start + run.rule.batch_size))
        self.assertEqual(_indices(groups), expected)
        age = version - _oldest(groups)
        excess.append(age - run.rule.max_staleness)
    self.assertLessEqual(max(excess), 0)
    # The bound is reached, so staleness is exercised.
    self.assertEqual(max(excess), 0)

  def test_completion_order_over_a_thousand_seeds(self):
    excess, lag, overtaken = [], [], 0
    for seed in range(1000):
      run = _Simulation(seed, 'completion', drain=seed % 4 == 0)
      k, size = run.rule.max_staleness, run.rule.batch_size
      self.assertEqual([v for v, _ in run.batches], [*range(len(run.batches))])
      indices = []
      for version, groups in run.batches:
        self.assertLen(groups, size)
        indices += _indices(groups)
        excess.append(version - _oldest(groups) - k)
      # No group is dropped, and none is trained on twice.
      self.assertCountEqual(indices, range(run.rule.num_groups))
      overtaken += indices != sorted(indices)
      if k == 0:  # The synchronous algorithm.
        self.assertEqual(indices, sorted(indices))
      starts = [s for g in run.generators for s in g.started.values()]
      lag += [trainer - held - k for held, trainer in starts]
      # Long groups are trained on as often as they are sampled.
      lengths = collections.Counter(
        g.completions[0].tokens.size
        for _, groups in run.batches
        for g in groups
      )
      sampled = [length for g in run.generators for length in g.lengths]
      self.assertEqual(lengths, collections.Counter(sampled))
    # Groups start under weights that are fresh enough, and the bound is met.
    self.assertEqual(max(lag), 0)
    # Stragglers outlive the versions that admission order would wait in.
    self.assertGreater(max(excess), 0)
    self.assertGreater(overtaken, 300)

  @parameterized.parameters('admission', 'completion')
  def test_a_crash_undoes_what_was_not_saved_and_no_more(self, order):
    for seed in range(150):
      run = _Simulation(seed, order, crash=True)
      self.assertLen(run.batches, run.rule.num_batches)
      indices = [i for _, groups in run.batches for i in _indices(groups)]
      self.assertCountEqual(indices, range(run.rule.num_groups))
      if order == 'admission':
        self.assertEqual(indices, sorted(indices))

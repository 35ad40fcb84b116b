"""The controller against executors that answer after random delays.

No JAX and no processes: a launcher that finishes one command at a time, each
when its random delay is over, and executors that only keep count.
"""

import random

from absl.testing import parameterized
import numpy as np

from llamarl_jax import types
from llamarl_jax.controller import controller as controller_lib
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

  def wait(self, futures, timeout):
    del timeout
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
  """Keeps requests for a random number of steps; fetches take time too."""

  def __init__(self, rng):
    self._rng = rng
    self._open = []
    self._fetching = None
    self._fetched = None
    self.held = None

  def destination(self):
    return 'here'

  def begin_fetch(self, manifest):
    assert self._fetching is None
    self._fetching = manifest

  def step(self, inputs, commit_version):
    if commit_version is not None:
      assert commit_version == self._fetched
      # Versions committed by a replica strictly increase.
      assert self.held is None or self.held < commit_version
      self.held = commit_version
    self._open += [(request, self.held.batches) for request in inputs]
    if self._fetching is not None and self._rng.random() < 0.5:
      self._fetched, self._fetching = self._fetching, None
    done = [item for item in self._open if self._rng.random() < 0.4]
    self._open = [item for item in self._open if item not in done]
    return types.StepReport(
      types.Status.PROGRESSED,
      outputs=[self._group(*item) for item in done],
      fetched=self._fetched,
    )

  def _group(self, request, started):
    # The first token is of the version the group started under.
    versions = np.array([started, self.held.batches])
    completion = types.Completion(
      admission_index=request.admission_index,
      sample_index=0,
      tokens=np.array([1, 2]),
      log_probs=np.zeros(2),
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
  def __init__(self):
    self.version = types.Version(0, 0)
    self.batches = []
    self._published = None

  def publish(self):
    self._published = self.version
    return types.StepReport(types.Status.PROGRESSED)

  def offer(self, destination):
    assert destination == 'here'
    return self._published

  def step(self, groups, commit_version):
    assert commit_version is None
    self.batches.append((self.version.batches, groups))
    self.version = types.Version(0, self.version.batches + 1)
    return types.StepReport(types.Status.PROGRESSED)

  def save(self):
    return types.StepReport(types.Status.PROGRESSED)


class _Observer:
  def report(self, executor, report):
    del executor, report

  def train_step(self, groups, metrics, busy_since):
    del groups, metrics, busy_since


def _request(stream, index, size):
  return types.Request(
    admission_index=index,
    stream=stream,
    problem=types.Problem(index, '', ''),
    prompt_tokens=(1,),
    num_samples=size,
    temperature=1.0,
    max_new_tokens=2,
  )


def _simulate(seed):
  """Runs a random program; returns its rule and the batches trained on."""
  rng = random.Random(seed)
  rule = admission.AdmissionRule(
    batch_size=rng.randint(1, 4),
    num_batches=rng.randint(1, 6),
    max_staleness=rng.randint(0, 3),
  )
  size = rng.randint(1, 3)
  launcher = _Launcher(seed + 1)
  trainer = _Trainer()
  controller = controller_lib.Controller(
    controller_lib.Executors(
      trainer=_Handle('trainer', launcher, trainer),
      generators=[
        _Handle(f'generator_{i}', launcher, _Generator(rng))
        for i in range(rng.randint(1, 3))
      ],
      reward=_Handle('reward', launcher, _Reward()),
    ),
    launcher,
    rule,
    lambda index: _request(types.Stream.TRAIN, index, size),
    _Observer(),
    start_version=types.Version(0, 0),
    capacity=rng.randint(size, 5 * size),
    command_timeout_seconds=1.0,
    checkpoint_every=rng.randint(1, 4),
  )
  wanted = rng.randint(0, 5)
  requests = [_request(types.Stream.EVALUATION, i, 1) for i in range(wanted)]
  before = controller.evaluate(requests)
  controller.train()
  after = controller.evaluate(requests)
  for groups, version in ((before, 0), (after, rule.num_batches)):
    assert [g.request.admission_index for g in groups] == list(range(wanted))
    for group in groups:
      np.testing.assert_array_equal(group.completions[0].versions, version)
  assert controller.num_lost_groups == 0
  return rule, trainer.batches


class SimulationTest(parameterized.TestCase):
  def test_admission_order_over_a_thousand_seeds(self):
    excess = []
    for seed in range(1000):
      # A deadlock raises.
      rule, batches = _simulate(seed)
      self.assertLen(batches, rule.num_batches)
      for version, groups in batches:
        indices = [group.request.admission_index for group in groups]
        start = version * rule.batch_size
        # Batch v is exactly its groups, in order, each trained on once.
        self.assertEqual(indices, list(range(start, start + rule.batch_size)))
        oldest = min(g.completions[0].versions.min() for g in groups)
        excess.append(version - oldest - rule.max_staleness)
    self.assertLessEqual(max(excess), 0)
    # The bound is reached, so staleness is exercised.
    self.assertEqual(max(excess), 0)

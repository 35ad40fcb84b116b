"""The speed-up statement: it holds where assumed, and fails where it is not."""

import dataclasses
import math
import tempfile

from absl.testing import parameterized
import hypothesis
from hypothesis import configuration
from hypothesis import strategies as st
import numpy as np

from llamarl_jax.theory import speedup

# Hypothesis keeps files between runs, by default where pytest was started.
_FILES = tempfile.TemporaryDirectory(prefix='llamarl_jax_hypothesis_')
configuration.set_hypothesis_home_dir(_FILES.name)

SIZES = (4.0, 8.0, 16.0, 64.0)


def _falling(kind, fixed, scale):
  """Returns seconds a sample that strictly fall with the batch."""
  curves = {
    'weights read once': lambda b: fixed + scale / b,
    'power': lambda b: fixed + scale * b**-0.3,
    'logarithm': lambda b: fixed + scale / np.log1p(1 + b),
  }
  # Replicas of more devices are faster, but not in proportion.
  return lambda b, m: curves[kind](b) / m**0.8


def _instance(draw):
  """Returns an instance from draw(low, high), log-uniform, and draw(list)."""
  kinds = ['weights read once', 'power', 'logarithm']
  return speedup.Instance(
    num_devices=256.0,
    device_bytes=80.0,
    batch_size=draw(64.0, 4096.0),
    weight_bytes=draw(1.0, 140.0),
    train_copies=draw(1.0, 9.0),
    train_sample_bytes=draw(0.1, 20.0),
    generate_copies=draw(0.5, 2.0),
    generate_sample_bytes=draw(0.1, 20.0),
    train_seconds=_falling(draw(kinds), draw(0.01, 1.0), draw(0.01, 10.0)),
    generate_seconds=_falling(draw(kinds), draw(0.01, 1.0), draw(0.01, 10.0)),
    replica_sizes=SIZES,
  )


def _random_draw(rng):
  def draw(low, high=None):
    if high is None:
      return low[rng.integers(len(low))]
    return float(math.exp(rng.uniform(math.log(low), math.log(high))))

  return draw


@st.composite
def _instances(hypothesis_draw):
  def draw(low, high=None):
    if high is None:
      return hypothesis_draw(st.sampled_from(low))
    return hypothesis_draw(st.floats(low, high))

  return _instance(draw)


def _fits(instance):
  copies = instance.train_copies + instance.generate_copies
  return copies * instance.weight_bytes < instance.device_bytes * SIZES[-1]


SETTINGS = hypothesis.settings(
  deadline=None,
  database=None,
  derandomize=True,
  max_examples=100,
  # Found is enough: shrinking what was found takes most of the time.
  phases=(hypothesis.Phase.generate,),
  suppress_health_check=list(hypothesis.HealthCheck),
)


class StatementTest(parameterized.TestCase):
  def test_none_of_ten_thousand_instances_contradicts_it(self):
    rng = np.random.default_rng(0)
    count = 0
    while count < 10_000:
      instance = _instance(_random_draw(rng))
      if not _fits(instance):
        continue
      count += 1
      sizes = (SIZES[rng.integers(3)], SIZES[-1])
      instance = dataclasses.replace(instance, replica_sizes=sizes)
      witness = speedup.check(instance)
      assert witness.holds, witness
      # The steps of the argument, one by one.
      sync = witness.synchronous
      assert math.isclose(
        witness.split.step_seconds, sync.step_seconds, rel_tol=1e-9
      )
      assert witness.grown.step_seconds < witness.split.step_seconds
      assert witness.asynchronous.step_seconds <= witness.grown.step_seconds
      assert witness.train_spare_bytes > 0
      assert witness.generate_spare_bytes > 0

  @SETTINGS
  @hypothesis.given(_instances())
  def test_no_instance_is_found_that_contradicts_it(self, instance):
    hypothesis.assume(_fits(instance))
    self.assertTrue(speedup.check(instance).holds)

  @parameterized.parameters(
    # The devices move between the pools in large units.
    dict(split_unit=128.0),
    # Neither batch can grow: it is bounded by something else than memory.
    dict(max_batch=0.5),
    # Synchronous phases have all of the memory, each in its turn.
    dict(offloaded=True),
    # The pools wait for each other.
    dict(waits=True),
    # Publication costs more than the larger batches gain.
    dict(publication_seconds=1000.0),
  )
  def test_without_an_assumption_an_instance_contradicts_it(self, **limits):
    limits = speedup.Limits(**limits)

    def contradicts(instance):
      return _fits(instance) and not speedup.check(instance, limits).holds

    found = hypothesis.find(_instances(), contradicts, settings=SETTINGS)
    # It is the dropped assumption that does it.
    self.assertTrue(speedup.check(found).holds)

  def test_flat_seconds_gain_nothing(self):
    instance = dataclasses.replace(
      _instance(_random_draw(np.random.default_rng(1))),
      weight_bytes=10.0,
      train_seconds=lambda b, m: 0.0 * b + 0.3 / m,
      generate_seconds=lambda b, m: 0.0 * b + 0.7 / m,
    )
    witness = speedup.check(instance)
    # T = B0 / G0 (0.3 + 0.7) both ways.
    expected = instance.batch_size / 256.0
    self.assertAlmostEqual(witness.synchronous.step_seconds, expected)
    self.assertAlmostEqual(witness.asynchronous.step_seconds, expected)

  def test_one_falling_side_is_enough(self):
    instance = dataclasses.replace(
      _instance(_random_draw(np.random.default_rng(2))),
      weight_bytes=10.0,
      train_seconds=lambda b, m: 0.0 * b + 0.3 / m,
    )
    self.assertTrue(speedup.check(instance).holds)

  def test_what_does_not_fit_is_said(self):
    instance = dataclasses.replace(
      _instance(_random_draw(np.random.default_rng(3))), weight_bytes=1e6
    )
    with self.assertRaisesRegex(ValueError, 'allow larger replicas'):
      speedup.check(instance)


class ClosedFormTest(parameterized.TestCase):
  @parameterized.parameters(*range(20))
  def test_asynchronous_equals_brute_force(self, seed):
    """Every (theta, m_t, b_t, m_g, b_g) of a grid; theta in 400 steps."""
    rng = np.random.default_rng(100 + seed)
    instance = _instance(_random_draw(rng))
    while not _fits(instance):
      instance = _instance(_random_draw(rng))
    i = instance
    theta = np.arange(1, 400) / 400
    sides = {}
    for name, copies, each, seconds in (
      ('train', i.train_copies, i.train_sample_bytes, i.train_seconds),
      (
        'generate',
        i.generate_copies,
        i.generate_sample_bytes,
        i.generate_seconds,
      ),
    ):
      costs = []
      for m in SIZES:
        room = i.device_bytes * m - copies * i.weight_bytes
        if room > 0:
          batches = room / each * np.arange(1, 26) / 25
          costs += list(m * seconds(batches, m))
      sides[name] = np.array(costs)
    scale = i.batch_size / i.num_devices
    brute = np.min(
      np.maximum(
        scale * sides['train'][None, :, None] / theta[:, None, None],
        scale * sides['generate'][None, None, :] / (1 - theta[:, None, None]),
      )
    )
    closed = speedup.best_asynchronous(instance)
    # A step of theta changes a side by at most step / min(theta, 1 - theta).
    share = min(closed.train_share, 1 - closed.train_share)
    self.assertGreaterEqual(brute, closed.step_seconds * (1 - 1e-12))
    slack = 1 / 400 / share
    self.assertLessEqual(brute, closed.step_seconds * (1 + 2 * slack))

  @parameterized.parameters(*range(20))
  def test_synchronous_equals_brute_force(self, seed):
    rng = np.random.default_rng(200 + seed)
    instance = _instance(_random_draw(rng))
    while not _fits(instance):
      instance = _instance(_random_draw(rng))
    i = instance
    best = math.inf
    for m in SIZES:
      copies = i.train_copies + i.generate_copies
      room = i.device_bytes * m - copies * i.weight_bytes
      if room > 0:
        part = np.arange(1, 20_000) / 20_000
        train = i.train_seconds(part * room / i.train_sample_bytes, m)
        generate = i.generate_seconds(
          (1 - part) * room / i.generate_sample_bytes, m
        )
        seconds = i.batch_size * m / i.num_devices * (train + generate)
        best = min(best, float(np.min(seconds)))
    found = speedup.best_synchronous(instance).step_seconds
    np.testing.assert_allclose(found, best, rtol=1e-4)

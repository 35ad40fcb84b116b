"""Whole runs with separate JAX processes under Ray."""

import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from absl.testing import parameterized
import jax
import numpy as np
import pytest

from experiments import train
from llamarl_jax import types
from llamarl_jax.checkpoints import run_state
from llamarl_jax.controller import builder
from llamarl_jax.controller import recorder
from llamarl_jax.controller.launchers import base
from llamarl_jax.controller.launchers import ray_processes
from llamarl_jax.models import llama
from tests.oracles import tiny

ROOT = pathlib.Path(__file__).parents[2]
# An executor that dies must end the run within this time.
MAX_SECONDS_TO_FAIL = 20


def _run(config, workdir):
  """Returns the summary of a run and the groups of each batch."""
  batches = []

  class Keeping(recorder.Recorder):
    def train_step(self, groups, metrics, busy_since):
      batches.append(groups)
      super().train_step(groups, metrics, busy_since)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(recorder, 'Recorder', Keeping)
    summary = train.run(config, workdir, stream=io.StringIO())
  return summary, batches


def _params(config, workdir):
  """Returns the parameters of the last checkpoint."""
  plan = builder.build(config, workdir)
  settings = plan.program.of_role('trainer')[0].arguments['settings']
  abstract = jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(
      s.shape,
      s.dtype,
      sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    ),
    llama.abstract_params(settings.source.model),
  )
  return run_state.load_params(workdir / 'checkpoints', abstract)


def _completions(batches):
  return [c for batch in batches for group in batch for c in group.completions]


class RayRunTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _workdir(self, tmp_path):
    self.path = tmp_path

  def test_equals_the_local_launcher_bit_for_bit(self):
    local, local_batches = _run(tiny.get_config(), self.path / 'local')
    config = tiny.get_config(launcher__name='ray')
    remote, batches = _run(config, self.path / 'ray')
    self.assertEqual(remote['parameter_digest'], local['parameter_digest'])
    self.assertEqual(remote['accuracy_after'], local['accuracy_after'])
    for ours, theirs in zip(
      _completions(batches), _completions(local_batches), strict=True
    ):
      np.testing.assert_array_equal(ours.tokens, theirs.tokens)
      np.testing.assert_array_equal(ours.log_probs, theirs.log_probs)
    pids = {p['pid'] for p in remote['processes']}
    self.assertLen(pids, 3)
    self.assertNotIn(os.getpid(), pids)

  def test_sharded_trainer_and_generator_equal_one_device(self):
    one, one_batches = _run(tiny.get_config(), self.path / 'one')
    config = tiny.get_config(
      launcher__name='ray',
      trainer__num_devices=2,
      trainer__fsdp=2,
      generator__num_devices=2,
      generator__tensor=2,
    )
    two, batches = _run(config, self.path / 'two')
    self.assertEqual(two['num_steps'], 3)
    # What the replica holds in its own sharding is what the trainer has.
    self.assertEqual(
      two['replica_digests'], {'generator_0': two['parameter_digest']}
    )
    devices = {p['name']: p['num_devices'] for p in two['processes']}
    self.assertEqual(devices, {'trainer': 2, 'generator_0': 2, 'reward': 0})
    # Sums are taken in another order: equal to rounding. The first batch is
    # sampled from the same parameters; 2e-5 is the bound between two ways of
    # computing a tiny model's log-probs.
    first = zip(
      _completions(batches[:1]), _completions(one_batches[:1]), strict=True
    )
    for ours, theirs in first:
      np.testing.assert_array_equal(ours.tokens, theirs.tokens)
      np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=2e-5)
    # Three steps of Adam at 1e-2 move a parameter by up to 3e-2; rounding is
    # amplified where a gradient is near 0, so a few may differ by a step.
    ours = jax.tree.leaves(_params(config, self.path / 'two'))
    theirs = jax.tree.leaves(_params(tiny.get_config(), self.path / 'one'))
    difference = np.concatenate(
      [
        np.abs(np.asarray(a) - np.asarray(b)).ravel()
        for a, b in zip(ours, theirs, strict=True)
      ]
    )
    self.assertLess(np.quantile(difference, 0.99), 1e-4)
    self.assertLess(difference.max(), 2e-2)
    self.assertEqual(one['num_steps'], 3)


class FailureTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _workdir(self, tmp_path):
    self.path = tmp_path

  @parameterized.parameters('generator_0', 'reward')
  def test_a_killed_process_ends_the_run(self, victim):
    process = subprocess.Popen(
      [
        sys.executable,
        '-m',
        'experiments.train',
        '--config=tests/oracles/tiny.py',
        f'--workdir={self.path / "run"}',
        '--config.launcher.name=ray',
        '--config.num_steps=500',
      ],
      cwd=ROOT,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    try:
      pid = None
      for line in process.stdout:
        found = re.match(rf'\s+{victim}\s+process (\d+)', line)
        pid = int(found[1]) if found else pid
        if re.match(r'step +2/', line):
          break
      self.assertIsNotNone(pid)
      os.kill(pid, signal.SIGKILL)
      start = time.monotonic()
      rest, _ = process.communicate(timeout=MAX_SECONDS_TO_FAIL + 10)
      self.assertLess(time.monotonic() - start, MAX_SECONDS_TO_FAIL)
      self.assertEqual(process.returncode, 1)
      self.assertIn(f'executor {victim} failed', rest)
    finally:
      process.kill()
      process.wait()
      process.stdout.close()

  def test_an_executor_that_raises_shows_its_traceback(self):
    config = tiny.get_config(launcher__name='ray')
    plan = builder.build(config, self.path)
    launcher = ray_processes.RayLauncher(address='local', platform='cpu')
    try:
      handle = launcher.start(plan.program.of_role('generator')[0])
      with pytest.raises(base.ExecutorError) as caught:
        base.ask(
          launcher, handle, 'step', [plan.task.training_request(0)], None
        )
      self.assertEqual(caught.value.name, 'generator_0')
      self.assertIn('no parameters yet', caught.value.reason)
      self.assertIn('generator.py', caught.value.reason)
      # It stays usable: only its caller decides what an error means.
      self.assertEqual(
        base.ask(launcher, handle, 'step', [], None).status,
        types.Status.STARVED,
      )
    finally:
      launcher.close()

  def test_a_factory_that_raises_is_named(self):
    config = tiny.get_config(launcher__name='ray')
    plan = builder.build(config, self.path)
    node = plan.program.of_role('reward')[0]
    broken = type(node)(
      node.name, node.role, node.factory, {'no_such_argument': 1}, 0
    )
    launcher = ray_processes.RayLauncher(address='local', platform='cpu')
    try:
      handle = launcher.start(broken)
      with pytest.raises(base.ExecutorError, match='no_such_argument'):
        base.answer(launcher, handle.describe())
    finally:
      launcher.close()

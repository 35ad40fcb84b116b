"""A trainer of two processes publishes to a generator, in one JAX world.

By `collective` all are commanded together; by `transfer` the generator asks
both processes of the trainer for what each owns.
"""

import multiprocessing
import os
import pathlib
import socket
import subprocess
import sys

from absl.testing import parameterized
import numpy as np
import pytest

from llamarl_jax.channels import transfer
from llamarl_jax.channels import weights
from tests.channels import world_process

pytestmark = pytest.mark.skipif(
  bool(transfer.unavailable_reason()), reason='jaxlib has no transfer library'
)

_ROOT = pathlib.Path(__file__).parents[2]
_ANSWER_SECONDS = 120.0
_NUM_PROCESSES = 3


def _free_port():
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]


class _Process:
  def __init__(self, index, address):
    ours, theirs = multiprocessing.Pipe()
    self._commands = ours
    self._process = subprocess.Popen(
      [
        sys.executable,
        world_process.__file__,
        str(index),
        str(_NUM_PROCESSES),
        address,
        str(theirs.fileno()),
      ],
      env={
        **os.environ,
        'JAX_PLATFORMS': 'cpu',
        'XLA_FLAGS': '--xla_force_host_platform_device_count=2',
        'PYTHONPATH': str(_ROOT),
      },
      pass_fds=[theirs.fileno()],
    )
    theirs.close()

  def send(self, *command):
    self._commands.send(command)

  def answer(self):
    if not self._commands.poll(_ANSWER_SECONDS):
      raise TimeoutError(f'No answer in {_ANSWER_SECONDS} s.')
    return self._commands.recv()

  def kill(self):
    self._process.kill()
    self._process.wait()


class WorldTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    address = f'127.0.0.1:{_free_port()}'
    processes = [_Process(i, address) for i in range(_NUM_PROCESSES)]
    for process in processes:
      cls.addClassCleanup(process.kill)
    *cls.trainer, cls.generator = processes

  def _ask_trainer(self, *command):
    """Returns the answers of its processes, commanded together."""
    for process in self.trainer:
      process.send(*command)
    return [process.answer() for process in self.trainer]

  @parameterized.parameters(*world_process.TRANSPORTS)
  def test_twenty_publications(self, transport):
    self.generator.send('request', transport)
    destination = self.generator.answer()
    for batches in range(1, 21):
      published = self._ask_trainer('publish', transport, batches)
      self.assertEqual(published[0], published[1])
      manifest = weights.merge_offers(
        self._ask_trainer('offer', transport, destination)
      )
      self.generator.send('fetch', transport, manifest)
      self._ask_trainer('serve', transport, destination)
      version, digests, arrays = self.generator.answer()
      self.assertEqual(version, (0, batches))
      self.assertEqual(digests, published[0])
      for name, expected in world_process.values(batches).items():
        np.testing.assert_array_equal(arrays[name], expected, err_msg=name)

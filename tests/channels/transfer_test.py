"""The transfer transport between real processes.

The publisher is a process of its own with two simulated devices; the
subscriber is this process, with its own two.
"""

import contextlib
import dataclasses
import importlib.util
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time

from absl.testing import parameterized
import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding
import numpy as np
import pytest

from llamarl_jax.channels import registry
from llamarl_jax.channels import transfer
from llamarl_jax.channels import weights
from llamarl_jax.sharding import digest
from llamarl_jax.sharding import mesh as mesh_lib

pytestmark = pytest.mark.skipif(
  bool(transfer.unavailable_reason()), reason='jaxlib has no transfer library'
)

_SCRIPT = pathlib.Path(__file__).with_name('publisher_process.py')
_ROOT = _SCRIPT.parents[2]
_ANSWER_SECONDS = 120.0


def _load_script():
  spec = importlib.util.spec_from_file_location('publisher_process', _SCRIPT)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


_publisher_process = _load_script()


class _Publisher:
  """Speaks to a publisher process."""

  def __init__(self):
    ours, theirs = multiprocessing.Pipe()
    self._commands = ours
    environment = {
      **os.environ,
      'JAX_PLATFORMS': 'cpu',
      'XLA_FLAGS': '--xla_force_host_platform_device_count=2',
      'PYTHONPATH': str(_ROOT),
    }
    self.process = subprocess.Popen(
      [sys.executable, str(_SCRIPT), str(theirs.fileno())],
      env=environment,
      pass_fds=[theirs.fileno()],
    )
    theirs.close()

  def ask(self, name, argument=None):
    """Returns the answer to one command; raises if none comes."""
    self._commands.send((name, argument))
    if not self._commands.poll(_ANSWER_SECONDS):
      raise TimeoutError(f'No answer to {name} in {_ANSWER_SECONDS} s.')
    return self._commands.recv()

  def kill(self):
    """Ends the process at once, as a crash would."""
    self.process.kill()
    self.process.wait()
    self._commands.close()


@contextlib.contextmanager
def _publisher():
  publisher = _Publisher()
  try:
    yield publisher
  finally:
    publisher.kill()


def _shardings(layout):
  two = mesh_lib.make_mesh({'tensor': 2}, jax.devices()[:2])
  tensor = {
    'embedding': P('tensor', None),
    'mlp/up': P(None, None, 'tensor'),
    'norm': P(None),
    'quantized': P(None, 'tensor'),
    'scale': P(),
  }
  by_layout = {
    'tensor': lambda name: NamedSharding(two, tensor[name]),
    'replicated': lambda name: NamedSharding(two, P()),
    'first': lambda name: SingleDeviceSharding(jax.devices()[0]),
    'second': lambda name: SingleDeviceSharding(jax.devices()[1]),
  }
  return {name: by_layout[layout](name) for name in _publisher_process.LEAVES}


def _subscriber(layout='tensor', *, deadline_seconds=60.0):
  return registry.TRANSPORTS['transfer'].subscriber(
    'generator',
    _publisher_process.specs(),
    _shardings(layout),
    weights.TransportSettings(deadline_seconds=deadline_seconds),
  )


def _fetch(subscriber, manifest):
  subscriber.begin(manifest)
  return _wait_and_take(subscriber)


def _wait_and_take(subscriber):
  while not subscriber.ready():
    time.sleep(0.001)
  return subscriber.take()


def _never_offered(manifest):
  """The manifest with numbers that nobody has offered anything under."""
  pulls = tuple(
    dataclasses.replace(pull, uuid=pull.uuid + 1_000_000)
    for pull in manifest.offer['pulls']
  )
  return dataclasses.replace(manifest, offer={**manifest.offer, 'pulls': pulls})


class TransferTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.publisher = cls.enterClassContext(_publisher())
    cls.batches = 0

  def _publish(self):
    type(self).batches += 1
    return self.batches, self.publisher.ask('publish', self.batches)

  def _offer(self, subscriber):
    return self.publisher.ask('offer', subscriber.request())

  @parameterized.parameters('tensor', 'replicated', 'first', 'second')
  def test_delivers_what_the_trainer_has(self, layout):
    batches, digests = self._publish()
    subscriber = _subscriber(layout)
    manifest = self._offer(subscriber)
    taken = _fetch(subscriber, manifest)
    self.assertEqual(taken.version, (0, batches))
    self.assertEqual(digest.tree_digests(taken.params), digests)
    expected = _publisher_process.values(batches)
    for name, leaf in taken.params.items():
      np.testing.assert_array_equal(leaf, expected[name], err_msg=name)
      self.assertEqual(leaf.sharding, _shardings(layout)[name])
    self.assertEqual(
      subscriber.report.bytes,
      sum(
        shard.data.nbytes
        for leaf in taken.params.values()
        for shard in leaf.addressable_shards
      ),
    )

  def test_rows_arrive_as_columns(self):
    # Shards of equal size in another layout: a pull of shard i into shard i
    # would succeed here, with wrong values. One int8 leaf is laid out so.
    batches, _ = self._publish()
    subscriber = _subscriber('tensor')
    manifest = self._offer(subscriber)
    boxes = [
      s.box
      for pull in manifest.offer['pulls']
      for s in pull.slices
      if s.leaf == 'quantized'
    ]
    self.assertLen(boxes, 4)
    taken = _fetch(subscriber, manifest)
    leaf = taken.params['quantized']
    expected = _publisher_process.values(batches)['quantized']
    self.assertEqual(leaf.sharding.spec, P(None, 'tensor'))
    for shard in leaf.addressable_shards:
      np.testing.assert_array_equal(shard.data, expected[shard.index])

  def test_a_fetch_survives_the_next_publication(self):
    first, _ = self._publish()
    subscriber = _subscriber()
    manifest = self._offer(subscriber)
    second, _ = self._publish()
    taken = _fetch(subscriber, manifest)
    self.assertEqual(taken.version.batches, first)
    np.testing.assert_array_equal(
      taken.params['embedding'], _publisher_process.values(first)['embedding']
    )
    taken = _fetch(subscriber, self._offer(subscriber))
    self.assertEqual(taken.version.batches, second)

  def test_an_offer_never_made_ends_at_the_deadline(self):
    batches, _ = self._publish()
    subscriber = _subscriber(deadline_seconds=0.3)
    manifest = self._offer(subscriber)
    started = time.monotonic()
    with pytest.raises(
      weights.WeightTransferError, match=rf'batches={batches}\) did not arrive'
    ):
      _fetch(subscriber, _never_offered(manifest))
    self.assertLess(time.monotonic() - started, 5.0)
    taken = _fetch(subscriber, self._offer(subscriber))
    self.assertEqual(taken.version.batches, batches)

  def test_a_corrupted_leaf_is_refused_and_the_next_fetch_works(self):
    self._publish()
    subscriber = _subscriber()
    manifest = self._offer(subscriber)
    leaves = tuple(
      dataclasses.replace(leaf, digest=leaf.digest ^ (1 << 40))
      if leaf.path == 'norm'
      else leaf
      for leaf in manifest.leaves
    )
    with pytest.raises(weights.WeightTransferError, match='leaf norm of'):
      _fetch(subscriber, dataclasses.replace(manifest, leaves=leaves))
    batches, digests = self._publish()
    taken = _fetch(subscriber, self._offer(subscriber))
    self.assertEqual(taken.version.batches, batches)
    self.assertEqual(digest.tree_digests(taken.params), digests)

  def test_one_server_a_process(self):
    _subscriber()
    with pytest.raises(ValueError, match='a process has one'):
      registry.TRANSPORTS['transfer'].publisher(
        weights.TransportSettings(num_addresses=3)
      )


class KilledPublisherTest(parameterized.TestCase):
  def test_is_an_error_and_not_a_hang(self):
    with _publisher() as publisher:
      publisher.ask('publish', 1)
      under_way = _subscriber(deadline_seconds=20.0)
      begun_later = _subscriber(deadline_seconds=0.3)
      manifest = publisher.ask('offer', under_way.request())
      # One fetch waits for an offer when the publisher dies ...
      under_way.begin(_never_offered(manifest))
      self.assertFalse(under_way.ready())
      publisher.kill()
      started = time.monotonic()
      with pytest.raises(weights.WeightTransferError, match='was lost'):
        _wait_and_take(under_way)
      # ... and one begins when it is already dead.
      begun_later.begin(manifest)
      with pytest.raises(
        weights.WeightTransferError, match=r'was lost|did not arrive'
      ):
        _wait_and_take(begun_later)
      self.assertLess(time.monotonic() - started, 30.0)

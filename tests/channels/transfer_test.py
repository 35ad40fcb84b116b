"""The transfer transport between real processes, and what may go wrong there.

The publisher is a process of its own with four simulated devices; the
subscriber is this process, with its own two.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import signal
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

from llamarl_jax.channels import desk
from llamarl_jax.channels import registry
from llamarl_jax.channels import transfer
from llamarl_jax.channels import watch as watch_lib
from llamarl_jax.channels import weights
from llamarl_jax.sharding import digest
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import reshard
from tests.channels import publisher_process

pytestmark = pytest.mark.skipif(
  bool(transfer.unavailable_reason()), reason='jaxlib has no transfer library'
)

_ROOT = pathlib.Path(__file__).parents[2]
_ANSWER_SECONDS = 120.0


class _Publisher:
  """Speaks to a publisher process."""

  def __init__(self):
    ours, theirs = multiprocessing.Pipe()
    self._commands = ours
    count = publisher_process.NUM_DEVICES
    environment = {
      **os.environ,
      'JAX_PLATFORMS': 'cpu',
      'XLA_FLAGS': f'--xla_force_host_platform_device_count={count}',
      'PYTHONPATH': str(_ROOT),
    }
    self.process = subprocess.Popen(
      [sys.executable, publisher_process.__file__, str(theirs.fileno())],
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
    'large': P(None, 'tensor'),
    'mlp/up': P(None, None, 'tensor'),
    'norm': P(None),
    'quantized': P(None, 'tensor'),
    'scale': P(),
    'values': P('tensor', None),
  }
  by_layout = {
    'tensor': lambda name: NamedSharding(two, tensor[name]),
    'replicated': lambda name: NamedSharding(two, P()),
    'first': lambda name: SingleDeviceSharding(jax.devices()[0]),
    'second': lambda name: SingleDeviceSharding(jax.devices()[1]),
  }
  return {name: by_layout[layout](name) for name in publisher_process.LEAVES}


def _subscriber(layout='tensor', **settings):
  given = {'deadline_seconds': 60.0, **publisher_process.SETTINGS, **settings}
  return registry.TRANSPORTS['transfer'].subscriber(
    'generator',
    publisher_process.specs(),
    _shardings(layout),
    weights.TransportSettings(**given),
  )


def _fetch(subscriber, manifest):
  subscriber.begin(manifest)
  while not subscriber.ready():
    time.sleep(0.001)
  return subscriber.take()


class TransferTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.publisher = cls.enterClassContext(_publisher())
    cls.batches = 0

  def _publish(self, kind='named'):
    type(self).batches += 1
    return self.batches, self.publisher.ask('publish', (self.batches, kind))

  def _offer(self, subscriber):
    return self.publisher.ask('offer', subscriber.request())

  def _fault(self, **faults):
    self.publisher.ask('fault', faults)

  def _check_next_publication(self, subscriber):
    batches, digests = self._publish()
    taken = _fetch(subscriber, self._offer(subscriber))
    self.assertEqual(taken.version, (0, batches))
    self.assertEqual(digest.tree_digests(taken.params), digests)

  @parameterized.parameters('tensor', 'replicated', 'first', 'second')
  def test_delivers_what_the_trainer_has(self, layout):
    batches, digests = self._publish()
    subscriber = _subscriber(layout)
    manifest = self._offer(subscriber)
    taken = _fetch(subscriber, manifest)
    self.assertEqual(taken.version, (0, batches))
    self.assertEqual(digest.tree_digests(taken.params), digests)
    expected = publisher_process.values(batches)
    for name, leaf in taken.params.items():
      np.testing.assert_array_equal(leaf, expected[name], err_msg=name)
      self.assertEqual(leaf.sharding, _shardings(layout)[name])
    report = subscriber.report
    self.assertEqual(
      report.bytes,
      sum(
        shard.data.nbytes
        for leaf in taken.params.values()
        for shard in leaf.addressable_shards
      ),
    )
    self.assertEqual(report.attempts, 1)
    # Of over a megabyte, no more than the window was held twice.
    window = publisher_process.SETTINGS['window_bytes']
    self.assertGreater(report.staging_bytes, 0)
    self.assertLessEqual(report.staging_bytes, window)

  def test_random_leaves_and_shardings(self):
    leaves = publisher_process.random_leaves()
    self.assertGreaterEqual(len(leaves), 40)
    rng = np.random.default_rng(1)
    two = mesh_lib.make_mesh({'x': 2}, jax.devices()[:2])
    shardings = {
      name: NamedSharding(
        two, publisher_process.random_layout(rng, shape, {'x': 2})
      )
      for name, ((shape, _), _) in leaves.items()
    }
    batches, digests = self._publish('random')
    subscriber = registry.TRANSPORTS['transfer'].subscriber(
      'generator',
      publisher_process.specs(leaves),
      shardings,
      weights.TransportSettings(deadline_seconds=60.0),
    )
    taken = _fetch(subscriber, self._offer(subscriber))
    expected = publisher_process.values(batches, leaves)
    for name, leaf in taken.params.items():
      np.testing.assert_array_equal(leaf, expected[name], err_msg=name)
      self.assertEqual(leaf.sharding, shardings[name])
    self.assertEqual(digest.tree_digests(taken.params), digests)

  def test_rows_arrive_as_columns(self):
    # Shards of equal size in another layout: a pull of shard i into shard i
    # would succeed here, with wrong values. One int8 leaf is laid out so.
    batches, _ = self._publish()
    subscriber = _subscriber('tensor')
    manifest = self._offer(subscriber)
    source = manifest.offer['source']['quantized']
    wanted = subscriber.request().leaves['quantized']
    plan = reshard.plan_slices({'w': source}, {'w': wanted}, {'w': 1})
    self.assertLen(plan, 4)
    taken = _fetch(subscriber, manifest)
    leaf = taken.params['quantized']
    expected = publisher_process.values(batches)['quantized']
    self.assertEqual(leaf.sharding.spec, P(None, 'tensor'))
    for shard in leaf.addressable_shards:
      np.testing.assert_array_equal(shard.data, expected[shard.index])

  def test_an_overtaken_version_is_refused_and_the_next_arrives(self):
    self._publish()
    subscriber = _subscriber()
    manifest = self._offer(subscriber)
    self._publish()
    started = time.monotonic()
    with pytest.raises(weights.WeightTransferError, match='no longer on offer'):
      _fetch(subscriber, manifest)
    self.assertLess(time.monotonic() - started, 5.0)  # Not tried again.
    self._check_next_publication(subscriber)

  def test_an_offer_never_made_ends_at_the_deadline(self):
    batches, _ = self._publish()
    subscriber = _subscriber(deadline_seconds=0.5)
    manifest = self._offer(subscriber)
    self._fault(lose=1)
    started = time.monotonic()
    with pytest.raises(
      weights.WeightTransferError, match=rf'batches={batches}\).* not arrive'
    ):
      _fetch(subscriber, manifest)
    self.assertLess(time.monotonic() - started, 5.0)
    self._check_next_publication(_subscriber())

  def test_a_corrupted_chunk_is_fetched_again(self):
    batches, digests = self._publish()
    subscriber = _subscriber(backoff_seconds=0.01)
    manifest = self._offer(subscriber)
    self._fault(corrupt=1)
    with self.assertLogs('llamarl_jax', 'WARNING') as logs:
      taken = _fetch(subscriber, manifest)
    self.assertIn('leaf norm arrived as', logs.output[0])
    self.assertEqual(subscriber.report.attempts, 2)
    self.assertEqual(taken.version.batches, batches)
    self.assertEqual(digest.tree_digests(taken.params), digests)

  def test_chunks_that_stay_corrupt_are_refused_and_the_next_arrives(self):
    self._publish()
    subscriber = _subscriber(backoff_seconds=0.01)
    manifest = self._offer(subscriber)
    self._fault(corrupt=100)
    with pytest.raises(
      weights.WeightTransferError, match=r'leaf norm arrived.*attempt 3; given'
    ):
      _fetch(subscriber, manifest)
    self._fault(corrupt=0)
    self._check_next_publication(subscriber)

  def test_a_manifest_of_another_shape_is_refused_and_the_next_arrives(self):
    self._publish()
    subscriber = _subscriber()
    manifest = self._offer(subscriber)
    leaves = tuple(
      dataclasses.replace(leaf, shape=(7,)) if leaf.path == 'norm' else leaf
      for leaf in manifest.leaves
    )
    with pytest.raises(
      weights.WeightTransferError, match=r'leaf norm of .*\(7,\)'
    ):
      subscriber.begin(dataclasses.replace(manifest, leaves=leaves))
    self._check_next_publication(subscriber)

  def test_a_publisher_that_stops_is_left_and_the_next_arrives(self):
    self._publish()
    subscriber = _subscriber(deadline_seconds=1.0)
    manifest = self._offer(subscriber)
    self._fault(signal=(5, signal.SIGSTOP))
    with pytest.raises(weights.WeightTransferError, match='did not arrive'):
      _fetch(subscriber, manifest)
    self.publisher.process.send_signal(signal.SIGCONT)
    self._check_next_publication(_subscriber())

  def test_subscribers_that_leave_cost_no_memory(self):
    subscriber = _subscriber()
    resident = []
    for _ in range(3):
      batches, _ = self._publish()
      manifest = self._offer(subscriber)
      # One asks for a piece and never says a word again.
      silent = desk.Line(manifest.offer['peers'][0][0], watch_lib.Watch(30.0))
      self.addCleanup(silent.close)
      silent.ask(
        {
          'version': [0, batches],
          'parts': [['large', 0, [[0, 1], [0, 64]]]],
          'received': [],
        }
      )
      for _ in range(20):
        line = desk.Line(manifest.offer['peers'][0][0], watch_lib.Watch(30.0))
        part = ['large', 0, [[0, 16], [0, 4096]]]
        answer = line.ask(
          {'version': [0, batches], 'parts': [part] * 4, 'received': []}
        )
        self.assertGreater(answer['uuid'], 0)
        line.close()
      resident.append(self.publisher.ask('resident_bytes'))
    # 20 times 4 pieces of 256 KiB would be 20 MiB a version.
    self.assertLess(resident[-1] - resident[0], 10 << 20)
    self._check_next_publication(subscriber)

  def test_strangers_get_no_answer(self):
    self._publish()
    manifest = self._offer(_subscriber())
    address = manifest.offer['peers'][0][0].split('/')[0] + '/guess'
    line = desk.Line(address, watch_lib.Watch(30.0))
    self.addCleanup(line.close)
    with pytest.raises(weights.WeightTransferError, match='closed'):
      line.ask({'version': [0, 1], 'parts': [], 'received': []})

  def test_one_server_a_process(self):
    _subscriber()
    with pytest.raises(ValueError, match='a process has one'):
      registry.TRANSPORTS['transfer'].publisher(
        weights.TransportSettings(num_addresses=3)
      )


class KilledPublisherTest(parameterized.TestCase):
  def test_is_an_error_and_not_a_hang(self):
    with _publisher() as publisher:
      publisher.ask('publish', (1, 'named'))
      under_way = _subscriber(deadline_seconds=20.0)
      begun_later = _subscriber(deadline_seconds=20.0)
      manifest = publisher.ask('offer', under_way.request())
      # One fetch has got some chunks when the publisher dies ...
      publisher.ask('fault', {'signal': (5, signal.SIGKILL)})
      started = time.monotonic()
      with pytest.raises(weights.WeightTransferError, match='was lost'):
        _fetch(under_way, manifest)
      publisher.process.wait(10)
      # ... and one begins when it is already dead.
      with pytest.raises(weights.WeightTransferError, match='was lost'):
        _fetch(begun_later, manifest)
      self.assertLess(time.monotonic() - started, 30.0)

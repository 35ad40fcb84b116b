"""The protocol of publication, over the transports of one process."""

import dataclasses
import os
import tempfile
import time

from absl.testing import parameterized
import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding
import numpy as np
import pytest

from llamarl_jax import types
from llamarl_jax.channels import publisher as publisher_lib
from llamarl_jax.channels import registry
from llamarl_jax.channels import subscriber as subscriber_lib
from llamarl_jax.channels import weights
from llamarl_jax.sharding import digest
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import spec as spec_lib

_SPECS = {
  'mlp': {'up': spec_lib.ParamSpec((4, 6), 'float32', ('embed', 'mlp'))},
  'norm': spec_lib.ParamSpec((4,), 'bfloat16', ('norm',)),
  'scale': spec_lib.ParamSpec((), 'float32', ()),
  'values': spec_lib.ParamSpec((2, 4), 'float8_e4m3fn', ('embed', 'mlp')),
}
_NUM_BYTES = 4 * 6 * 4 + 4 * 2 + 4 + 8
_LAYOUTS = {
  'rows': {
    'mlp': {'up': P('x', None)},
    'norm': P('x'),
    'scale': P(),
    'values': P('x', None),
  },
  'columns': {
    'mlp': {'up': P(None, 'x')},
    'norm': P(),
    'scale': P(),
    'values': P(None, 'x'),
  },
}


def _shardings(layout):
  if layout == 'second_device':
    return jax.tree.map(
      lambda _: SingleDeviceSharding(jax.devices()[1]), _SPECS
    )
  mesh = mesh_lib.make_mesh({'x': 2}, jax.devices()[:2])
  return jax.tree.map(
    lambda layout: NamedSharding(mesh, layout),
    _LAYOUTS[layout],
    is_leaf=lambda leaf: isinstance(leaf, P),
  )


def _values(seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda leaf: np.asarray(rng.normal(size=leaf.shape)).astype(leaf.dtype),
    _SPECS,
  )


def _versioned(batches, *, incarnation=0):
  params = jax.device_put(_values(batches), _shardings('rows'))
  return types.VersionedParams(types.Version(incarnation, batches), params)


def _fetch(subscriber, manifest):
  subscriber.begin(manifest)
  while not subscriber.ready():
    time.sleep(0.001)
  return subscriber.take()


class TransportTest(parameterized.TestCase):
  """What all transports that work within a process have in common."""

  def setUp(self):
    super().setUp()
    directory = tempfile.TemporaryDirectory()
    self.addCleanup(directory.cleanup)
    self.settings = weights.TransportSettings(
      directory=directory.name, deadline_seconds=60.0
    )

  def _pair(self, transport, layout='columns'):
    ways = registry.TRANSPORTS[transport]
    publisher = ways.publisher(self.settings)
    subscriber = ways.subscriber(
      'generator', _SPECS, _shardings(layout), self.settings
    )
    self.addCleanup(publisher.close)
    self.addCleanup(subscriber.close)
    return publisher, subscriber

  @parameterized.product(
    transport=('device_put', 'collective', 'filesystem'),
    layout=('rows', 'columns', 'second_device'),
  )
  def test_delivers_equal_parameters_in_its_shardings(self, transport, layout):
    publisher, subscriber = self._pair(transport, layout)
    destination = subscriber.request()
    self.assertEqual(
      destination.num_devices, 1 if layout == 'second_device' else 2
    )
    versioned = _versioned(1)
    report = publisher.publish(versioned)
    self.assertEqual((report.bytes, report.version), (_NUM_BYTES, (0, 1)))
    manifest = publisher.offer(destination)
    taken = _fetch(subscriber, manifest)
    self.assertEqual(taken.version, versioned.version)
    jax.tree.map(np.testing.assert_array_equal, taken.params, _values(1))
    jax.tree.map(
      lambda leaf, sharding: self.assertEqual(leaf.sharding, sharding),
      taken.params,
      _shardings(layout),
    )
    self.assertEqual(
      digest.tree_digests(taken.params),
      digest.tree_digests(versioned.params),
    )
    # Replicas count: each device needs its own copy.
    expected = {'rows': 116 + 4, 'columns': 116 + 8 + 4, 'second_device': 116}
    self.assertEqual(subscriber.report.bytes, expected[layout])

  @parameterized.parameters('device_put', 'collective', 'filesystem')
  def test_the_trainer_may_donate_what_it_published(self, transport):
    publisher, subscriber = self._pair(transport, 'rows')
    versioned = _versioned(1)
    publisher.publish(versioned)
    overwrite = jax.jit(
      lambda tree: jax.tree.map(lambda leaf: leaf * 0, tree), donate_argnums=0
    )
    zeros = jax.block_until_ready(overwrite(versioned.params))
    self.assertTrue(versioned.params['norm'].is_deleted())
    taken = _fetch(subscriber, publisher.offer(subscriber.request()))
    jax.tree.map(np.testing.assert_array_equal, taken.params, _values(1))
    del zeros

  @parameterized.parameters('device_put', 'collective', 'filesystem')
  def test_a_fetch_survives_the_next_publication(self, transport):
    publisher, subscriber = self._pair(transport)
    publisher.publish(_versioned(1))
    first = publisher.offer(subscriber.request())
    publisher.publish(_versioned(2))
    second = publisher.offer(subscriber.request())
    for manifest, seed in ((first, 1), (second, 2)):
      taken = _fetch(subscriber, manifest)
      jax.tree.map(np.testing.assert_array_equal, taken.params, _values(seed))

  @parameterized.parameters('device_put', 'collective', 'filesystem')
  def test_versions_only_rise(self, transport):
    publisher, subscriber = self._pair(transport)
    publisher.publish(_versioned(3))
    manifest = publisher.offer(subscriber.request())
    _fetch(subscriber, manifest)
    with pytest.raises(weights.WeightTransferError, match='is not newer than'):
      subscriber.begin(manifest)
    with pytest.raises(ValueError, match='is not newer than the published'):
      publisher.publish(_versioned(3))
    # A restored trainer goes back in batches under a new incarnation.
    publisher.publish(_versioned(2, incarnation=1))
    taken = _fetch(subscriber, publisher.offer(subscriber.request()))
    self.assertEqual(taken.version, (1, 2))

  @parameterized.parameters('device_put', 'collective', 'filesystem')
  def test_a_corrupted_leaf_is_refused_and_the_next_fetch_works(
    self, transport
  ):
    publisher, subscriber = self._pair(transport)
    publisher.publish(_versioned(1))
    manifest = publisher.offer(subscriber.request())
    first, *others = manifest.leaves
    wrong = dataclasses.replace(first, digest=first.digest ^ 1)
    bad = dataclasses.replace(manifest, leaves=(wrong, *others))
    with pytest.raises(
      weights.WeightTransferError, match=r'leaf mlp/up arrived .*digest'
    ):
      _fetch(subscriber, bad)
    taken = _fetch(subscriber, publisher.offer(subscriber.request()))
    self.assertEqual(taken.version, (0, 1))

  def test_collective_needs_one_world(self):
    publisher, subscriber = self._pair('collective')
    publisher.publish(_versioned(1))
    other = dataclasses.replace(subscriber.request(), world='host:1')
    with pytest.raises(weights.WeightTransferError, match="use 'transfer'"):
      publisher.offer(other)

  def test_files_of_old_versions_are_deleted(self):
    publisher, subscriber = self._pair('filesystem')
    for batches in range(1, 5):
      publisher.publish(_versioned(batches))
      manifest = publisher.offer(subscriber.request())
    directory = os.path.join(self.settings.directory, 'weights')
    self.assertEqual(sorted(os.listdir(directory)), ['0-3', '0-4'])
    self.assertEqual(_fetch(subscriber, manifest).version, (0, 4))

  def test_files_that_vanish_are_an_error_and_the_next_fetch_works(self):
    publisher, subscriber = self._pair('filesystem')
    publisher.publish(_versioned(1))
    manifest = publisher.offer(subscriber.request())
    gone = dataclasses.replace(manifest, offer={'path': '/nowhere/0-1'})
    with pytest.raises(weights.WeightTransferError, match='could not be read'):
      _fetch(subscriber, gone)
    self.assertEqual(_fetch(subscriber, manifest).version, (0, 1))

  def test_files_need_a_directory(self):
    with pytest.raises(ValueError, match=r'set TransportSettings\.directory'):
      registry.TRANSPORTS['filesystem'].publisher(weights.TransportSettings())


class _StuckReceiver:
  background = True

  def fetch(self, manifest, leaves, watch, cost):
    del manifest, leaves, cost
    while True:
      watch.check('nothing')
      watch.sleep(0.01)

  def close(self):
    pass


class _NoSender:
  def offer(self, version, leaves, destination):
    del version, leaves, destination
    return {}

  def release(self):
    pass

  def close(self):
    pass


class ProtocolTest(parameterized.TestCase):
  """What does not depend on how bytes move."""

  def setUp(self):
    super().setUp()
    self.subscriber = subscriber_lib.VerifyingSubscriber(
      'generator',
      'none',
      _StuckReceiver(),
      _SPECS,
      _shardings('columns'),
      settings=weights.TransportSettings(deadline_seconds=5.0),
    )
    self.addCleanup(self.subscriber.close)
    self.publisher = publisher_lib.PinningPublisher('none', _NoSender())

  def test_deadline_ends_a_fetch(self):
    self.publisher.publish(_versioned(7))
    manifest = self.publisher.offer(self.subscriber.request())
    now = time.monotonic()
    self.subscriber.begin(manifest)
    self.assertFalse(self.subscriber.ready(now + 4.9))
    with pytest.raises(RuntimeError, match='is not ready'):
      self.subscriber.take()
    with pytest.raises(RuntimeError, match='still under way'):
      self.subscriber.begin(manifest)
    with pytest.raises(
      weights.WeightTransferError, match=r'batches=7\) did not arrive within 5'
    ):
      self.subscriber.ready(now + 6.0)
    with pytest.raises(RuntimeError, match='no fetch is under way'):
      self.subscriber.ready()
    self.subscriber.begin(manifest)
    self.subscriber.abort()
    self.subscriber.begin(manifest)

  def test_processes_that_disagree_are_an_error(self):
    self.publisher.publish(_versioned(1))
    first = self.publisher.offer(self.subscriber.request())
    other = dataclasses.replace(first, offer={'peers': {1: 'b'}})
    first = dataclasses.replace(
      first, offer={'peers': {0: 'a'}, 'owners': (0,)}
    )
    merged = weights.merge_offers([first, other])
    self.assertEqual(merged.offer, {'peers': {0: 'a', 1: 'b'}, 'owners': (0,)})
    self.publisher.publish(_versioned(2))
    second = self.publisher.offer(self.subscriber.request())
    with pytest.raises(weights.WeightTransferError, match='disagree'):
      weights.merge_offers([first, second])

  def test_nothing_published_is_an_error(self):
    with pytest.raises(
      weights.WeightTransferError, match='before any were published'
    ):
      self.publisher.offer(self.subscriber.request())

  def test_publisher_refuses_other_leaves(self):
    self.publisher.publish(_versioned(1))
    destination = self.subscriber.request()
    leaves = dict(destination.leaves)
    del leaves['norm']
    with pytest.raises(
      weights.WeightTransferError,
      match=r'leaf norm has shape \(4,\) here and None at generator',
    ):
      self.publisher.offer(dataclasses.replace(destination, leaves=leaves))

  @parameterized.parameters(
    ({'shape': (4, 7)}, r'leaf mlp/up .*offered as \(\(4, 7\)'),
    ({'dtype': 'bfloat16'}, r"offered as \(\(4, 6\), 'bfloat16'\) but exp"),
    ({'path': 'mlp/down'}, r'leaf mlp/down .* but expected as None'),
  )
  def test_subscriber_refuses_other_leaves(self, change, message):
    self.publisher.publish(_versioned(1))
    manifest = self.publisher.offer(self.subscriber.request())
    first, *others = manifest.leaves
    self.assertEqual(first.path, 'mlp/up')
    leaves = (dataclasses.replace(first, **change), *others)
    with pytest.raises(weights.WeightTransferError, match=message):
      self.subscriber.begin(dataclasses.replace(manifest, leaves=leaves))

  def test_subscriber_refuses_another_transport(self):
    self.publisher.publish(_versioned(1))
    manifest = self.publisher.offer(self.subscriber.request())
    with pytest.raises(weights.WeightTransferError, match="offered by 'files'"):
      self.subscriber.begin(dataclasses.replace(manifest, transport='files'))

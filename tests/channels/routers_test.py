"""Routing of host records: what goes where, and that nothing is lost."""

import dataclasses

from absl.testing import parameterized
import numpy as np
import pytest

from llamarl_jax.channels import broadcast
from llamarl_jax.channels import gather
from llamarl_jax.channels import registry
from llamarl_jax.channels import scatter
from llamarl_jax.channels import transfer_server


class RoutersTest(parameterized.TestCase):
  def test_broadcast_copies(self):
    edge = broadcast.Broadcast('controller', 'generator')
    parts = edge.route(['a', 'b'], 3)
    self.assertEqual(parts, [['a', 'b']] * 3)
    parts[0].append('c')
    self.assertEqual(parts[1], ['a', 'b'])

  @parameterized.parameters(
    ([], (2, 2), [[], []]),
    ([0, 1, 2], (2, 2), [[0, 2], [1]]),
    ([0, 1, 2, 3], (1, 3), [[2], [0, 1, 3]]),
    ([0, 1], (0, 2), [[], [0, 1]]),
    ([0, 1, 2], (5,), [[0, 1, 2]]),
  )
  def test_scatter_goes_where_there_is_room(self, items, capacities, expected):
    edge = scatter.Scatter('controller', 'generator')
    self.assertEqual(edge.route(items, capacities), expected)

  @parameterized.parameters(*range(5))
  def test_scatter_loses_nothing_and_keeps_order(self, seed):
    rng = np.random.default_rng(seed)
    capacities = [int(n) for n in rng.integers(0, 9, size=4)]
    items = list(range(int(rng.integers(0, sum(capacities) + 1))))
    parts = scatter.Scatter('a', 'b').route(items, capacities)
    self.assertEqual(sorted(i for part in parts for i in part), items)
    for part, capacity in zip(parts, capacities, strict=True):
      self.assertLessEqual(len(part), capacity)
      self.assertEqual(part, sorted(part))

  def test_scatter_refuses_more_than_fits(self):
    with pytest.raises(ValueError, match=r'3 records .* \[1, 1\] of generator'):
      scatter.Scatter('controller', 'generator').route([0, 1, 2], [1, 1])

  def test_gather_joins_in_source_order(self):
    edge = gather.Gather('generator', 'reward')
    self.assertEqual(edge.merge([[3, 1], [], [2]]), [3, 1, 2])

  def test_edges_are_values_found_by_kind(self):
    for kind, edge_type in registry.CHANNELS.items():
      edge = edge_type('generator', 'reward')
      self.assertEqual(edge.kind, kind)
      self.assertEqual(edge, edge_type('generator', 'reward'))
      with pytest.raises(dataclasses.FrozenInstanceError):
        edge.source = 'trainer'


class SelectTransportTest(parameterized.TestCase):
  def test_by_name(self):
    for name in ('device_put', 'transfer', 'filesystem'):
      self.assertEqual(registry.select_transport(name).name, name)

  def test_unknown_name_is_refused(self):
    with pytest.raises(ValueError, match="No transport 'pigeon'; choose from"):
      registry.select_transport('pigeon')


@pytest.mark.parametrize('error', [ImportError, AttributeError])
def test_missing_library_falls_back_to_files(monkeypatch, caplog, error):
  def missing():
    raise error('no transfer here')

  monkeypatch.setattr(transfer_server, 'library', missing)
  assert registry.select_transport('transfer').name == 'filesystem'
  assert f'{error.__name__}: no transfer here' in caplog.text
  assert registry.select_transport('device_put').name == 'device_put'

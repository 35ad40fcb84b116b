"""Layouts of parameters, told by hand for shapes of the real models."""

from absl.testing import parameterized
import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import rules
from llamarl_jax.sharding import spec as spec_lib

_BOTH = ('fsdp', 'tensor')
_QUERY_AXES = ('layers', 'embed', 'heads', 'head_dim')


def _mesh(**axes):
  return mesh_lib.make_mesh(axes, jax.devices()[: np.prod([*axes.values()])])


def _spec(shape, *logical_axes):
  return spec_lib.ParamSpec(shape, np.dtype('float32'), logical_axes)


class SpecTest(parameterized.TestCase):
  def test_bytes_are_elements_times_itemsize(self):
    self.assertEqual(
      spec_lib.ParamSpec((3, 5), 'bfloat16', ('embed', 'mlp')).nbytes, 30
    )
    self.assertEqual(spec_lib.ParamSpec((), 'float32', ()).nbytes, 4)

  def test_every_dimension_needs_a_name(self):
    with pytest.raises(ValueError, match=r'needs 2 logical axes'):
      _spec((3, 5), 'embed')

  def test_is_a_leaf_with_a_readable_path(self):
    leaf = _spec((3,), 'norm')
    tree = {'layers': {'norm': leaf}, 'final': leaf}
    self.assertEqual(
      spec_lib.named_leaves(tree), {'final': leaf, 'layers/norm': leaf}
    )


class MeshTest(parameterized.TestCase):
  def test_devices_keep_their_order(self):
    devices = jax.devices()[::-1]
    mesh = mesh_lib.make_mesh({'data': 1, 'fsdp': 2, 'tensor': 1}, devices)
    self.assertEqual(dict(mesh.shape), {'data': 1, 'fsdp': 2, 'tensor': 1})
    self.assertEqual(list(mesh.devices.flat), devices)

  @parameterized.parameters(
    ({'fsdp': 3}, r'fsdp=3 needs 3 devices but 2 are given'),
    ({'data': 2, 'fsdp': 2}, r'needs 4 devices but 2 are given'),
    ({'fsdp': 2, 'tensor': 0}, r"'tensor' has size 0"),
  )
  def test_refuses_wrong_sizes(self, axes, message):
    with pytest.raises(ValueError, match=message):
      mesh_lib.make_mesh(axes, jax.devices()[:2])


class RulesTest(parameterized.TestCase):
  @parameterized.parameters(
    (_spec((30, 576, 9, 64), *_QUERY_AXES), P(None, 'fsdp', None, None)),
    (_spec((49152, 576), 'vocab', 'embed'), P(None, 'fsdp')),
    (_spec((30, 1536, 576), 'layers', 'mlp', 'embed'), P(None, None, 'fsdp')),
    (_spec((30, 576), 'layers', 'norm'), P(None, None)),
    (_spec((), *()), P()),
  )
  def test_trainer_shards_the_width(self, spec, expected):
    mesh = _mesh(data=1, fsdp=2, tensor=1)
    self.assertEqual(
      rules.partition_spec(spec, rules.TRAINER_RULES, mesh), expected
    )

  @parameterized.parameters(
    (_spec((4, 64, 8, 16), *_QUERY_AXES), P(None, None, 'tensor', None)),
    (_spec((512, 64), 'vocab', 'embed'), P('tensor', None)),
    (_spec((4, 64, 96), 'layers', 'embed', 'mlp'), P(None, None, 'tensor')),
    # Two dimensions ask for the one axis: the first has it.
    (_spec((4, 6), 'heads', 'mlp'), P('tensor', None)),
    (_spec((3, 6), 'heads', 'mlp'), P(None, 'tensor')),
    (_spec((3, 6), None, 'embed'), P(None, None)),
  )
  def test_generator_shards_heads_hidden_and_vocabulary(self, spec, expected):
    self.assertEqual(
      rules.partition_spec(spec, rules.GENERATOR_RULES, _mesh(tensor=2)),
      expected,
    )

  def test_what_does_not_divide_is_sharded_elsewhere_and_reported(self):
    specs = {
      'query': _spec((30, 576, 9, 64), *_QUERY_AXES),
      'up': _spec((30, 576, 1536), 'layers', 'embed', 'mlp'),
      'bias': _spec((30, 9, 64), 'layers', 'heads', 'head_dim'),
    }
    mesh = _mesh(tensor=2)
    tree, notes = rules.shardings(specs, mesh, rules.GENERATOR_RULES)
    self.assertEqual(
      notes,
      [
        'bias: heads of 9 does not divide over tensor=2; replicated',
        'query: heads of 9 does not divide over tensor=2; embed of 576 is'
        ' sharded instead',
      ],
    )
    self.assertTrue(tree['bias'].is_fully_replicated)
    self.assertEqual(tree['query'].spec, P(None, 'tensor', None, None))
    self.assertEqual(tree['up'].spec, P(None, None, 'tensor'))
    # JAX accepts the layouts, which it would not for one that does not divide.
    self.assertEqual(
      tree['query'].shard_shape((30, 576, 9, 64)), (30, 288, 9, 64)
    )
    self.assertEqual(tree['up'].shard_shape((30, 576, 1536)), (30, 576, 768))
    held = rules.device_bytes(specs, tree)
    self.assertEqual(
      held, 4 * (30 * 288 * 9 * 64 + 30 * 576 * 768 + 30 * 9 * 64)
    )

  @parameterized.parameters(
    # Heads that do not divide: 'embed' is cut by both axes.
    ((30, 576, 9, 64), _QUERY_AXES, (2, 1, 2), P(None, _BOTH, None, None)),
    # Not even that divides: the trainer replicates over 'tensor'.
    ((30, 6, 9, 64), _QUERY_AXES, (2, 1, 2), P(None, 'fsdp', None, None)),
    # A width of 9 leaves 'fsdp' to the vocabulary.
    ((512, 9), ('vocab', 'embed'), (2, 1, 2), P(('tensor', 'fsdp'), None)),
    # Devices that share tokens share parameters.
    ((64, 96), ('embed', 'mlp'), (2, 2, 2), P(('fsdp', 'sequence'), 'tensor')),
    # Keys and values of fewer heads than devices.
    (
      (4, 64, 8, 16),
      ('layers', 'embed', 'kv_heads', 'head_dim'),
      (1, 1, 16),
      P(None, 'tensor', None, None),
    ),
  )
  def test_trainer_on_meshes_without_devices(self, shape, axes, sizes, layout):
    mesh = mesh_lib.abstract_mesh(
      dict(zip(('fsdp', 'sequence', 'tensor'), sizes, strict=True))
    )
    self.assertEqual(
      rules.partition_spec(_spec(shape, *axes), rules.TRAINER_RULES, mesh),
      layout,
    )

  def test_slots_take_what_heads_of_a_cache_cannot(self):
    axes = ('layers', 'slots', None, 'kv_heads', 'head_dim')
    mesh = _mesh(tensor=2)
    for heads, expected in (
      (8, P(None, None, None, 'tensor', None)),
      (3, P(None, 'tensor', None, None, None)),
    ):
      spec = _spec((30, 64, 100, heads, 64), *axes)
      self.assertEqual(
        rules.partition_spec(spec, rules.GENERATOR_RULES, mesh), expected
      )

  def test_several_axes_may_shard_one_dimension(self):
    table = {'embed': ('data', 'fsdp'), 'mlp': 'fsdp'}
    mesh = _mesh(data=1, fsdp=2)
    spec = _spec((4, 6), 'embed', 'mlp')
    self.assertEqual(rules.partition_spec(spec, table, mesh), P('fsdp', None))

  def test_a_single_device_mesh_replicates_everything_silently(self):
    specs = {'query': _spec((2, 3, 5, 7), *_QUERY_AXES)}
    tree, notes = rules.shardings(specs, _mesh(tensor=1), rules.GENERATOR_RULES)
    self.assertEqual(notes, [])
    self.assertTrue(tree['query'].is_fully_replicated)

  def test_unknown_logical_axis_is_named(self):
    with pytest.raises(ValueError, match=r"logical axis 'experts'"):
      rules.partition_spec(
        _spec((4,), 'experts'), rules.TRAINER_RULES, _mesh(fsdp=2)
      )

  def test_tables_name_the_same_axes_and_never_shard_layers(self):
    self.assertEqual(rules.TRAINER_RULES.keys(), rules.GENERATOR_RULES.keys())
    self.assertEqual(rules.TRAINER_RULES['layers'], ())
    self.assertEqual(rules.GENERATOR_RULES['layers'], ())

  def test_rows_of_a_batch_go_over_data_and_fsdp(self):
    sharding = rules.batch_sharding(_mesh(data=1, fsdp=2, tensor=1))
    self.assertEqual(sharding.shard_shape((8, 5)), (4, 5))
    self.assertEqual(
      rules.batch_sharding(_mesh(tensor=2)).shard_shape((8, 5)), (8, 5)
    )

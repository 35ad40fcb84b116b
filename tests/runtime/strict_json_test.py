"""JSON without the words that only Python writes."""

import json
import math
import pathlib
import stat
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from llamarl_jax import types
from llamarl_jax.runtime import strict_json


def _refuse(word):
  raise AssertionError(f'{word} is not JSON')


class PlainTest(parameterized.TestCase):
  @parameterized.parameters(
    (float('nan'), 'NaN'),
    (float('inf'), 'Infinity'),
    (-float('inf'), '-Infinity'),
    (np.float32('nan'), 'NaN'),
    (np.float32(0.5), 0.5),
    (np.int64(3), 3),
    (np.bool_(True), True),
    (True, True),
    (None, None),
    ((1, 2), [1, 2]),
    ({1: np.arange(2)}, {'1': [0, 1]}),
    (types.FinishReason.STOP, 'stop'),
    (types.Stream.EVALUATION, 1),
    (pathlib.PurePosixPath('a/b'), 'a/b'),
  )
  def test_plain(self, value, expected):
    plain = strict_json.plain(value)
    self.assertEqual(plain, expected)
    self.assertIs(type(plain), type(expected))

  def test_arrays_of_the_device(self):
    value = {'a': jnp.float32(1.5), 'b': jnp.asarray([1, 2], jnp.bfloat16)}
    self.assertEqual(strict_json.plain(value), {'a': 1.5, 'b': [1.0, 2.0]})

  def test_strict_and_read_back(self):
    text = strict_json.dumps({'loss': math.nan, 'x': -math.inf, 'y': 'µ'})
    record = json.loads(text, parse_constant=_refuse)
    self.assertTrue(math.isnan(strict_json.number(record['loss'])))
    self.assertEqual(strict_json.number(record['x']), -math.inf)
    self.assertIn('µ', text)

  def test_half_a_surrogate_pair_survives(self):
    data = strict_json.encode(strict_json.dumps(['\ud800']))
    self.assertEqual(json.loads(data), ['\ud800'])

  @parameterized.parameters(('12',), ('text',), (None,), ([1],), ({},))
  def test_what_is_not_a_number(self, value):
    self.assertIsNone(strict_json.number(value))


class WriteTextTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)

  def test_replaces_the_whole_file(self):
    path = self.folder / 'deep' / 'a.json'
    strict_json.write_text(path, 'long and old\n')
    strict_json.write_text(path, 'ä\n')
    self.assertEqual(path.read_bytes(), 'ä\n'.encode())
    self.assertEqual([p.name for p in path.parent.iterdir()], ['a.json'])
    self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o644)

  def test_keeps_the_old_file_where_writing_fails(self):
    path = self.folder / 'a.json'
    strict_json.write_text(path, 'old')
    with self.assertRaises(AttributeError):
      strict_json.write_text(path, None)
    self.assertEqual(path.read_text(), 'old')
    self.assertEqual([p.name for p in path.parent.iterdir()], ['a.json'])


if __name__ == '__main__':
  absltest.main()

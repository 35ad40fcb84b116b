import itertools
import json
import pathlib
import struct
import tempfile
from unittest import mock

from absl.testing import parameterized
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from llamarl_jax.checkpoints import safetensors_format as format_lib

SHAPE = (6, 4, 5)


def _array(dtype):
  rng = np.random.default_rng(0)
  return rng.normal(size=SHAPE).astype(dtype)


class SafetensorsFormatTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.path = pathlib.Path(folder.name) / 'model.safetensors'

  @parameterized.parameters(*format_lib.DTYPES)
  def test_the_safetensors_package_reads_what_is_written(self, dtype):
    arrays = {
      'a': _array(format_lib.DTYPES[dtype]),
      'b': np.ones(3, format_lib.DTYPES[dtype]),
    }
    shapes = {name: array.shape for name, array in arrays.items()}
    format_lib.write(self.path, shapes, dtype, arrays.__getitem__)
    with safetensors.safe_open(self.path, 'numpy') as file:
      self.assertEqual(file.metadata(), {'format': 'pt'})
    for name, found in safetensors.deserialize(self.path.read_bytes()):
      self.assertEqual(found['dtype'], dtype)
      self.assertEqual(tuple(found['shape']), shapes[name])
      self.assertEqual(bytes(found['data']), arrays[name].tobytes())

  @parameterized.product(
    shape=((6, 4, 5), (24, 5), (120,), (2, 3, 20)),
    block_bytes=(1, 48, 10**6),
  )
  def test_any_part_of_a_file_of_the_package(self, shape, block_bytes):
    array = _array(np.float32)
    other = np.arange(7, dtype=np.float16)
    safetensors.numpy.save_file({'a': array, 'other': other}, self.path)
    tensor = format_lib.read_header(self.path)['a']
    self.assertEqual((tensor.dtype, tensor.shape), ('F32', SHAPE))
    viewed = array.reshape(shape)
    parts = [{(0, n), (n // 2, n), (0, 1), (n // 3, n // 2 + 1)} for n in shape]
    self.enter_context(
      mock.patch.object(format_lib, '_BLOCK_BYTES', block_bytes)
    )
    with format_lib.opened([self.path, self.path]) as files:
      for ends in itertools.product(*parts):
        box = tuple(slice(*end) for end in ends)
        blocks = list(
          format_lib.read_blocks(files[self.path], tensor, shape, box)
        )
        np.testing.assert_array_equal(
          np.concatenate([block for _, block in blocks]), viewed[box]
        )
        lengths = [len(block) for _, block in blocks]
        starts = box[0].start + np.cumsum([0, *lengths[:-1]])
        self.assertEqual([first for first, _ in blocks], starts.tolist())

  def test_only_the_bytes_asked_for_are_read(self):
    safetensors.numpy.save_file({'a': _array(np.float32)}, self.path)
    tensor = format_lib.read_header(self.path)['a']
    box = (slice(1, 5), slice(0, 4), slice(2, 4))
    reads = []

    def preadv(file, buffers, offset):
      del file
      reads.append((offset - tensor.start, len(buffers[0])))
      return len(buffers[0])

    with mock.patch.object(format_lib.os, 'preadv', preadv):
      list(format_lib.read_blocks(0, tensor, SHAPE, box))
    wanted = np.zeros(SHAPE, bool)
    wanted[box] = True
    read = np.zeros(wanted.size, bool)
    for start, size in reads:
      read[start // 4 : (start + size) // 4] = True
    np.testing.assert_array_equal(read.reshape(SHAPE), wanted)
    self.assertEqual(sum(size for _, size in reads), 4 * wanted.sum())

  def test_bfloat16_rounds_to_nearest(self):
    # 1 + 2 ** -8 lies halfway and goes to the even 1; a bit more goes up.
    values = np.array([1 + 2**-8, 1 + 2**-8 + 2**-12], np.float32)
    rounded = values.astype(ml_dtypes.bfloat16)
    format_lib.write(self.path, {'a': (2,)}, 'BF16', lambda _: rounded)
    tensor = format_lib.read_header(self.path)['a']
    with format_lib.opened([self.path]) as files:
      ((_, block),) = format_lib.read_blocks(
        files[self.path], tensor, (2,), (slice(0, 2),)
      )
    np.testing.assert_array_equal(block.astype(np.float32), [1, 1 + 2**-7])

  @parameterized.parameters(
    (b'', 'cut short'),
    (b'{"not": "safetensors"}', 'cut short'),
    (struct.pack('<Q', 4) + b'{"a"', 'damaged header'),
    (struct.pack('<Q', 2) + b'[]', 'damaged header'),
    (struct.pack('<Q', 2) + b'{}', None),
  )
  def test_damaged_file(self, content, message):
    self.path.write_bytes(content)
    if message is None:
      self.assertEqual(format_lib.read_header(self.path), {})
      return
    with self.assertRaisesRegex(ValueError, f'model.safetensors.*{message}'):
      format_lib.read_header(self.path)

  def test_truncated_or_inconsistent_file(self):
    safetensors.numpy.save_file({'a': _array(np.float32)}, self.path)
    content = self.path.read_bytes()
    self.path.write_bytes(content[:-1])
    with self.assertRaisesRegex(ValueError, r'has \d+ bytes.*speaks of'):
      format_lib.read_header(self.path)
    length = struct.unpack('<Q', content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    header['a']['shape'] = [6, 4, 4]
    text = json.dumps(header).encode()
    self.path.write_bytes(
      struct.pack('<Q', len(text)) + text + content[8 + length :]
    )
    with self.assertRaisesRegex(ValueError, 'bytes of a'):
      format_lib.read_header(self.path)

  def test_a_file_is_not_overwritten(self):
    self.path.write_text('thesis')
    with self.assertRaises(FileExistsError):
      format_lib.write(self.path, {}, 'F32', lambda _: np.zeros(0))
    self.assertEqual(self.path.read_text(), 'thesis')

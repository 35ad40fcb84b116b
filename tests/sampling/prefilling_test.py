"""Chunks of prompts: which go together, and that all of each is read."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from llamarl_jax.sampling import plan
from llamarl_jax.sampling import prefilling

# Chunks of at most 16 tokens; prompts of at most 50; lines for 6 prompts.
_SHAPES = plan.read_shapes(50, 32, 6, 8)


def _reading(line, length):
  return prefilling.Reading(tuple(range(100, 100 + length)), line)


class PrefillingTest(parameterized.TestCase):
  def test_shapes(self):
    self.assertEqual(_SHAPES.widths, (8, 16))
    self.assertEqual(_SHAPES.rows, {8: (1, 4), 16: (1, 2)})
    self.assertEqual(_SHAPES.read_lengths, (16, 32, 48))
    self.assertLen(_SHAPES.all(), 4 + 3)

  def test_what_is_alike_goes_together_the_first_come_first(self):
    readings = [_reading(i, n) for i, n in enumerate((50, 7, 8, 3, 40, 5))]
    call = prefilling.next_call(readings, _SHAPES, None)
    self.assertEqual([r.line for r in call.readings], [0, 4])
    self.assertEqual(call[1:], (2, 16, 0))
    self.assertEqual(call.num_tokens, 32)
    call = prefilling.next_call(readings[1:], _SHAPES, None)
    self.assertEqual([r.line for r in call.readings], [1, 2, 3, 5])
    self.assertEqual(call[1:], (4, 8, 0))

  @parameterized.parameters(
    (31, 1, 16),  # One of the two long ones.
    (15, 1, 8),  # No long one: what is behind goes first.
  )
  def test_keeps_to_its_room(self, room, num_rows, width):
    readings = [_reading(i, n) for i, n in enumerate((50, 40, 7, 8, 3))]
    call = prefilling.next_call(readings, _SHAPES, room)
    self.assertEqual(call[1:3], (num_rows, width))
    self.assertIsNone(prefilling.next_call(readings, _SHAPES, 7))
    self.assertIsNone(prefilling.next_call([], _SHAPES, None))

  def test_every_token_is_read_once_in_its_place(self):
    lengths = (50, 1, 16, 17, 32, 9)
    readings = [_reading(i, n) for i, n in enumerate(lengths)]
    lines = np.zeros((6, 50), np.int32)
    shapes = set(_SHAPES.all())
    while left := [r for r in readings if r.num_left]:
      call = prefilling.next_call(left, _SHAPES, 32)
      self.assertIn(call[1:], shapes)
      chunk = prefilling.make_chunk(call, 6)
      self.assertEqual(chunk.tokens.shape, (call.num_rows, call.width))
      for row, line in enumerate(chunk.lines):
        start, length = chunk.starts[row], chunk.lengths[row]
        if row >= len(call.readings):
          self.assertEqual((line, length), (6, 0))
          continue
        # What the chunk reads of its line is there.
        self.assertLessEqual(start, call.read_length)
        self.assertTrue(np.all(lines[line, :start] > 0))
        self.assertTrue(np.all(lines[line, start:] == 0))
        lines[line, start : start + length] = chunk.tokens[row, :length]
    for line, length in zip(lines, lengths, strict=True):
      np.testing.assert_array_equal(line[:length], np.arange(100, 100 + length))
      self.assertEqual(np.count_nonzero(line), length)


if __name__ == '__main__':
  absltest.main()

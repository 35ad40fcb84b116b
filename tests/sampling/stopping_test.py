"""Stop strings, with tokens of several characters and of none."""

from absl.testing import absltest
from absl.testing import parameterized

from llamarl_jax.sampling import stopping

# Token 0 is special: it has no text.
_TEXTS = ('', 'a', 'b', 'ab', 'cab', 'x', '\n', 'STO', 'Pq')


def _decode(tokens):
  return ''.join(_TEXTS[token] for token in tokens)


class StoppingTest(parameterized.TestCase):
  @parameterized.parameters(
    ((5, 1, 2, 5), ('ab',), 3, 'x'),  # Across a border of tokens.
    ((5, 3, 5), ('ab',), 2, 'x'),  # One token.
    ((1, 7, 0, 8, 1), ('STOP',), 4, 'a'),  # What follows it is cut, too.
    ((5, 4), ('ab', 'b', 'ca'), 2, 'x'),  # The first to begin counts.
    ((5, 1, 5, 6, 6), ('\n\n', 'abc'), 5, 'xax'),
  )
  def test_where_it_ends_and_the_text(self, tokens, strings, count, text):
    found = stopping.find_stop(tokens, strings, _decode, first=1)
    self.assertEqual(found, count)
    self.assertEqual(stopping.cut_text(tokens[:count], strings, _decode), text)
    # The same when they come in parts.
    for part in range(1, len(tokens) + 1):
      first = stopping.find_stop(tokens[:part], strings, _decode, first=1)
      self.assertEqual(first, count if part >= count else None)
      if part < count:
        self.assertEqual(
          stopping.find_stop(tokens, strings, _decode, first=part + 1), count
        )

  def test_none(self):
    self.assertIsNone(stopping.find_stop((5, 1), ('ab',), _decode, first=1))
    self.assertIsNone(stopping.find_stop((), ('ab',), _decode, first=1))
    self.assertEqual(stopping.cut_text((5, 1), (), _decode), 'xa')

  def test_what_comes_too_early_is_passed_over(self):
    tokens = (3, 5, 3, 5)
    self.assertEqual(stopping.find_stop(tokens, ('ab',), _decode, first=2), 3)
    self.assertEqual(stopping.cut_text(tokens[:3], ('ab',), _decode), 'abx')
    self.assertIsNone(stopping.find_stop(tokens, ('ab',), _decode, first=4))

  def test_is_found_far_behind(self):
    tokens = (5,) * 500 + (1, 2)
    self.assertEqual(
      stopping.find_stop(tokens, ('ab',), _decode, first=480), 502
    )


if __name__ == '__main__':
  absltest.main()

from absl.testing import absltest

from llamarl_jax.data import tokenizers

# 'Ġ' is how byte-level spelling writes a space.
TOKENS = ('<end>', '<begin>', '1', '2', 'Ġ', 'a', 'b', 'ab', 'Ġab', '<img>')


def _byte_pairs(**arguments):
  return tokenizers.BytePairTokenizer(
    **{
      'tokens': TOKENS,
      'merges': ('a b', 'Ġ ab'),
      'token_types': (3, 3, 1, 1, 1, 1, 1, 1, 1, 4),
      'pre_tokenizer': 'smollm',
      'eos_id': 0,
      'bos_id': 1,
      **arguments,
    }
  )


class CharacterTokenizerTest(absltest.TestCase):
  def test_ids_are_places_in_the_alphabet(self):
    tokenizer = tokenizers.CharacterTokenizer('0123456789+=')
    self.assertEqual(tokenizer.vocab_size, 14)
    self.assertEqual(tokenizer.encode('0+9='), [2, 12, 11, 13])
    self.assertEqual(tokenizer.stop_ids, (1,))

  def test_decodes_what_it_encodes_and_drops_specials(self):
    tokenizer = tokenizers.CharacterTokenizer()
    text = '(12 + 3) * 4 - 5 ='
    ids = tokenizer.encode(text)
    self.assertEqual(tokenizer.decode(ids), text)
    self.assertEqual(tokenizer.decode([0, *ids, 1, 0, 999]), text)

  def test_unknown_character(self):
    with self.assertRaisesRegex(ValueError, r"holds \['x', 'y'\]"):
      tokenizers.CharacterTokenizer().encode('1 + y - x')

  def test_repeated_character(self):
    with self.assertRaisesRegex(ValueError, 'each of them once'):
      tokenizers.CharacterTokenizer('00')


class BytePairTokenizerTest(absltest.TestCase):
  def test_merges_and_splits_digits(self):
    tokenizer = _byte_pairs()
    self.assertEqual(tokenizer.encode('ab ab12'), [7, 8, 2, 3])
    self.assertEqual(tokenizer.decode([7, 8, 2, 3]), 'ab ab12')

  def test_special_tokens_are_single_ids_and_never_invented(self):
    tokenizer = _byte_pairs()
    self.assertEqual(tokenizer.encode('<begin>a<end>b'), [1, 5, 0, 6])
    self.assertEqual(tokenizer.encode(''), [])
    self.assertEqual(tokenizer.decode([1, 5, 0, 6]), 'ab')

  def test_user_defined_tokens_are_text(self):
    tokenizer = _byte_pairs()
    self.assertEqual(tokenizer.encode('a<img>'), [5, 9])
    self.assertEqual(tokenizer.decode([5, 9]), 'a<img>')

  def test_padding_and_stops(self):
    tokenizer = _byte_pairs(extra_stop_ids=(1, 0))
    self.assertEqual(tokenizer.pad_id, 0)
    self.assertEqual(tokenizer.stop_ids, (0, 1))
    self.assertEqual(_byte_pairs(pad_id=9).pad_id, 9)

  def test_the_beginning_is_added_where_the_model_has_it(self):
    prompt = tokenizers.encode_prompt
    self.assertEqual(prompt(_byte_pairs(), 'ab'), [7])
    self.assertEqual(prompt(_byte_pairs(adds_bos=True), 'ab'), [1, 7])
    self.assertEqual(prompt(_byte_pairs(adds_bos=True), '<begin>ab'), [1, 7])
    # Told to add one, but has none.
    self.assertEqual(prompt(_byte_pairs(adds_bos=True, bos_id=None), 'ab'), [7])
    # One token begins and ends the sequences of some models.
    both = _byte_pairs(adds_bos=True, bos_id=0)
    self.assertEqual(prompt(both, ''), [0])
    self.assertEqual(prompt(both, 'ab'), [0, 7])

  def test_bad_arguments(self):
    with self.assertRaisesRegex(ValueError, "'gpt-2', 'smollm'"):
      _byte_pairs(pre_tokenizer='nope')
    with self.assertRaisesRegex(ValueError, '10 tokens but 1 token types'):
      _byte_pairs(token_types=(1,))

import base64
import importlib.util
import pathlib
import pickle

from absl.testing import parameterized
import pytest

from llamarl_jax.data import chat
from llamarl_jax.data import tiktoken_tokenizer
from llamarl_jax.data import tokenizers

# 256 bytes by their value, then these.
MERGED = (b'ab', b'12', b'123', b' ab')
NUM_TEXT = 256 + len(MERGED)


def write_file(path, tokens=()):
  """Writes a tiny file of the format."""
  tokens = tokens or [bytes([i]) for i in range(256)] + list(MERGED)
  lines = [
    f'{base64.b64encode(token).decode()} {i}' for i, token in enumerate(tokens)
  ]
  path.write_text('\n'.join(lines) + '\n')


class TiktokenTokenizerTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _file(self, tmp_path):
    self.path = tmp_path / 'tokenizer.model'
    write_file(self.path)

  @parameterized.parameters(
    ('ab ab', [256, 259]),
    # Digits are cut in threes before anything is merged.
    ('12312', [258, 257]),
    ('1234', [258, ord('4')]),
    ('\xe9', [0xC3, 0xA9]),
    ('', []),
    ('ab<|eot_id|>', [256, NUM_TEXT + 9]),
    ('<|no such|>', list(b'<|no such|>')),
  )
  def test_ids(self, text, expected):
    tokenizer = tiktoken_tokenizer.TiktokenTokenizer(self.path)
    self.assertEqual(tokenizer.encode(text), expected)
    text = text.removesuffix('<|eot_id|>')
    self.assertEqual(tokenizer.decode(expected), text)
    again = pickle.loads(pickle.dumps(tokenizer))
    self.assertEqual(again.encode(text), tokenizer.encode(text))

  def test_special_tokens_follow_the_text(self):
    tokenizer = tiktoken_tokenizer.TiktokenTokenizer(
      self.path, eos_token=tiktoken_tokenizer.END_OF_TURN, extra_stop_ids=(3,)
    )
    self.assertEqual(tokenizer.vocab_size, NUM_TEXT + 256)
    self.assertEqual(tokenizer.bos_id, NUM_TEXT)
    self.assertEqual(tokenizer.eos_id, NUM_TEXT + 9)
    self.assertEqual(
      tokenizer.stop_ids, (NUM_TEXT + 9, NUM_TEXT + 1, NUM_TEXT + 8, 3)
    )
    self.assertEqual(tokenizer.pad_id, NUM_TEXT + 4)
    ids = [NUM_TEXT, 256, *range(NUM_TEXT + 1, NUM_TEXT + 300)]
    self.assertEqual(tokenizer.decode(ids), 'ab')
    # A completion may be cut inside a character.
    self.assertEqual(tokenizer.decode([256, 0xC3]), 'ab\ufffd')

  def test_one_bos_plain_and_in_a_chat(self):
    tokenizer = tiktoken_tokenizer.TiktokenTokenizer(self.path)
    self.assertEqual(tokenizers.encode_prompt(tokenizer, 'ab'), [NUM_TEXT, 256])
    prompt = chat.ChatPrompt(
      tokenizer.chat_template, prefill='12', bos_token=tokenizer.bos_token
    )
    text = prompt.render({'question': ' ab '})
    start, end, eot = NUM_TEXT + 6, NUM_TEXT + 7, NUM_TEXT + 9
    # Llama 3's format: two newlines after a header, content stripped.
    newlines = list(b'\n\n')
    self.assertEqual(
      tokenizers.encode_prompt(tokenizer, text),
      [
        *(NUM_TEXT, start, *b'user', end, *newlines, 256, eot),
        *(start, *b'assistant', end, *newlines, 257),
      ],
    )

  @parameterized.parameters(
    (b'', 'is empty'),
    (b'YQ== 0\nYg== 2\n', 'line 2'),
    (b'YQ== 0\nYQ== 1\n', 'line 2'),
    (b'YQ== 0\nnot base64 1\n', 'line 2'),
    (b'\x0a\x0e\x0a\x05<unk>\x15', 'line 1'),
  )
  def test_bad_file(self, content, words):
    self.path.write_bytes(content)
    with self.assertRaisesRegex(ValueError, words):
      tiktoken_tokenizer.TiktokenTokenizer(self.path)

  def test_missing_file(self):
    with self.assertRaisesRegex(FileNotFoundError, 'is missing'):
      tiktoken_tokenizer.TiktokenTokenizer(self.path.with_name('none'))


def _llama3_file():
  found = importlib.util.find_spec('llama_models')
  for folder in (found and found.submodule_search_locations) or ():
    path = pathlib.Path(folder) / 'llama3' / 'tokenizer.model'
    if path.is_file():
      return path
  return None


@pytest.mark.skipif(_llama3_file() is None, reason='no llama-models')
def test_the_file_of_llama3():
  tokenizer = tiktoken_tokenizer.TiktokenTokenizer(
    _llama3_file(), eos_token=tiktoken_tokenizer.END_OF_TURN
  )
  # The ids that config.json and generation_config.json of Llama 3.1 name.
  assert tokenizer.vocab_size == 128256
  assert tokenizer.bos_id == 128000
  assert set(tokenizer.stop_ids) == {128001, 128008, 128009}
  assert tokenizer.eos_id == 128009
  assert tokenizer.pad_id == 128004
  text = "Hello world, it's 12345 \n\n  degrees: \u00e9\u4e16\u754c\U0001f642"
  ids = tokenizer.encode(text)
  assert ids[:2] == [9906, 1917]
  assert tokenizer.decode(ids) == text
  prompt = chat.ChatPrompt(
    tokenizer.chat_template, system='Be brief.', bos_token=tokenizer.bos_token
  )
  # As ChatFormat.encode_dialog_prompt of llama-models 0.3.0 gives them.
  assert tokenizers.encode_prompt(
    tokenizer, prompt.render({'question': 'What is 2+2?'})
  ) == [
    *(128000, 128006, 9125, 128007, 271, 3513, 10015, 13, 128009),
    *(128006, 882, 128007, 271, 3923, 374, 220, 17, 10, 17, 30, 128009),
    *(128006, 78191, 128007, 271),
  ]

import json

from absl.testing import parameterized
import pytest

from llamarl_jax.data import folder_tokenizer
from llamarl_jax.data import hf_tokenizer
from llamarl_jax.data import tiktoken_tokenizer
from llamarl_jax.data import tokenizers
from tests.data import tiktoken_tokenizer_test
from tests.oracles import hf_folder

NUM_TEXT = tiktoken_tokenizer_test.NUM_TEXT


class FolderTokenizerTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _folder(self, tmp_path):
    self.folder = tmp_path / 'model'
    self.folder.mkdir()

  def _write_tiktoken(self, name='tokenizer.model'):
    path = self.folder / name
    path.parent.mkdir(exist_ok=True)
    tiktoken_tokenizer_test.write_file(path)
    return path

  @parameterized.parameters('tokenizer.model', 'original/tokenizer.model')
  def test_llama3_file_where_there_is_no_other(self, name):
    self._write_tiktoken(name)
    (self.folder / 'generation_config.json').write_text(
      json.dumps({'eos_token_id': [7, 8]})
    )
    chat = folder_tokenizer.load(self.folder, chat=True)
    self.assertEqual(chat.eos_token, '<|eot_id|>')
    self.assertEqual(chat.stop_ids[-2:], (7, 8))
    base = folder_tokenizer.load(self.folder)
    self.assertEqual(base.eos_token, '<|end_of_text|>')
    self.assertEqual(set(base.stop_ids), set(chat.stop_ids))

  def test_hugging_face_files_come_first(self):
    self._write_tiktoken()
    hf_folder.write_tokenizer(self.folder)
    tokenizer = folder_tokenizer.load(self.folder)
    self.assertIsInstance(tokenizer, hf_tokenizer.HuggingFaceTokenizer)

  def test_the_tokenizer_of_another_place(self):
    other = self.folder / 'other'
    hf_folder.write_tokenizer(other, generation={'eos_token_id': hf_folder.EOT})
    (self.folder / 'config.json').write_text('{"eos_token_id": [9]}')
    tokenizer = folder_tokenizer.load(self.folder, other)
    # What either says ends a completion does.
    self.assertEqual(tokenizer.stop_ids, (hf_folder.EOS, hf_folder.EOT, 9))
    tokenizer = folder_tokenizer.load(self.folder, self._write_tiktoken())
    self.assertIsInstance(tokenizer, tiktoken_tokenizer.TiktokenTokenizer)
    self.assertIn(9, tokenizer.stop_ids)

  def test_no_tokenizer(self):
    # Llama 2's file of that name is of another format.
    (self.folder / 'tokenizer.model').write_bytes(b'\x0a\x0e\x0a\x05<unk>')
    with self.assertRaisesRegex(FileNotFoundError, 'has no tokenizer'):
      folder_tokenizer.load(self.folder)
    with self.assertRaisesRegex(FileNotFoundError, "nowhere' does not exist"):
      folder_tokenizer.load(self.folder, self.folder / 'nowhere')

  def test_number_of_tokens(self):
    tokenizer = tokenizers.CharacterTokenizer('0123')  # 6 tokens.
    self.assertIsNone(folder_tokenizer.num_tokens(tokenizer, 6))
    self.assertEqual(folder_tokenizer.num_tokens(tokenizer, 64), 6)
    with self.assertRaisesRegex(ValueError, '6 tokens.*of 5.*model.tokenizer'):
      folder_tokenizer.num_tokens(tokenizer, 5)
    tokenizer.stop_ids = (1, 70)
    with self.assertRaisesRegex(ValueError, '71 tokens'):
      folder_tokenizer.num_tokens(tokenizer, 64)

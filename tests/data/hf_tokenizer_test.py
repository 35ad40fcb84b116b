import json
import os
import pathlib
import pickle
import subprocess
import sys

from absl.testing import parameterized
import pytest
import transformers

from llamarl_jax.data import chat
from llamarl_jax.data import hf_tokenizer
from llamarl_jax.data import tokenizers
from tests.oracles import hf_folder
from tests.oracles.hf_folder import BOS
from tests.oracles.hf_folder import EOM
from tests.oracles.hf_folder import EOS
from tests.oracles.hf_folder import EOT
from tests.oracles.hf_folder import PAD

ROOT = pathlib.Path(__file__).parents[2]
TEXTS = ('', 'ab12', ' é\n\n 1 2', '<bos>ab<eos>', 'a' * 60)
# Each asks for something that transformers gives to templates.
ASKING = (
  '{{ bos_token }}{% if tools is not none %}tools{% endif %}'
  '{% if not day is defined %}{% set day = strftime_now("%d %b %Y") %}'
  '{% endif %}{% for m in messages %}{% if loop.index > 1 %}{% break %}'
  '{% endif %}{% generation %}{{ m | tojson }}{% endgeneration %}'
  '{% endfor %}\n    {% if add_generation_prompt %}\n<go>\n{% endif %}'
)


class HuggingFaceTokenizerTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _folder(self, tmp_path):
    self.folder = tmp_path / 'model'

  def _tokenizer(self, **arguments):
    hf_folder.write_tokenizer(self.folder, **arguments)
    return hf_tokenizer.HuggingFaceTokenizer(self.folder)

  @parameterized.parameters(False, True)
  def test_encodes_and_decodes_as_transformers_does(self, trap):
    tokenizer = self._tokenizer(post='<bos> $A <eos>', trap=trap)
    oracle = transformers.AutoTokenizer.from_pretrained(self.folder)
    for text in TEXTS:
      ids = tokenizer.encode(text)
      self.assertEqual(ids, oracle.encode(text, add_special_tokens=False))
      self.assertEqual(
        tokenizer.decode(ids), oracle.decode(ids, skip_special_tokens=True)
      )
    # A vocabulary padded beyond the tokens, and special tokens.
    self.assertEqual(tokenizer.decode([BOS, *ids, 999, EOT, PAD]), text)
    self.assertEqual(tokenizer.vocab_size, hf_folder.NUM_TOKENS)

  @parameterized.product(
    text=('ab', '<bos>ab', ''), post=('<bos> $A', '<bos> $A <eos>', '$A')
  )
  def test_prompts_have_one_bos_and_no_eos(self, text, post):
    tokenizer = self._tokenizer(post=post)
    ids = tokenizers.encode_prompt(tokenizer, text)
    wanted = '<bos>' in text or '<bos>' in post
    self.assertEqual(ids.count(BOS), int(wanted))
    self.assertEqual(ids[:1] == [BOS], wanted)
    self.assertNotIn(EOS, ids)

  @parameterized.parameters(True, False)
  def test_chat_has_one_bos_whoever_writes_it(self, in_template):
    template = hf_folder.CHAT_TEMPLATE
    if not in_template:
      template = template.removeprefix('{{ bos_token }}')
    tokenizer = self._tokenizer(chat_template=template)
    prompt = chat.ChatPrompt(
      tokenizer.chat_template, bos_token=tokenizer.bos_token
    )
    ids = tokenizers.encode_prompt(tokenizer, prompt.render({'question': '1'}))
    self.assertEqual(ids.count(BOS), 1)
    self.assertEqual(ids[0], BOS)
    self.assertEqual(tokenizer.decode(ids), '[user]1[a]')

  def test_bos_twice_and_stop_at_the_end_of_a_prompt(self):
    tokenizer = self._tokenizer(generation={'eos_token_id': [EOS, EOT]})
    with self.assertRaisesRegex(ValueError, 'token 0 twice.*prompt.user'):
      tokenizers.encode_prompt(tokenizer, '<bos><bos>a')
    with self.assertRaisesRegex(ValueError, 'token 2, which ends'):
      tokenizers.encode_prompt(tokenizer, '[user]a<eot>')

  @parameterized.parameters(
    ({'eos_token_id': EOT}, {}, '<eos>', (EOS, EOT)),
    ({'eos_token_id': [EOS, EOM, EOT]}, {}, '<eot>', (EOT, EOS, EOM)),
    # generation_config.json has the word where it says something.
    ({'eos_token_id': EOM}, {'eos_token_id': EOT}, '<eos>', (EOS, EOM)),
    ({}, {'eos_token_id': [EOT]}, '<eos>', (EOS, EOT)),
    (None, {}, '<eos>', (EOS,)),
    ({'eos_token_id': [EOM, EOT]}, {}, None, (EOM, EOT)),
  )
  def test_stop_tokens(self, generation, config, eos_token, expected):
    hf_folder.write_tokenizer(
      self.folder, generation=generation, eos_token=eos_token
    )
    (self.folder / 'config.json').write_text(json.dumps(config))
    tokenizer = hf_tokenizer.HuggingFaceTokenizer(self.folder)
    self.assertEqual(tokenizer.stop_ids, expected)
    self.assertEqual(tokenizer.eos_id, expected[0])
    self.assertEqual(tokenizer.eos_token, hf_folder.SPECIAL[expected[0]])

  @parameterized.parameters(
    ({'pad_token': '<pad>'}, {'pad_token_id': EOM}, PAD),
    ({}, {'pad_token_id': EOM}, EOM),
    ({}, {'pad_token_id': -1}, EOS),
    ({}, None, EOS),
  )
  def test_padding(self, fields, generation, expected):
    tokenizer = self._tokenizer(generation=generation, **fields)
    self.assertEqual(tokenizer.pad_id, expected)

  def test_another_process_needs_no_transformers(self):
    tokenizer = self._tokenizer()
    again = pickle.loads(pickle.dumps(tokenizer))
    self.assertEqual(again.encode('ab12<eos>'), tokenizer.encode('ab12<eos>'))
    self.assertEqual(again.stop_ids, tokenizer.stop_ids)
    program = (
      'import sys\n'
      'from llamarl_jax.data import hf_tokenizer\n'
      "assert 'transformers' not in sys.modules\n"
      f'hf_tokenizer.HuggingFaceTokenizer({str(self.folder)!r})\n'
      "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
      [sys.executable, '-c', program],
      cwd=ROOT,
      env={**os.environ, 'HF_HUB_OFFLINE': '0'},
      capture_output=True,
      text=True,
      timeout=120,
    )
    self.assertEqual(done.stdout + done.stderr, '')
    self.assertEqual(done.returncode, 0)

  def test_chat_template_of_either_file(self):
    default = {'name': 'default', 'template': 'one'}
    other = {'name': 'tool_use', 'template': 'two'}
    for template, expected in (
      ('text', 'text'),
      ([default, other], 'one'),
      (None, ''),
    ):
      tokenizer = self._tokenizer(chat_template=template)
      self.assertEqual(tokenizer.chat_template, expected)
    (self.folder / 'chat_template.jinja').write_text('file')
    tokenizer = self._tokenizer(chat_template='text')
    self.assertEqual(tokenizer.chat_template, 'file')
    (self.folder / 'chat_template.jinja').unlink()
    with self.assertRaisesRegex(ValueError, "named 'default'"):
      self._tokenizer(chat_template=[other])

  def test_renders_as_transformers_does(self):
    for template in (ASKING, hf_folder.CHAT_TEMPLATE):
      self._tokenizer(chat_template=template)
      oracle = transformers.AutoTokenizer.from_pretrained(self.folder)
      prompt = chat.ChatPrompt(
        template, default_system=True, bos_token='<bos>', eos_token='<eos>'
      )
      content = '<b> "é" & \' '
      expected = oracle.apply_chat_template(
        [{'role': 'user', 'content': content}],
        tokenize=False,
        add_generation_prompt=True,
      )
      self.assertEqual(prompt.render({'question': content}), expected)

  @parameterized.parameters(
    ('tokenizer.json', '{"version": ', 'tokenizer.json is damaged'),
    ('tokenizer.json', '{"version": "1.0"}', 'cannot read the tokenizer'),
    ('tokenizer_config.json', '[]', 'not a JSON object'),
    ('generation_config.json', '{"eos_token_id": "</s>"}', "'</s>' must be"),
    ('generation_config.json', '{"eos_token_id": [true]}', 'must be'),
  )
  def test_damaged_file(self, name, text, words):
    hf_folder.write_tokenizer(self.folder)
    (self.folder / name).write_text(text)
    with self.assertRaisesRegex(ValueError, words):
      hf_tokenizer.HuggingFaceTokenizer(self.folder)

  def test_missing_parts(self):
    with self.assertRaisesRegex(FileNotFoundError, 'not a folder'):
      hf_tokenizer.HuggingFaceTokenizer(self.folder)
    self.folder.mkdir()
    with self.assertRaisesRegex(FileNotFoundError, 'has no tokenizer'):
      hf_tokenizer.HuggingFaceTokenizer(self.folder)
    with self.assertRaisesRegex(ValueError, 'names no token that ends'):
      self._tokenizer(eos_token=None)

"""A Hugging Face folder as the model of a run, and folders that are no such."""

import io
import json

from absl.testing import parameterized
import numpy as np
import pytest

from experiments import command
from experiments import evaluate
from experiments import sample
from experiments import train
from llamarl_jax import types
from llamarl_jax.controller import problems
from llamarl_jax.controller.launchers import registry as launchers
from llamarl_jax.training import batching
from tests.oracles import hf_folder
from tests.oracles import tiny

ENDS = {hf_folder.EOS, hf_folder.EOT, hf_folder.EOM}


def _config(folder, **changes):
  return tiny.get_config(
    **{
      'model__source': 'hf',
      'model__path': str(folder),
      'prompt__chat': True,
      'num_steps': 2,
      'generator__max_prompt_length': 24,
      **changes,
    }
  )


class HuggingFaceRunTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _folder(self, tmp_path):
    self.path = tmp_path
    hf_folder.write_model(tmp_path / 'model')
    hf_folder.write_tokenizer(
      tmp_path / 'model', generation={'eos_token_id': sorted(ENDS)}
    )

  def test_trains_evaluates_and_samples(self):
    config = _config(self.path / 'model')
    model = problems.load_model(config)
    self.assertEqual(model.source.model.vocab_size, 272)
    self.assertEqual(model.source.model.num_tokens, hf_folder.NUM_TOKENS)
    self.assertIsNotNone(model.source.model.rope_scaling)

    summary = train.run(config, self.path / 'run', stream=io.StringIO())
    self.assertEqual(summary['num_steps'], 2)
    self.assertEqual(summary['skipped_steps'], 0)
    lines = (self.path / 'run' / 'metrics.jsonl').read_text().splitlines()
    records = [r for r in map(json.loads, lines) if 'loss' in r]
    self.assertLen(records, 2)
    self.assertTrue(all(np.isfinite(r['loss']) for r in records))
    # Sampler and trainer agree on vocabulary, rotary scaling and temperature.
    self.assertLess(max(r['log_prob_gap'] for r in records), 2e-5)

    results = evaluate.run(config, self.path / 'run')
    self.assertEqual(results['accuracy'], summary['accuracy_after'])
    self._check_samples(config)

  def test_the_end_is_trained_on_where_it_is_the_padding_too(self):
    tokenizer = problems.load_model(_config(self.path / 'model')).tokenizer
    # This tokenizer has no token for padding.
    self.assertEqual(tokenizer.pad_id, hf_folder.EOS)
    rows = batching.empty_rows(1, 6, tokenizer.pad_id)
    # '1', '2' as sampled, which as text would be one token '12'.
    one, two = tokenizer.encode('1')[0], tokenizer.encode('2')[0]
    self.assertLen(tokenizer.encode('12'), 1)
    batching.place_sequence(
      rows, 0, [hf_folder.BOS], [one, two, tokenizer.eos_id]
    )
    np.testing.assert_array_equal(
      rows.tokens[0], [hf_folder.BOS, one, two, *[hf_folder.EOS] * 3]
    )
    np.testing.assert_array_equal(rows.completion_mask[0], [0, 1, 1, 1, 0, 0])
    np.testing.assert_array_equal(rows.segment_ids[0] > 0, [1, 1, 1, 1, 0, 0])

  def _check_samples(self, config):
    groups = sample.run(
      config,
      self.path / 'run',
      num_samples=32,
      temperature=1.0,
      stream=io.StringIO(),
    )
    reasons = set()
    for group in groups:
      prompt = group.request.prompt_tokens
      self.assertEqual(prompt.count(hf_folder.BOS), 1)
      self.assertEqual(prompt[0], hf_folder.BOS)
      self.assertNotIn(hf_folder.EOS, prompt)
      for completion in group.completions:
        tokens = completion.tokens.tolist()
        stopped = completion.finish_reason == types.FinishReason.STOP
        reasons.add(completion.finish_reason)
        # The stop token is kept where it was sampled, and else not invented.
        self.assertEqual(tokens[-1] in ENDS, stopped)
        self.assertTrue(ENDS.isdisjoint(tokens[:-1]))
        # What pads the vocabulary cannot be sampled.
        self.assertLess(max(tokens), hf_folder.NUM_TOKENS)
    self.assertEqual(
      reasons, {types.FinishReason.STOP, types.FinishReason.LENGTH}
    )


class BadFolderTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _folder(self, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
      raise AssertionError('a launcher was made')

    monkeypatch.setattr(launchers, 'make_launcher', refuse)
    self.path = tmp_path
    self.folder = tmp_path / 'model'
    hf_folder.write_model(self.folder)
    hf_folder.write_tokenizer(self.folder)

  def _error(self, **changes):
    config = _config(self.folder, **changes)
    with pytest.raises(command.InputError) as caught:
      train.run(config, self.path / 'run', stream=io.StringIO())
    self.assertFalse((self.path / 'run').exists())
    text = str(caught.value)
    self.assertNotIn('\n', text)
    return text

  @parameterized.parameters(
    ({'model__path': ''}, ("model.path=''", 'folder')),
    ({'model__path': '/no/such'}, ('/no/such', 'config.json')),
    (
      {'model__tokenizer': '/no/tokenizer'},
      ('/no/tokenizer', 'does not exist'),
    ),
    ({'generator__max_new_tokens': 500}, ('524', '128 positions', 'lower')),
    ({'model__source': 'safetensors'}, ("'safetensors'", 'hf')),
    (
      {'prompt__chat': False, 'prompt__default_system': True},
      ('default_system=True', 'prompt.chat=True'),
    ),
    (
      {'prompt__user': '{question}<eos>', 'prompt__chat': False},
      ('token 1', 'ends a completion'),
    ),
  )
  def test_bad_config(self, changes, words):
    text = self._error(**changes)
    for word in words:
      self.assertIn(word, text)

  @parameterized.parameters('config.json', 'model.safetensors')
  def test_missing_file(self, name):
    (self.folder / name).unlink()
    text = self._error()
    self.assertIn(str(self.folder), text)
    self.assertIn(name.removeprefix('model'), text)

  def test_missing_tokenizer(self):
    for name in ('tokenizer.json', 'tokenizer_config.json'):
      (self.folder / name).unlink()
    text = self._error()
    self.assertIn('has no tokenizer', text)
    self.assertIn('copy', text)

  def test_no_chat_template(self):
    hf_folder.write_tokenizer(self.folder, chat_template=None)
    text = self._error()
    self.assertIn('no chat template', text)
    self.assertIn('prompt.chat=False', text)

  def test_tokens_beyond_the_vocabulary(self):
    small = self.path / 'small'
    hf_folder.write_model(small, vocab_size=100)
    hf_folder.write_tokenizer(small)
    text = self._error(model__path=str(small))
    self.assertIn('263 tokens', text)
    self.assertIn('of 100', text)
    self.assertIn('model.tokenizer', text)

  def test_feature_that_is_not_supported(self):
    path = self.folder / 'config.json'
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, 'model_type': 'mixtral'}))
    self.assertIn('mixtral', self._error())

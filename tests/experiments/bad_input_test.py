"""Bad input: one line that names the value and the remedy, nothing started."""

import io
import json
import os
import pathlib
import subprocess
import sys
import time

from absl.testing import parameterized
import pytest

from experiments import command
from experiments import evaluate
from experiments import report
from experiments import train
from llamarl_jax.checkpoints import gguf
from llamarl_jax.controller.launchers import registry as launchers
from tests.oracles import tiny

ROOT = pathlib.Path(__file__).parents[2]
MAX_SECONDS = 10


def _refuse_to_start(*args, **kwargs):
  raise AssertionError('a launcher was made')


class ConfigTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _nothing_starts(self, tmp_path, monkeypatch):
    self.path = tmp_path
    self.patch = monkeypatch
    monkeypatch.setattr(launchers, 'make_launcher', _refuse_to_start)

  def _error(self, config):
    with pytest.raises(command.InputError) as caught:
      train.run(config, self.path / 'run', stream=io.StringIO())
    # Nothing was written either.
    self.assertFalse((self.path / 'run').exists())
    return str(caught.value)

  @parameterized.parameters(
    ({'group_size': 0}, ('group_size=0', 'above 0')),
    ({'group_size': 1}, ('group_size=1', 'at least 2')),
    ({'num_steps': 0}, ('num_steps=0', 'above 0')),
    ({'max_staleness': -1}, ('max_staleness=-1', '0 or more')),
    (
      {'trainer__micro_batch_size': 5},
      ('micro_batch_size=5', '32 completions', 'divisor'),
    ),
    (
      {'trainer__num_devices': 16, 'trainer__fsdp': 16},
      ('trainer.num_devices=16', 'max_simulated_devices=8', 'fewer'),
    ),
    (
      {'trainer__num_devices': 2},
      ('trainer.num_devices=2', 'trainer.fsdp', '= 1'),
    ),
    ({'batch_order': 'random'}, ("'random'", 'completion')),
    (
      {'max_staleness': 3, 'max_token_age': 2},
      ('max_token_age=2', 'max_staleness=3', '0 to leave out none'),
    ),
    ({'generator__swap': 'stop'}, ("'stop'", 'drain')),
    ({'generator__tail_share': 2.0}, ('tail_share=2.0', 'at most 1')),
    (
      {'generator__tail_share': 0.1, 'trainer__pack_tokens': 40},
      ('pack_tokens=40', '= 48'),
    ),
    ({'generator__top_k': 5}, ('top_k=5', 'evaluation.top_k')),
    ({'generator__top_p': 0.9}, ('top_p=0.9', 'all of the vocabulary')),
    ({'generator__min_new_tokens': 2}, ('min_new_tokens=2', 'training')),
    ({'evaluation__top_p': 0.0}, ('top_p=0.0', 'above 0')),
    ({'evaluation__min_new_tokens': 9}, ('min_new_tokens=9', 'tokens=4')),
    ({'generator__stop_strings': ('',)}, ("stop_strings=('',)", 'not empty')),
    ({'generator__refresh_cache': 'drop'}, ("'drop'", 'prefill')),
    ({'generator__quantization': 'int4'}, ("'int4'", 'int8')),
    ({'generator__cache_bytes': 99}, ('cache_bytes=99', 'one slot', 'int8')),
    (
      {'weights__transport': 'collective', 'launcher__name': 'ray'},
      ('collective', 'one jax.distributed world', 'transfer'),
    ),
    ({'generator__temperature': 0.0}, ('temperature=0.0', 'above 0')),
    ({'generator__max_prompt_length': 2}, ('tokens', 'max_prompt_length=2')),
    ({'algorithm__loss': 'aipoo'}, ("'aipoo'", 'aipo')),
    ({'algorithm__advantage': 'mean'}, ("'mean'", 'leave_one_out')),
    ({'algorithm__reduction': 'sum'}, ("'sum'", 'token')),
    ({'trainer__schedule': 'step'}, ("'step'", 'cosine')),
    ({'reward__scorer': 'judge'}, ("'judge'", 'exact')),
    ({'problems__source': 'web'}, ("'web'", 'arithmetic')),
    ({'launcher__name': 'slurm'}, ("'slurm'", 'ray')),
    (
      {'weights__transport': 'device_put', 'launcher__name': 'ray'},
      ('device_put', 'transfer'),
    ),
    (
      {'trainer__pack_tokens': 10},
      ('trainer.pack_tokens=10', 'longest sequence', 'raise it'),
    ),
    (
      {
        'trainer__pack_tokens': 256,
        'trainer__pack_rows': 3,
        'trainer__fsdp': 2,
        'trainer__num_devices': 2,
      },
      ('trainer.pack_rows=3', '= 2 devices', 'multiple'),
    ),
    ({'trainer__remat': 'some'}, ("'some'", 'full')),
    ({'trainer__attention': 'flash'}, ("'flash'", 'splash')),
    ({'trainer__attention': 'cudnn'}, ("'cudnn'", "'cpu'", "'auto'")),
    ({'trainer__compute_dtype': 'float16'}, ("'float16'", 'bfloat16')),
    (
      {'trainer__attention': 'splash', 'launcher__platform': 'tpu'},
      ('splash', 'share_prompts=False'),
    ),
    ({'prompt__chat': True}, ('prompt.chat', 'False')),
    ({'prompt__user': '{q} ='}, ("'q'", 'question')),
    ({'prompt__user': 'What is {question}?'}, ('alphabet', 'W')),
    ({'evaluation__num_problems': 10**6}, ('num_problems=1000000', 'fewer')),
  )
  def test_names_value_and_remedy(self, changes, words):
    text = self._error(tiny.get_config(**changes))
    for word in words:
      self.assertIn(word, text)

  def test_missing_model_file_says_how_to_get_it(self):
    config = tiny.get_config(model__source='gguf', model__path='smollm2')
    self.patch.setattr(gguf.importlib.util, 'find_spec', lambda name: None)
    self.assertIn('make smollm2', self._error(config))
    config = tiny.get_config(model__source='gguf', model__path='/no/such.gguf')
    text = self._error(config)
    self.assertIn('/no/such.gguf', text)
    self.assertIn('make smollm2', text)

  def test_malformed_line_is_numbered(self):
    path = self.path / 'problems.jsonl'
    lines = [
      json.dumps({'question': f'{i}+1', 'answer': f'{i + 1}'}) for i in range(9)
    ]
    path.write_text('\n'.join([*lines[:4], '{"question": ', *lines[4:]]))
    config = tiny.get_config(problems__source='jsonl', problems__path=str(path))
    text = self._error(config)
    self.assertIn('line 5', text)
    self.assertIn('malformed JSON', text)


class WorkdirTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _workdir(self, tmp_path):
    self.path = tmp_path

  def test_another_run_in_the_workdir(self):
    (self.path / 'config.json').write_text(
      json.dumps(tiny.get_config().to_dict())
    )
    with pytest.raises(command.InputError, match=r'seed 0 -> 1.*another'):
      train.run(tiny.get_config(seed=1), self.path, stream=io.StringIO())

  def test_a_folder_that_is_no_run(self):
    (self.path / 'thesis.tex').write_text('')
    with pytest.raises(command.InputError, match='not empty'):
      train.run(tiny.get_config(), self.path, stream=io.StringIO())
    with pytest.raises(command.InputError, match='holds no run'):
      report.run(self.path)
    with pytest.raises(command.InputError, match='no folder'):
      evaluate.run(tiny.get_config(), self.path)


class CommandTest(parameterized.TestCase):
  """The command itself: one line on stderr, status 2, in time."""

  @parameterized.parameters(
    (('--config.num_step=3',), ('num_step',)),
    (('--config.num_steps=three',), ('three',)),
    (('--config.group_size=0',), ('group_size=0',)),
    (('--config=configs/nothing.py',), ('configs/nothing.py',)),
    (('--batch=3',), ('batch',)),
  )
  def test_one_line(self, arguments, words):
    if not arguments[0].startswith('--config='):
      arguments = ('--config=tests/oracles/tiny.py', *arguments)
    start = time.monotonic()
    done = subprocess.run(
      [
        sys.executable,
        '-m',
        'experiments.train',
        *arguments,
        f'--workdir={os.devnull}x',
      ],
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=120,
    )
    self.assertLess(time.monotonic() - start, 3 * MAX_SECONDS)
    self.assertEqual(done.returncode, 2, done.stderr)
    self.assertEqual(done.stdout, '')
    lines = done.stderr.strip().splitlines()
    self.assertLen(lines, 1)
    for word in ('error: ', *words):
      self.assertIn(word, lines[0])

import dataclasses
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import parameterized
import chex
import gguf as gguf_package
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers as tokenizers_package

from experiments import command
from experiments import convert
from llamarl_jax.checkpoints import gguf
from llamarl_jax.checkpoints import hf
from llamarl_jax.checkpoints import hf_config
from llamarl_jax.checkpoints import run_policy
from llamarl_jax.checkpoints import run_state
from llamarl_jax.controller import problems
from llamarl_jax.models import llama
from llamarl_jax.models import lora
from llamarl_jax.models.config import LlamaConfig
from llamarl_jax.models.config import LoRAConfig
from llamarl_jax.runtime import workdir as workdir_lib
from llamarl_jax.training import optimizer as optimizers
from llamarl_jax.training import state as states
from tests.oracles import tiny

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = LlamaConfig(
  vocab_size=7,
  width=8,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  mlp_width=12,
  rope_theta=100.0,
)
TOKENS = ('<end>', '<begin>', 'a', 'b', 'ab', 'Ġ', 'é')


def _write_gguf(path):
  """Writes a model by the gguf package; returns its tensors."""
  writer = gguf_package.GGUFWriter(path, 'llama')
  writer.add_block_count(CONFIG.num_layers)
  writer.add_context_length(CONFIG.max_position)
  writer.add_embedding_length(CONFIG.width)
  writer.add_feed_forward_length(CONFIG.mlp_width)
  writer.add_head_count(CONFIG.num_heads)
  writer.add_head_count_kv(CONFIG.num_kv_heads)
  writer.add_key_length(CONFIG.head_dim)
  writer.add_layer_norm_rms_eps(CONFIG.norm_epsilon)
  writer.add_rope_freq_base(CONFIG.rope_theta)
  writer.add_rope_dimension_count(CONFIG.head_dim)
  writer.add_tokenizer_model('gpt2')
  writer.add_tokenizer_pre('smollm')
  writer.add_token_list(TOKENS)
  writer.add_token_types([3, 3, 1, 1, 1, 1, 1])
  writer.add_token_merges(['a b'])
  writer.add_eos_token_id(0)
  writer.add_bos_token_id(1)
  writer.add_chat_template('{{ messages }}')
  rng = np.random.default_rng(0)
  width, inner = CONFIG.width, CONFIG.mlp_width
  shapes = {'token_embd': (7, width), 'output_norm': (width,)}
  for i in range(CONFIG.num_layers):
    for name, shape in {
      'attn_norm': (width,),
      'attn_q': (16, width),
      'attn_k': (8, width),
      'attn_v': (8, width),
      'attn_output': (width, 16),
      'ffn_norm': (width,),
      'ffn_gate': (inner, width),
      'ffn_up': (inner, width),
      'ffn_down': (width, inner),
    }.items():
      shapes[f'blk.{i}.{name}'] = shape
  for name, shape in shapes.items():
    tensor = rng.normal(size=shape).astype(np.float32)
    writer.add_tensor(f'{name}.weight', tensor)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def _random(config):
  """Returns random parameters, adapters that add something among them."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda spec: jnp.asarray(rng.normal(size=spec.shape), jnp.float32),
    llama.abstract_params(config),
  )


class ConvertTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.path = pathlib.Path(folder.name)

  def _run(self, *args, **kwargs):
    stream = io.StringIO()
    convert.run(*args, stream=stream, **kwargs)
    return stream.getvalue()

  def test_gguf_to_hf(self):
    _write_gguf(self.path / 'model.gguf')
    output = self.path / 'hf'
    text = self._run(
      'gguf_to_hf', self.path / 'model.gguf', output, dtype='float32'
    )
    self.assertRegex(text, r'^wrote .*/hf: [\d,]+ parameters\n$')
    file = gguf.read_model_file(str(self.path / 'model.gguf'))
    config = hf_config.read_config(output)
    self.assertEqual(config, file.config)
    chex.assert_trees_all_equal(
      hf.load_params(output, config),
      gguf.load_params(str(self.path / 'model.gguf'), config),
    )
    ids = {'bos_token_id': 1, 'eos_token_id': 0}
    generation = json.loads((output / 'generation_config.json').read_text())
    self.assertEqual(generation, ids)
    settings = json.loads((output / 'tokenizer_config.json').read_text())
    self.assertEqual(settings['chat_template'], '{{ messages }}')
    self.assertEqual(settings['eos_token'], '<end>')
    tokenizer = tokenizers_package.Tokenizer.from_file(
      str(output / 'tokenizer.json')
    )
    self.assertEqual(tokenizer.encode('abba<end>').ids, [4, 3, 2, 0])

  @parameterized.parameters(False, True)
  def test_hf_to_orbax_and_back(self, as_a_run):
    _write_gguf(self.path / 'model.gguf')
    folder = self.path / 'hf'
    self._run('gguf_to_hf', self.path / 'model.gguf', folder, dtype='float32')
    workdir = self.path / 'run'
    self._run('hf_to_orbax', folder, workdir)
    params = jax.device_put(hf.load_params(folder, CONFIG))
    stored = run_state.load_params(workdir / 'checkpoints', params)
    chex.assert_trees_all_equal(stored, params)

    back = self.path / 'back'
    model = folder
    if as_a_run:
      # The config of a run names the folder it started from.
      config = tiny.get_config(model__source='hf', model__path=str(folder))
      workdir_lib.prepare(workdir, config.to_dict())
      model = None
    self._run('orbax_to_hf', workdir, back, model=model, dtype='float32')
    for path in folder.iterdir():
      self.assertEqual(path.read_bytes(), (back / path.name).read_bytes())

  @parameterized.parameters(None, LoRAConfig(2, 4.0, ('query', 'down')))
  def test_checkpoint_of_a_run(self, adapters):
    # As the trainer writes it: a train state under the workdir of a config.
    run_config = tiny.get_config()
    workdir_lib.prepare(self.path, run_config.to_dict())
    base = problems.load_model(run_config).source.model
    model = dataclasses.replace(base, lora=adapters)
    params = _random(model)
    optimizer = optimizers.make_optimizer(learning_rate=0.1)
    checkpointer = run_state.RunStateCheckpointer(self.path / 'checkpoints')
    for step in (3, 5):
      state = states.init_train_state(params, optimizer)
      checkpointer.save(step, state, run_policy.lora_metadata(model))
      params = jax.tree.map(lambda x: x * 2, params)
    checkpointer.close()

    for step, scale in ((None, 2), (3, 1)):
      output = self.path / f'hf{step}'
      self._run('orbax_to_hf', self.path, output, step=step, dtype='float32')
      config = hf_config.read_config(output)
      self.assertEqual(config, base)
      trained = jax.tree.map(lambda x, n=scale: x * n / 4, params)
      _, expected = lora.merge(model, trained)
      chex.assert_trees_all_close(
        hf.load_params(output, config), expected, rtol=1e-5
      )

  def test_bad_input(self):
    full = self.path / 'full'
    full.mkdir()
    (full / 'thesis.tex').write_text('')
    new = self.path / 'new'
    for arguments, options, message in (
      (('gguf_to_hf', 'x', full), {}, 'not an empty folder'),
      (('gguf_to_hf', '/no/such.gguf', new), {}, '/no/such.gguf'),
      (('hf_to_orbax', full, new), {}, 'config.json: no such file'),
      (('orbax_to_hf', full, new), {}, 'holds no run'),
      (('orbax_to_hf', full, new), {'model': full}, 'config.json: no such'),
      (('hf_to_gguf', full, new), {}, "'hf_to_gguf'.*'orbax_to_hf'"),
      (('gguf_to_hf', full, new), {'dtype': 'int8'}, "'int8'.*'bfloat16'"),
    ):
      with self.assertRaisesRegex(command.InputError, message):
        self._run(*arguments, **options)
      self.assertFalse(new.exists())

  def test_command(self):
    done = subprocess.run(
      [
        *(sys.executable, '-m', 'experiments.convert'),
        *('--conversion=hf_to_orbax', '--input=/no/model'),
        f'--output={os.devnull}x',
      ],
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=120,
    )
    self.assertEqual((done.returncode, done.stdout), (2, ''), done.stderr)
    self.assertEqual(len(done.stderr.strip().splitlines()), 1)
    self.assertStartsWith(done.stderr, 'error: /no/model/config.json: no such')

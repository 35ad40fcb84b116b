"""Converts models between GGUF, Hugging Face folders and run checkpoints.

  python -m experiments.convert --conversion=gguf_to_hf --input=FILE|smollm2
      --output=FOLDER [--dtype=bfloat16]
  python -m experiments.convert --conversion=hf_to_orbax --input=FOLDER
      --output=WORKDIR
  python -m experiments.convert --conversion=orbax_to_hf --input=WORKDIR
      --output=FOLDER [--step=N] [--model=FOLDER] [--dtype=bfloat16]

The output is new and appears when complete. A Hugging Face folder has what
transformers loads: config, safetensors, tokenizer and stop tokens. WORKDIR is
that of a run: its adapters, if it trained some, are merged, and its
config.json tells the model; --model names a Hugging Face folder instead.
hf_to_orbax writes parameters alone, as a checkpoint that `evaluate` and
`sample` read with --workdir, and orbax_to_hf with --model.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import json
import pathlib
import shutil
import sys
import tempfile
from typing import Any
from typing import TextIO

from absl import flags
import jax
import jax.numpy as jnp
import ml_collections

from experiments import command
from llamarl_jax.checkpoints import gguf
from llamarl_jax.checkpoints import hf
from llamarl_jax.checkpoints import hf_config
from llamarl_jax.checkpoints import new_folder
from llamarl_jax.checkpoints import run_policy
from llamarl_jax.checkpoints import run_state
from llamarl_jax.controller import problems
from llamarl_jax.data import tokenizers
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.runtime import workdir as workdir_lib

_CHECKPOINTS = 'checkpoints'
_DTYPES = ('bfloat16', 'float16', 'float32')


@dataclasses.dataclass(frozen=True)
class _Job:
  """What is to be converted.

  Attributes:
    input: file or folder.
    output: folder to be made.
    dtype: of weights in a Hugging Face folder.
    step: which checkpoint, None = the newest.
    model: Hugging Face folder that describes a checkpoint, or None.
  """

  input: pathlib.Path
  output: pathlib.Path
  dtype: str
  step: int | None
  model: pathlib.Path | None


def run(
  conversion: str,
  source: str | pathlib.Path,
  output: str | pathlib.Path,
  *,
  dtype: str = 'bfloat16',
  step: int | None = None,
  model: str | pathlib.Path | None = None,
  stream: TextIO | None = None,
) -> None:
  """Converts a model and says what was made.

  Args:
    conversion: a key of CONVERSIONS.
    source: file or folder to read.
    output: folder to make.
    dtype: of weights in a Hugging Face folder.
    step: which checkpoint, None = the newest.
    model: Hugging Face folder with config.json and tokenizer of a checkpoint;
      None = as the config of the run says.
    stream: to print to, None = standard output.

  Raises:
    command.InputError: the input is not what is said, or the output is there.
  """
  with command.checking_input():
    if conversion not in CONVERSIONS:
      raise ValueError(
        f'conversion={conversion!r} must be one of {sorted(CONVERSIONS)}'
      )
    if dtype not in _DTYPES:
      raise ValueError(f'dtype={dtype!r} must be one of {list(_DTYPES)}')
    # Before weights are read, which may take minutes.
    new_folder.check(output)
    job = _Job(
      pathlib.Path(source),
      pathlib.Path(output),
      dtype,
      step,
      None if model is None else pathlib.Path(model),
    )
    config = CONVERSIONS[conversion](job)
  count = config_lib.num_parameters(config)
  print(f'wrote {output}: {count:,} parameters', file=stream or sys.stdout)


def _gguf_to_hf(job: _Job) -> config_lib.LlamaConfig:
  smollm2 = str(job.input) == 'smollm2'
  path = gguf.find_smollm2() if smollm2 else str(job.input)
  file = gguf.read_model_file(path)
  params = gguf.load_params(path, file.config)
  with tempfile.TemporaryDirectory() as folder:
    ids = _write_tokenizer(pathlib.Path(folder), file)
    hf.export(
      job.output,
      params,
      file.config,
      dtype=jnp.dtype(job.dtype),
      tokenizer_files_from=folder,
      token_ids=ids,
    )
  return file.config


def _hf_to_orbax(job: _Job) -> config_lib.LlamaConfig:
  config = hf_config.read_config(job.input)
  # Master weights are float32, as those of a run.
  params = hf.load_params(job.input, config)
  with new_folder.making(job.output) as partial:
    checkpointer = run_state.RunStateCheckpointer(partial / _CHECKPOINTS)
    try:
      checkpointer.save_params(0, params, {})
    finally:
      checkpointer.close()
  return config


def _orbax_to_hf(job: _Job) -> config_lib.LlamaConfig:
  checkpoints = job.input / _CHECKPOINTS
  with tempfile.TemporaryDirectory() as folder:
    tokenizer, ids = job.model, None
    if job.model is not None:
      config = hf_config.read_config(job.model)
    else:
      settings = workdir_lib.read_config(job.input)
      run_config = ml_collections.ConfigDict(settings)
      config = problems.load_model(run_config).source.model
      tokenizer, ids = _tokenizer_of_run(run_config, pathlib.Path(folder))
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(
      lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=device),
      llama.abstract_params(config),
    )
    params = run_policy.load_merged(checkpoints, config, abstract, job.step)
    hf.export(
      job.output,
      params,
      config,
      dtype=jnp.dtype(job.dtype),
      tokenizer_files_from=tokenizer,
      token_ids=ids,
    )
  return config


CONVERSIONS: Mapping[str, Callable[[_Job], config_lib.LlamaConfig]] = {
  'gguf_to_hf': _gguf_to_hf,
  'hf_to_orbax': _hf_to_orbax,
  'orbax_to_hf': _orbax_to_hf,
}


def _tokenizer_of_run(
  config: ml_collections.ConfigDict, folder: pathlib.Path
) -> tuple[pathlib.Path | None, Mapping[str, Any] | None]:
  """Returns where the tokenizer files of a run are, and its token ids.

  Args:
    config: of the run.
    folder: to write them to.
  """
  if config.model.source == 'hf':
    hf.copy_tokenizer_files(config.model.path, folder)
    other = pathlib.Path(config.model.tokenizer)
    if config.model.tokenizer and other.is_file():
      shutil.copyfile(other, folder / 'tokenizer.model')
    elif config.model.tokenizer:
      hf.copy_tokenizer_files(other, folder)
    return folder, hf.read_token_ids(config.model.path)
  if config.model.source == 'gguf':
    path = config.model.path
    path = gguf.find_smollm2() if path == 'smollm2' else path
    return folder, _write_tokenizer(folder, gguf.read_model_file(path))
  # There are no such files of the character tokenizer of models from scratch.
  characters = tokenizers.CharacterTokenizer()
  return None, {
    'eos_token_id': characters.eos_id,
    'pad_token_id': characters.pad_id,
  }


def _write_tokenizer(
  folder: pathlib.Path, file: gguf.ModelFile
) -> dict[str, int]:
  """Writes the tokenizer of a GGUF file as transformers reads it.

  Returns:
    The ids of the special tokens, by their key in config.json.
  """
  fields = file.tokenizer
  tokenizer = tokenizers.BytePairTokenizer(**dataclasses.asdict(fields))
  (folder / 'tokenizer.json').write_text(tokenizer.to_json())
  settings: dict[str, Any] = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'model_max_length': file.config.max_position,
    'clean_up_tokenization_spaces': False,
  }
  ids = {}
  for name in ('bos', 'eos', 'pad'):
    token = getattr(fields, f'{name}_id')
    if token is not None:
      ids[f'{name}_token_id'] = token
      settings[f'{name}_token'] = fields.tokens[token]
  if file.chat_template:
    settings['chat_template'] = file.chat_template
  text = json.dumps(settings, indent=2) + '\n'
  (folder / 'tokenizer_config.json').write_text(text)
  return ids


def define_flags() -> None:
  """Defines the flags of the command."""
  flags.DEFINE_enum('conversion', None, sorted(CONVERSIONS), 'What to do.')
  flags.DEFINE_string('input', None, 'File or folder to read.')
  flags.DEFINE_string('output', None, 'Folder to make.')
  flags.DEFINE_enum('dtype', 'bfloat16', _DTYPES, 'Of the weights exported.')
  flags.DEFINE_integer('step', None, 'Checkpoint; the newest if unset.')
  flags.DEFINE_string(
    'model', None, 'Hugging Face folder with config and tokenizer.'
  )


def main(values: flags.FlagValues) -> None:
  """Runs the command."""
  for name in ('conversion', 'input', 'output'):
    if not values[name].value:
      raise command.InputError(f'--{name} is missing; see --help')
  run(
    values.conversion,
    values.input,
    values.output,
    dtype=values.dtype,
    step=values.step,
    model=values.model,
  )


if __name__ == '__main__':
  command.run(define_flags, main)

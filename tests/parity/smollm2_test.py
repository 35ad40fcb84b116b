"""SmolLM2-135M: GGUF to a folder that transformers continues prompts with."""

import dataclasses
import io

import jax
import pytest
import torch
import transformers

from experiments import convert
from llamarl_jax import types
from llamarl_jax.checkpoints import gguf
from llamarl_jax.data import chat
from llamarl_jax.data import tokenizers
from llamarl_jax.executors import generator

NUM_NEW = 24
PROMPTS = (
  'The capital of France is',
  'def fibonacci(n):\n',
  'Water boils at a temperature of 100',
  'Once upon a time, in a small village by the sea,',
  '<|im_start|>user\nName three colors.<|im_end|>\n<|im_start|>assistant\n',
  'The largest planet of the solar system is',
  'import numpy as np\n\ndef mean(values):\n',
  '1, 2, 3, 4, 5,',
  'Dear Sir or Madam,\n\nI am writing to',
  'She opened the door and',
  'In 1492, Christopher Columbus',
  'The opposite of hot is',
  'To make bread, you need flour,',
  'SELECT name FROM',
  'A triangle has',
  'The three states of matter are',
  'Photosynthesis is the process by which',
  'Hello',
  'Q: What is 7 + 5?\nA:',
  'My favorite book is',
)
# Fewer than the prompts: slots are refilled.
NUM_SLOTS = 8


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('smollm2') / 'hf'
  convert.run(
    'gguf_to_hf', 'smollm2', path, dtype='float32', stream=io.StringIO()
  )
  return path


@pytest.fixture(scope='module')
def file():
  return gguf.read_model_file(gguf.find_smollm2())


@pytest.fixture(scope='module')
def tokenizer(file):
  return tokenizers.BytePairTokenizer(**dataclasses.asdict(file.tokenizer))


def _ours(file, tokenizer):
  """Returns the greedy continuation of each prompt, by the generator."""
  encoded = [tuple(tokenizer.encode(prompt)) for prompt in PROMPTS]
  executor = generator.GeneratorExecutor(
    devices=jax.devices()[:1],
    name='generator',
    settings=generator.GeneratorSettings(
      model=file.config,
      mesh={'tensor': 1},
      tokenizer=tokenizer,
      seed=0,
      num_slots=NUM_SLOTS,
      segment_length=7,
      max_prompt_length=max(map(len, encoded)),
      max_new_tokens=NUM_NEW,
    ),
  )
  params = gguf.load_params(gguf.find_smollm2(), file.config)
  params = jax.tree.map(jax.device_put, params, executor.param_shardings)
  executor.adopt(types.VersionedParams(types.Version(0, 0), params))
  requests = [
    types.Request(
      admission_index=i,
      stream=types.Stream.EVALUATION,
      problem=types.Problem(i, prompt, ''),
      prompt_tokens=tokens,
      num_samples=1,
      temperature=0.0,
      max_new_tokens=NUM_NEW,
    )
    for i, (prompt, tokens) in enumerate(zip(PROMPTS, encoded, strict=True))
  ]
  groups, inputs = [], requests
  while len(groups) < len(requests):
    groups.extend(executor.step(inputs, None).outputs)
    inputs = []
  executor.close()
  groups.sort(key=lambda group: group.request.admission_index)
  return [list(map(int, group.completions[0].tokens)) for group in groups]


@pytest.mark.timeout(1200)
def test_same_greedy_continuations(folder, file, tokenizer):
  theirs = transformers.AutoTokenizer.from_pretrained(folder)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32
  )
  expected = []
  for prompt in PROMPTS:
    ids = theirs(prompt, add_special_tokens=False)['input_ids']
    assert ids == tokenizer.encode(prompt)
    # What ends a completion comes from generation_config.json.
    output = model.generate(
      torch.tensor([ids]), do_sample=False, max_new_tokens=NUM_NEW
    )
    expected.append(output[0, len(ids) :].tolist())
  del model
  actual = _ours(file, tokenizer)
  assert actual == expected
  # They say something, and not all the same.
  assert len({tuple(tokens) for tokens in actual}) == len(PROMPTS) == 20


def test_same_tokens_and_chat(folder, file, tokenizer):
  theirs = transformers.AutoTokenizer.from_pretrained(folder)
  text = 'Ünïcödé \N{GRINNING FACE}, tabs\t and  spaces; 12345 + 6 = 12351.\n'
  ids = theirs(text)['input_ids']
  # No token is added: a template alone writes the beginning of sequence.
  assert ids == tokenizer.encode(text)
  assert theirs.decode(ids) == text
  assert theirs.eos_token_id == file.tokenizer.eos_id
  prompt = chat.ChatPrompt(
    file.chat_template,
    default_system=True,
    bos_token=file.bos_token,
    eos_token=file.eos_token,
  ).render({'question': 'What is 2 + 2?'})
  assert (
    theirs.apply_chat_template(
      [{'role': 'user', 'content': 'What is 2 + 2?'}],
      tokenize=False,
      add_generation_prompt=True,
    )
    == prompt
  )

"""Hugging Face folders made on the fly: tokenizer files, and a tiny model."""

import json
import pathlib

import numpy as np
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import processors

from llamarl_jax.checkpoints import hf
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.sharding import spec

SPECIAL = ('<bos>', '<eos>', '<eot>', '<eom>', '<pad>')
BOS, EOS, EOT, EOM, PAD = range(5)
# Two ways to write '12': text made into tokens again may not be what it was.
MERGES = [('1', '2'), ('a', 'b')]
NUM_TOKENS = len(SPECIAL) + 256 + len(MERGES)
CHAT_TEMPLATE = (
  "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]"
  "{{ m['content'] | trim }}<eot>{% endfor %}"
  '{% if add_generation_prompt %}[a]{% endif %}'
)


def write_tokenizer(
  folder: pathlib.Path,
  *,
  post: str = '<bos> $A',
  generation: dict | None = None,
  chat_template: object = CHAT_TEMPLATE,
  trap: bool = False,
  **fields: object,
) -> None:
  """Writes a byte-level tokenizer.

  Args:
    folder: made where it does not exist.
    post: what the tokenizer's own rule adds, as TemplateProcessing writes it.
    generation: of generation_config.json; None = no such file.
    chat_template: of tokenizer_config.json.
    trap: put truncation and padding into tokenizer.json.
    **fields: further ones of tokenizer_config.json; None takes one away.
  """
  folder.mkdir(exist_ok=True)
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokens = [*SPECIAL, *alphabet, *(a + b for a, b in MERGES)]
  tokenizer = tokenizers.Tokenizer(
    models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=MERGES)
  )
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens(
    [tokenizers.AddedToken(t, special=True, normalized=False) for t in SPECIAL]
  )
  tokenizer.post_processor = processors.TemplateProcessing(
    single=post, special_tokens=[(t, i) for i, t in enumerate(SPECIAL)]
  )
  if trap:
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50, pad_token='<pad>', pad_id=PAD)
  tokenizer.save(str(folder / 'tokenizer.json'))
  fields = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'bos_token': '<bos>',
    'eos_token': '<eos>',
    'chat_template': chat_template,
    **fields,
  }
  kept = {name: value for name, value in fields.items() if value is not None}
  (folder / 'tokenizer_config.json').write_text(json.dumps(kept))
  if generation is not None:
    (folder / 'generation_config.json').write_text(json.dumps(generation))


def write_model(folder: pathlib.Path, *, vocab_size: int = 272) -> None:
  """Writes a random model, of a vocabulary padded beyond the tokens."""
  config = config_lib.LlamaConfig(
    vocab_size=vocab_size,
    width=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_width=64,
    rope_theta=10000.0,
    max_position=128,
    rope_scaling=config_lib.RopeScaling(8.0, 1.0, 4.0, 16),
  )
  rng = np.random.default_rng(0)
  leaves = spec.named_leaves(llama.abstract_params(config))
  params: dict = {}
  for name, leaf in leaves.items():
    *folders, last = name.split('/')
    node = params
    for part in folders:
      node = node.setdefault(part, {})
    node[last] = rng.normal(0, 0.3, leaf.shape).astype(np.float32)
  hf.export(folder, params, config, dtype=np.float32)

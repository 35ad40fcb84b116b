"""Which tokenizer a model folder has: Hugging Face's, or Llama 3's own file."""

import pathlib

from llamarl_jax.data import hf_tokenizer
from llamarl_jax.data import tiktoken_tokenizer
from llamarl_jax.data import tokenizers

# Where releases of Llama 3 keep it, below the folder.
_TIKTOKEN_FILES = ('tokenizer.model', 'original/tokenizer.model')


def load(
  folder: str | pathlib.Path,
  tokenizer: str | pathlib.Path = '',
  *,
  chat: bool = False,
) -> hf_tokenizer.HuggingFaceTokenizer | tiktoken_tokenizer.TiktokenTokenizer:
  """Returns the tokenizer of a model.

  Args:
    folder: of the model; its stop tokens stop completions in any case.
    tokenizer: another folder, or a Llama 3 `tokenizer.model`; empty takes that
      of `folder`, a tokenizer.json before a `tokenizer.model`.
    chat: whether completions are turns of a chat. (The Llama 3 file does not
      say what ends them, a Hugging Face folder does.)

  Raises:
    FileNotFoundError: a folder or its tokenizer is missing.
    ValueError: a file is damaged, or no token ends a completion.
  """
  home = pathlib.Path(tokenizer or folder)
  if not home.exists():
    raise FileNotFoundError(
      f'{str(home)!r} does not exist: give the folder of a model, with'
      ' config.json, *.safetensors and tokenizer (models are not fetched).'
    )
  file = home if home.is_file() else _tiktoken_file(home)
  stop_ids = hf_tokenizer.model_stop_ids(pathlib.Path(folder))
  if file is None:
    return hf_tokenizer.HuggingFaceTokenizer(home, extra_stop_ids=stop_ids)
  return tiktoken_tokenizer.TiktokenTokenizer(
    file,
    eos_token=(
      tiktoken_tokenizer.END_OF_TURN if chat else tiktoken_tokenizer.END_OF_TEXT
    ),
    extra_stop_ids=stop_ids,
  )


def num_tokens(tokenizer: tokenizers.Tokenizer, vocab_size: int) -> int | None:
  """Returns the tokens there are where a vocabulary is padded, else None.

  Args:
    tokenizer: of the model.
    vocab_size: of the model, often rounded up for the hardware.

  Raises:
    ValueError: the tokenizer has tokens the model has not.
  """
  count = max(tokenizer.vocab_size, *(i + 1 for i in tokenizer.stop_ids))
  if count > vocab_size:
    raise ValueError(
      f'the tokenizer has {count} tokens, stop tokens among them, but the'
      f' vocabulary of the model is of {vocab_size}: give the tokenizer'
      ' (model.tokenizer) and the eos_token_id that belong to the model'
    )
  return count if count < vocab_size else None


def _tiktoken_file(folder: pathlib.Path) -> pathlib.Path | None:
  """Returns the file to read, None where transformers is to read the folder."""
  if hf_tokenizer.has_tokenizer(folder):
    return None
  for name in _TIKTOKEN_FILES:
    if tiktoken_tokenizer.is_tiktoken_file(folder / name):
      return folder / name
  return None

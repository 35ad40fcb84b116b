"""Tokenizers of Hugging Face folders, read by transformers without torch.

transformers settles what the files of a folder mean together; what it makes of
them is one `tokenizers.Tokenizer`, and only that is kept and sent to other
processes, which then need not import transformers (seconds) at all.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import json
import os
import pathlib
from typing import Any

# Any of them will do: the rest is settled by transformers.
_TOKENIZER_FILES = ('tokenizer.json', 'tokenizer_config.json')
_NO_ADVICE = 'TRANSFORMERS_NO_ADVISORY_WARNINGS'


class HuggingFaceTokenizer:
  """The tokenizer of a folder; see `tokenizers.Tokenizer`.

  Attributes:
    bos_token: text of the token that begins a sequence, or ''.
    eos_token: text of the token that ends a completion.
    chat_template: jinja text; empty where the folder has none.
  """

  def __init__(
    self, folder: str | pathlib.Path, *, extra_stop_ids: Sequence[int] = ()
  ):
    """Reads the folder; nothing is fetched and no code in it is run.

    `stop_ids` are those of generation_config.json, or else config.json, and
    `eos_id`. `pad_id` is the tokenizer's padding token, else the one of
    generation_config.json, else that of config.json, else `eos_id`.

    Args:
      folder: as `save_pretrained` writes it.
      extra_stop_ids: further tokens that end a completion.

    Raises:
      FileNotFoundError: the folder or its tokenizer is missing.
      ValueError: a file is damaged, or no token ends a completion.
    """
    folder = pathlib.Path(folder)
    _check_folder(folder)
    loaded = _load(folder)
    self._tokenizer = loaded.backend_tokenizer
    # A tokenizer.json may carry these from its training; they cut prompts off.
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    # Ids may have holes, so their number is not how many there are.
    ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
    self.vocab_size = max(ids) + 1
    generation = read_json(folder / 'generation_config.json')
    model = read_json(folder / 'config.json')
    stops = model_stop_ids(folder)
    eos_id = loaded.eos_token_id
    if eos_id is None and not stops:
      raise ValueError(
        f'{folder} names no token that ends a completion: add "eos_token" to'
        ' tokenizer_config.json or "eos_token_id" to generation_config.json.'
      )
    self.eos_id: int = stops[0] if eos_id is None else eos_id
    self.stop_ids = tuple(dict.fromkeys((self.eos_id, *stops, *extra_stop_ids)))
    self.bos_id: int | None = loaded.bos_token_id
    self.adds_bos = self._begins_with_bos()
    self.pad_id = self._padding(
      loaded.pad_token_id,
      generation.get('pad_token_id'),
      model.get('pad_token_id'),
    )
    self.bos_token: str = loaded.bos_token or ''
    self.eos_token: str = self._tokenizer.id_to_token(self.eos_id) or ''
    self.chat_template = _chat_template(folder, loaded.chat_template)

  def encode(self, text: str) -> list[int]:
    """Returns the ids of `text`; special tokens only where it spells them."""
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of `ids`, special tokens left out."""
    # A model may have a vocabulary padded beyond the tokens.
    known = [i for i in map(int, ids) if i < self.vocab_size]
    return self._tokenizer.decode(known, skip_special_tokens=True)

  def _begins_with_bos(self) -> bool:
    # Its own rule is not used to encode, only asked for: it may add an end of
    # sequence as well, and it does not see what a chat template has written.
    ids = self._tokenizer.encode('', add_special_tokens=True).ids
    return self.bos_id is not None and ids[:1] == [self.bos_id]

  def _padding(self, *candidates: Any) -> int:
    for candidate in candidates:
      # Some configs write -1 for none.
      if isinstance(candidate, int) and 0 <= candidate < self.vocab_size:
        return candidate
    return self.eos_id


def has_tokenizer(folder: pathlib.Path) -> bool:
  """Returns whether a folder has files of a Hugging Face tokenizer."""
  return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def _check_folder(folder: pathlib.Path) -> None:
  if not folder.is_dir():
    raise FileNotFoundError(
      f'{str(folder)!r} is not a folder: give one with config.json, tokenizer'
      ' and *.safetensors (models are not fetched).'
    )
  if not has_tokenizer(folder):
    raise FileNotFoundError(
      f'{folder} has no tokenizer ({" or ".join(_TOKENIZER_FILES)}): copy the'
      ' tokenizer files of the model into it.'
    )


def model_stop_ids(folder: pathlib.Path) -> tuple[int, ...]:
  """Returns the stop tokens of a model, besides those of its tokenizer.

  Those of generation_config.json; where it names none, of config.json. Either
  writes one id or a list (Llama 3.1 has three).

  Raises:
    ValueError: they are not ids.
  """
  for name in ('generation_config.json', 'config.json'):
    value = read_json(folder / name).get('eos_token_id')
    if value is None:
      continue
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
      raise ValueError(
        f'{folder / name}: eos_token_id={value!r} must be a token id or a list'
        ' of them.'
      )
    return tuple(ids)
  return ()


def read_json(path: pathlib.Path) -> Mapping[str, Any]:
  """Returns the fields of a file, none where it is missing.

  Raises:
    ValueError: it is not a JSON object.
  """
  if not path.is_file():
    return {}
  try:
    fields = json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ValueError(f'{path} is damaged ({error}): fetch it again.') from error
  if not isinstance(fields, dict):
    raise ValueError(f'{path} is not a JSON object: fetch it again.')
  return fields


def _load(folder: pathlib.Path) -> Any:
  """Returns the folder's tokenizer as transformers makes it."""
  with _without_advice():
    # Takes seconds to import, and most runs have no need of it.
    import transformers
  for name in _TOKENIZER_FILES:
    read_json(folder / name)
  try:
    loaded = transformers.AutoTokenizer.from_pretrained(
      str(folder), local_files_only=True, trust_remote_code=False
    )
  # What it raises depends on which file is at fault, and how.
  except (
    AttributeError,
    ImportError,
    KeyError,
    OSError,
    TypeError,
    ValueError,
  ) as error:
    reason = ' '.join(str(error).split())[:300]
    raise ValueError(
      f'transformers cannot read the tokenizer in {folder}'
      f' ({type(error).__name__}: {reason}): copy all tokenizer files of the'
      ' model into it.'
    ) from error
  if not getattr(loaded, 'is_fast', False):
    raise ValueError(
      f'{folder} has a tokenizer written in Python, which is not supported:'
      ' convert it to a tokenizer.json.'
    )
  return loaded


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
  """Keeps transformers from advising to install torch: it is not needed."""
  before = os.environ.get(_NO_ADVICE)
  os.environ[_NO_ADVICE] = '1'
  try:
    yield
  finally:
    if before is None:
      del os.environ[_NO_ADVICE]
    else:
      os.environ[_NO_ADVICE] = before


def _chat_template(folder: pathlib.Path, template: Any) -> str:
  # Models that use tools may have a template for that beside the default.
  if isinstance(template, Mapping):
    if 'default' not in template:
      raise ValueError(
        f'{folder} has the chat templates {sorted(template)} and none named'
        " 'default': put the one to use into chat_template.jinja."
      )
    template = template['default']
  return template or ''

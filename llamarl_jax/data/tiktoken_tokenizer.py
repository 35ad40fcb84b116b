"""The tokenizer file of the original Llama 3 releases, and their chat format.

Each line of `tokenizer.model` is a token, in base64, and its rank; the 256
special tokens that follow are not in the file. Names and places:
https://github.com/meta-llama/llama-models/blob/main/models/llama3/tokenizer.py
"""

import base64
import binascii
from collections.abc import Sequence
import pathlib

import tiktoken

# How text is cut before bytes are merged: contractions, words, up to three
# digits, punctuation, and white space.
_PATTERN = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
  r'|[^\r\n\p{L}\p{N}]?\p{L}+'
  r'|\p{N}{1,3}'
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*'
  r'|\s*[\r\n]+'
  r'|\s+(?!\S)'
  r'|\s+'
)
_NUM_SPECIAL = 256
BEGIN_OF_TEXT = '<|begin_of_text|>'
END_OF_TEXT = '<|end_of_text|>'
END_OF_MESSAGE = '<|eom_id|>'
END_OF_TURN = '<|eot_id|>'
PADDING = '<|finetune_right_pad_id|>'
# In the order of their ids; the others are reserved.
_NAMED = (
  BEGIN_OF_TEXT,
  END_OF_TEXT,
  '<|reserved_special_token_0|>',
  '<|reserved_special_token_1|>',
  PADDING,
  '<|step_id|>',
  '<|start_header_id|>',
  '<|end_header_id|>',
  END_OF_MESSAGE,
  END_OF_TURN,
  '<|python_tag|>',
  '<|image|>',
)

# The chat format of Llama 3, without a system turn where none is given.
CHAT_TEMPLATE = (
  '{{ bos_token }}'
  '{% for message in messages %}'
  "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
  "{{ message['content'] | trim + '<|eot_id|>' }}"
  '{% endfor %}'
  '{% if add_generation_prompt %}'
  "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
  '{% endif %}'
)


class TiktokenTokenizer:
  """The Llama 3 tokenizer of a `tokenizer.model`; see `tokenizers.Tokenizer`.

  Attributes:
    bos_token: text of the token that begins a sequence.
    eos_token: text of the token that ends a completion.
    chat_template: jinja text of the Llama 3 chat format.
  """

  def __init__(
    self,
    path: str | pathlib.Path,
    *,
    eos_token: str = END_OF_TEXT,
    extra_stop_ids: Sequence[int] = (),
  ):
    """Reads the file.

    Args:
      path: of the file.
      eos_token: ends a completion: END_OF_TEXT of base models, END_OF_TURN of
        chats. All three ends of Llama 3 stop a completion.
      extra_stop_ids: further tokens that do.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: it is not such a file; names the line.
    """
    path = pathlib.Path(path)
    ranks = _read_ranks(path)
    self._num_text = len(ranks)
    special = {
      name: self._num_text + i for i, name in enumerate(_special_tokens())
    }
    self._encoding = tiktoken.Encoding(
      'llama3',
      pat_str=_PATTERN,
      mergeable_ranks=ranks,
      special_tokens=special,
    )
    self.vocab_size = self._num_text + _NUM_SPECIAL
    self.bos_id: int | None = special[BEGIN_OF_TEXT]
    self.adds_bos = True
    self.eos_id = special[eos_token]
    self.pad_id = special[PADDING]
    ends = (special[e] for e in (END_OF_TEXT, END_OF_MESSAGE, END_OF_TURN))
    self.stop_ids = tuple(dict.fromkeys((self.eos_id, *ends, *extra_stop_ids)))
    self.bos_token = BEGIN_OF_TEXT
    self.eos_token = eos_token
    self.chat_template = CHAT_TEMPLATE

  def encode(self, text: str) -> list[int]:
    """Returns the ids of `text`; special tokens only where it spells them."""
    return self._encoding.encode(text, allowed_special='all')

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of `ids`, special tokens left out.

    Bytes that are not UTF-8, as where a completion is cut inside a character,
    become U+FFFD.
    """
    text = [i for i in map(int, ids) if i < self._num_text]
    return self._encoding.decode(text, errors='replace')


def is_tiktoken_file(path: pathlib.Path) -> bool:
  """Returns whether a `tokenizer.model` is one of these.

  Llama 2 has a file of the same name in another format.
  """
  if not path.is_file():
    return False
  with path.open('rb') as file:
    first = file.readline(1000)
  return _read_line(first) is not None


def _special_tokens() -> list[str]:
  # Two of the reserved are among the named.
  num_reserved = _NUM_SPECIAL - len(_NAMED)
  reserved = [
    f'<|reserved_special_token_{i + 2}|>' for i in range(num_reserved)
  ]
  return [*_NAMED, *reserved]


def _read_line(line: bytes) -> tuple[bytes, int] | None:
  """Returns token and rank, None if the line holds something else."""
  token, _, rank = line.strip().partition(b' ')
  if not token or not rank.isdigit():
    return None
  try:
    return base64.b64decode(token, validate=True), int(rank)
  except binascii.Error:
    return None


def _read_ranks(path: pathlib.Path) -> dict[bytes, int]:
  """Returns the rank of each token.

  tiktoken's own reader is not used: it keeps a copy of each file in a shared
  folder by its path, and gives that one for another file of the same path.
  """
  if not path.is_file():
    raise FileNotFoundError(
      f'{path} is missing: give the tokenizer.model of a Llama 3 release.'
    )
  ranks: dict[bytes, int] = {}
  for number, line in enumerate(path.read_bytes().splitlines(), start=1):
    read = _read_line(line)
    # The special tokens follow on the last rank, so there may be no holes.
    if read is None or read[1] != len(ranks) or read[0] in ranks:
      raise ValueError(
        f'{path}, line {number}: not the next token of a Llama 3 tokenizer:'
        ' fetch the file again.'
      )
    ranks[read[0]] = read[1]
  if not ranks:
    raise ValueError(f'{path} is empty: fetch the file again.')
  return ranks

"""Tokenizers: text to token ids and back.

None of them adds a token that is not in the text. `encode_prompt` alone adds
one, the beginning of sequence, and only where no chat template has written it.
"""

from collections.abc import Sequence
from typing import Protocol

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers


class Tokenizer(Protocol):
  """Text to token ids and back.

  Attributes:
    vocab_size: ids are 0 .. vocab_size - 1.
    bos_id: begins a sequence, None where the model has no such token.
    adds_bos: whether every prompt of the model begins with `bos_id`.
    eos_id: ends a completion.
    pad_id: fills up rows; masked everywhere, by place and not by its id, so
      that it may be a token of text or `eos_id`.
    stop_ids: every token that ends a completion, `eos_id` among them.
  """

  vocab_size: int
  bos_id: int | None
  adds_bos: bool
  eos_id: int
  pad_id: int
  stop_ids: tuple[int, ...]

  def encode(self, text: str) -> list[int]:
    """Returns the ids of `text`; special tokens only where it spells them."""

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of `ids`, special tokens left out."""


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
  """Returns the ids of a prompt, the only place that adds a special token.

  A prompt begins with exactly one `bos_id` where the model's prompts have one,
  whether or not its chat template has written it already, and never ends with
  a stop token: the policy goes on from there.

  Args:
    tokenizer: of the policy.
    text: of the prompt, chat template applied.

  Raises:
    ValueError: two tokens begin the sequence, or a stop token ends it.
  """
  ids = tokenizer.encode(text)
  bos = tokenizer.bos_id
  if bos is not None and ids[:2] == [bos, bos]:
    raise ValueError(
      f'The prompt {text[:40]!r}... begins with token {bos} twice: the chat'
      ' template or the tokenizer writes it, so take it out of prompt.user.'
    )
  if tokenizer.adds_bos and bos is not None and ids[:1] != [bos]:
    ids = [bos, *ids]
  # A lone first token may be both: some models have one token for either.
  if len(ids) > 1 and ids[-1] in tokenizer.stop_ids:
    raise ValueError(
      f'The prompt ...{text[-40:]!r} ends with token {ids[-1]}, which ends a'
      ' completion: take it out of the prompt, or use a chat template that'
      " opens the assistant's turn."
    )
  return ids


class CharacterTokenizer:
  """One token a character, after 0 = padding and 1 = end of sequence."""

  def __init__(self, alphabet: str = '0123456789+-*=() '):
    """Makes a tokenizer.

    Args:
      alphabet: the characters, in the order of their ids.

    Raises:
      ValueError: if a character stands in the alphabet twice.
    """
    if len(set(alphabet)) < len(alphabet) or not alphabet:
      raise ValueError(
        f'alphabet={alphabet!r} must hold characters, each of them once.'
      )
    self.pad_id = 0
    self.eos_id = 1
    self.bos_id: int | None = None
    self.adds_bos = False
    self.stop_ids: tuple[int, ...] = (self.eos_id,)
    self._alphabet = alphabet
    self._ids = {character: i + 2 for i, character in enumerate(alphabet)}
    self.vocab_size = len(alphabet) + 2

  def encode(self, text: str) -> list[int]:
    """Returns one id a character.

    Raises:
      ValueError: if a character is not in the alphabet.
    """
    unknown = sorted(set(text) - self._ids.keys())
    if unknown:
      raise ValueError(
        f'{text!r} holds {unknown}, not in the alphabet {self._alphabet!r}: '
        'extend the alphabet or change the prompt template.'
      )
    return [self._ids[character] for character in text]

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the characters; padding and end of sequence have none."""
    # A model may have a vocabulary padded beyond the alphabet.
    return ''.join(
      self._alphabet[i - 2] for i in map(int, ids) if 2 <= i < self.vocab_size
    )


# Values of tokenizer.ggml.token_type: special tokens, and ordinary ones that
# are matched as a whole all the same.
_CONTROL = 3
_USER_DEFINED = 4

# By tokenizer.ggml.pre, how text is cut before byte pairs are merged.
PRE_TOKENIZERS = {
  'smollm': lambda: pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
  ),
  'gpt-2': lambda: pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=True
  ),
}


class BytePairTokenizer:
  """Byte-level byte-pair encoding, from the lists a model file holds."""

  def __init__(
    self,
    *,
    tokens: Sequence[str],
    merges: Sequence[str],
    token_types: Sequence[int],
    pre_tokenizer: str,
    eos_id: int,
    pad_id: int | None = None,
    bos_id: int | None = None,
    adds_bos: bool = False,
    extra_stop_ids: Sequence[int] = (),
  ):
    """Makes a tokenizer.

    Args:
      tokens: text of each id, in byte-level spelling.
      merges: pairs 'left right', the first merged first.
      token_types: of each id, as GGUF numbers them (3 control, 4 user-defined).
      pre_tokenizer: a name in PRE_TOKENIZERS.
      eos_id: ends a completion.
      pad_id: fills up rows; `eos_id` where None.
      bos_id: begins a sequence, or None.
      adds_bos: whether every prompt begins with it.
      extra_stop_ids: further tokens that end a completion.

    Raises:
      ValueError: if the pre-tokenizer is unknown or the lists do not fit.
    """
    if pre_tokenizer not in PRE_TOKENIZERS:
      raise ValueError(
        f'pre_tokenizer={pre_tokenizer!r} is not supported; those that are: '
        f'{sorted(PRE_TOKENIZERS)}.'
      )
    if len(token_types) != len(tokens):
      raise ValueError(
        f'{len(tokens)} tokens but {len(token_types)} token types: the model '
        'file is damaged, fetch it again.'
      )
    vocab = {token: i for i, token in enumerate(tokens)}
    halves = [merge.partition(' ') for merge in merges]
    pairs = [(left, right) for left, _, right in halves]
    self._tokenizer = tokenizers.Tokenizer(
      models.BPE(vocab=vocab, merges=pairs)
    )
    self._tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre_tokenizer]()
    self._tokenizer.decoder = decoders.ByteLevel()
    control = _of_type(tokens, token_types, _CONTROL)
    self._tokenizer.add_special_tokens(
      [_added(token, special=True) for token in control]
    )
    self._tokenizer.add_tokens(
      [
        _added(token, special=False)
        for token in _of_type(tokens, token_types, _USER_DEFINED)
      ]
    )
    self.vocab_size = len(tokens)
    self.bos_id = bos_id
    self.adds_bos = adds_bos
    self.eos_id = eos_id
    self.pad_id = eos_id if pad_id is None else pad_id
    self.stop_ids = tuple(dict.fromkeys((eos_id, *extra_stop_ids)))

  def encode(self, text: str) -> list[int]:
    """Returns the ids; '<|im_start|>' in the text is that one token."""
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of `ids`, special tokens left out."""
    return self._tokenizer.decode(
      [int(i) for i in ids], skip_special_tokens=True
    )

  def to_json(self) -> str:
    """Returns the text of a tokenizer.json, as other programs read it."""
    return self._tokenizer.to_str()


def _of_type(
  tokens: Sequence[str], token_types: Sequence[int], wanted: int
) -> list[str]:
  pairs = zip(tokens, token_types, strict=True)
  return [token for token, token_type in pairs if token_type == wanted]


def _added(token: str, special: bool) -> tokenizers.AddedToken:
  return tokenizers.AddedToken(token, special=special, normalized=False)

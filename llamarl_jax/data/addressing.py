"""Random numbers and permutations addressed by integers and names.

Every problem is a function of (seed, split, index), so a run resumes at any
index without a saved state, and the order of asking changes nothing.
"""

import enum
import hashlib

_ROUNDS = 4  # Four Feistel rounds make a pseudorandom permutation.


class Split(enum.StrEnum):
  """Which problems: those to learn from, or those to be examined with."""

  TRAIN = 'train'
  HELD_OUT = 'held_out'


def draw(*address: int | str) -> int:
  """Returns 64 random bits, the same for the same address everywhere."""
  # The length of each part keeps ('1', '23') apart from ('12', '3').
  text = ''.join(f'{len(str(part))}:{part},' for part in address)
  return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def is_held_out(fraction: float, *address: int | str) -> bool:
  """Returns whether the thing at `address` belongs to the held-out split.

  The answer depends neither on a seed nor on what was asked before, so all
  runs agree on the held-out problems and no training stream contains one.

  Args:
    fraction: share of all things to hold out, in [0, 1).
    *address: what identifies the thing.
  """
  return draw('split', *address) < fraction * 2**64


def permuted(place: int, size: int, *address: int | str) -> int:
  """Returns where `place` goes in the permutation of range(size) at `address`.

  A Feistel network over the least even number of bits that holds `size`; what
  falls outside the range is sent on until it falls inside (Black and Rogaway
  (2002), Ciphers with arbitrary finite domains, section 5).

  Args:
    place: in [0, size).
    size: of the range, at least 1.
    *address: picks the permutation.

  Raises:
    ValueError: if `place` is outside the range.
  """
  if not 0 <= place < size:
    raise ValueError(f'place {place} is outside [0, {size}).')
  half = max(1, ((size - 1).bit_length() + 1) // 2)
  mask = (1 << half) - 1
  while True:
    left, right = place >> half, place & mask
    for i in range(_ROUNDS):
      left, right = right, left ^ (draw('permute', *address, i, right) & mask)
    place = (left << half) | right
    if place < size:
      return place

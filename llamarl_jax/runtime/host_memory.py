"""Memory that a program on CPU frees stays its own, for its next step.

XLA on CPU takes the temporary memory of a program from malloc at each call, and
glibc returns blocks of that size to the system, which zeroes each page anew
when it is touched next: a third of the CPU time of a small model's train step.
"""

import ctypes

# Parameters of mallopt, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8


def keep_freed_memory() -> bool:
  """Has malloc keep what is freed; returns whether it does (glibc only).

  The process then stays as large as it ever was. For programs that do the same
  again and again; called once, before they allocate much.
  """
  mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
  if mallopt is None:
    return False
  settings = (
    # Large blocks too come from the heap, not from mappings of their own.
    (_M_MMAP_MAX, 0),
    # The end of the heap is never given back.
    (_M_TRIM_THRESHOLD, -1),
    # One heap: those of threads cannot hold large blocks.
    (_M_ARENA_MAX, 1),
  )
  return all([mallopt(name, value) == 1 for name, value in settings])

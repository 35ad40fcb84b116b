import subprocess
import sys

# A block of 64 MB is touched, freed and taken again. Page faults are counted:
# 16,384 pages of 4 KiB where the system had it in between.
PROGRAM = """
import ctypes
import resource
from llamarl_jax.runtime import host_memory

if KEEP:
  assert host_memory.keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
size = 64 * 2**20

def touch():
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size)))
  ctypes.memset(block, 1, size)
  libc.free(block)
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

touch()
print(touch())
"""


def _faults(keep: bool) -> int:
  program = PROGRAM.replace('KEEP', str(keep))
  done = subprocess.run(
    [sys.executable, '-c', program], capture_output=True, check=True, text=True
  )
  return int(done.stdout)


def test_freed_memory_is_touched_again_without_page_faults():
  if not sys.platform.startswith('linux'):
    return
  assert _faults(keep=True) < 100
  # Without it there are many; huge pages would make them 32.
  assert _faults(keep=False) > _faults(keep=True)

"""A folder that appears complete or not at all."""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import shutil


def check(path: str | pathlib.Path) -> None:
  """Checks that a folder can be made.

  Raises:
    ValueError: if something is there that would be overwritten.
  """
  path = pathlib.Path(path)
  if path.exists() and (not path.is_dir() or any(path.iterdir())):
    raise ValueError(
      f'{path} exists and is not an empty folder; nothing is overwritten, so '
      'give the name of a new one.'
    )


@contextlib.contextmanager
def making(path: str | pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields a folder beside `path` to write to, renamed to it at the end.

  An error removes what was written. One that cannot be caught (the process is
  killed) leaves a hidden folder '.NAME.partial-...', which may be deleted.

  Raises:
    ValueError: if something is there that would be overwritten.
  """
  path = pathlib.Path(path).absolute()
  check(path)
  partial = path.with_name(f'.{path.name}.partial-{os.getpid()}')
  partial.mkdir(parents=True)
  try:
    yield partial
    # An empty folder gives way to it.
    partial.rename(path)
  finally:
    shutil.rmtree(partial, ignore_errors=True)

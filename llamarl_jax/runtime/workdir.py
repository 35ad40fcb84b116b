"""The folder of a run: one config, one run, never two mixed."""

from collections.abc import Iterator
from collections.abc import Mapping
import json
import pathlib
from typing import Any

from llamarl_jax.runtime import strict_json

_CONFIG = 'config.json'


def check(workdir: pathlib.Path, config: Mapping[str, Any]) -> None:
  """Checks that the folder is new, or holds an unfinished run of this config.

  Raises:
    ValueError: it holds something else; names it and the remedy.
  """
  if workdir.exists() and not workdir.is_dir():
    raise ValueError(f'workdir {workdir} is a file; choose another --workdir')
  path = workdir / _CONFIG
  if not path.exists():
    if workdir.is_dir() and any(workdir.iterdir()):
      raise ValueError(
        f'workdir {workdir} is not empty and holds no run; choose another'
        ' --workdir'
      )
    return
  try:
    found = json.loads(path.read_text())
  except json.JSONDecodeError as error:
    raise ValueError(
      f'{path} is damaged ({error}); choose another --workdir'
    ) from error
  wanted = strict_json.plain(config)
  changed = sorted(_differences(found, wanted))
  if changed:
    raise ValueError(
      f'workdir {workdir} holds the run of another config (differs in'
      f' {", ".join(changed[:4])}); choose another --workdir'
    )
  if (workdir / 'summary.json').exists():
    raise ValueError(
      f'workdir {workdir} holds this run already, finished: see report.html'
      ' there, or choose another --workdir'
    )


def prepare(workdir: pathlib.Path, config: Mapping[str, Any]) -> None:
  """Makes the folder and writes config.json."""
  workdir.mkdir(parents=True, exist_ok=True)
  text = json.dumps(strict_json.plain(config), indent=2)
  strict_json.write_text(workdir / _CONFIG, text + '\n')


def read_config(workdir: pathlib.Path) -> dict[str, Any]:
  """Returns the config of the run in a folder.

  Raises:
    FileNotFoundError: there is no run.
  """
  path = workdir / _CONFIG
  if not path.exists():
    raise FileNotFoundError(
      f'{workdir} holds no run (no {_CONFIG}); give the workdir of a run'
    )
  return json.loads(path.read_text())


def _differences(found: Any, wanted: Any, name: str = '') -> Iterator[str]:
  """Yields the dotted names of fields that differ, with both values."""
  if isinstance(found, dict) and isinstance(wanted, dict):
    for key in found.keys() | wanted.keys():
      inner = f'{name}.{key}' if name else key
      yield from _differences(found.get(key), wanted.get(key), inner)
  elif found != wanted:
    yield f'{name} {found!r} -> {wanted!r}'

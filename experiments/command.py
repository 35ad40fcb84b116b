"""How every command ends: cleanly, or with an error a person can act on."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import logging
import signal
import sys
import warnings

from absl import app
from absl import flags
from absl import logging as absl_logging
from ml_collections import config_flags

from llamarl_jax.controller.launchers import base


class InputError(ValueError):
  """What the user gave cannot be used; the text says what and the remedy."""


@contextlib.contextmanager
def checking_input() -> Iterator[None]:
  """Marks errors raised inside as the input's fault, not the program's."""
  try:
    yield
  except (ValueError, FileNotFoundError) as error:
    raise InputError(str(error)) from error


def define_config_flag() -> None:
  """Defines --config, and with it --config.FIELD for every field."""
  config_flags.DEFINE_config_file(
    'config',
    'configs/smollm2_arithmetic.py',
    'Config file.',
    lock_config=True,
  )


def run(
  define_flags: Callable[[], None], main: Callable[[flags.FlagValues], None]
) -> None:
  """Parses flags, runs `main` and exits; bad input is one line, status 2.

  Flags are defined here, not when a module is imported: notebooks and tests
  import several commands side by side.

  Args:
    define_flags: defines the flags of the command.
    main: takes the parsed flags.
  """
  with warnings.catch_warnings():
    # The way ml_collections loads config files is deprecated.
    warnings.simplefilter('ignore', DeprecationWarning)
    define_flags()
  logging.basicConfig(format='%(levelname)s: %(message)s')
  absl_logging.set_verbosity(absl_logging.WARNING)
  # A run that is asked to end closes its executors on the way out.
  signal.signal(signal.SIGTERM, _interrupt)
  app.run(lambda _: sys.exit(_status(main)), flags_parser=_parse)


def _parse(arguments: list[str]) -> list[str]:
  try:
    rest = flags.FLAGS(arguments)
    if 'config' in flags.FLAGS:
      # A config file that cannot be loaded raises when a field is read.
      _ = flags.FLAGS.config.name
  except (flags.Error, AttributeError, TypeError, OSError, ValueError) as error:
    sys.exit(_fail(error))
  if len(rest) > 1:
    sys.exit(_fail(ValueError(f'unknown arguments {rest[1:]}; see --help')))
  return rest


def _status(main: Callable[[flags.FlagValues], None]) -> int:
  try:
    main(flags.FLAGS)
  except InputError as error:
    return _fail(error)
  except base.ExecutorError as error:
    print(
      f'\n{error.reason}\nerror: executor {error.name} failed, see above',
      file=sys.stderr,
    )
    return 1
  except KeyboardInterrupt:
    print('\ninterrupted; run the same command to go on', file=sys.stderr)
    return 130
  return 0


def _fail(error: Exception) -> int:
  text = ' '.join(str(error).split())
  print(f'error: {text}', file=sys.stderr)
  return 2


def _interrupt(signum: int, frame: object) -> None:
  del signum, frame
  raise KeyboardInterrupt

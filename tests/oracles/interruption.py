"""Stops a run in the middle, as by the power going."""

import io


class FailingStream(io.StringIO):
  """Raises when a text is written that begins as told."""

  def __init__(self, beginning):
    super().__init__()
    self._beginning = beginning

  def write(self, text):
    if text.startswith(self._beginning):
      raise InterruptedError(text)
    return super().write(text)

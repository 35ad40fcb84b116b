"""Small questions over a socket, from subscribers to a process that publishes.

Parameters do not pass here: a subscriber asks for slices, is told where they
lie ready, and says when it has them. Each line is one JSON object.
"""

from collections.abc import Callable
from collections.abc import Mapping
import json
import logging
import secrets
import select
import socket
import socketserver
import threading
from typing import Any
from typing import Protocol

from llamarl_jax.channels import watch as watch_lib
from llamarl_jax.channels import weights

_LOGGER = logging.getLogger(__name__)
_MAX_LINE_BYTES = 1 << 20
_POLL_SECONDS = 0.05


class Session(Protocol):
  """What a publisher keeps for one connected subscriber."""

  def answer(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the answer, as JSON; a key 'error' tells a refusal."""

  def close(self) -> None:
    """The subscriber has gone, or was silent for too long."""


class Desk:
  """Answers subscribers, each in a thread of its own."""

  def __init__(
    self, host: str, open_session: Callable[[], Session], silence_seconds: float
  ) -> None:
    """Starts to listen.

    Args:
      host: address to bind to.
      open_session: called for each subscriber that connects.
      silence_seconds: a subscriber that says nothing for so long is left.
    """
    # Whoever has not seen a manifest has no business here.
    self._token = secrets.token_hex(16)
    self._server = _Server(
      (host, 0), _handler(open_session, self._token, silence_seconds)
    )
    thread = threading.Thread(
      target=self._server.serve_forever,
      kwargs={'poll_interval': _POLL_SECONDS},
      name='publisher-desk',
      daemon=True,
    )
    thread.start()

  @property
  def address(self) -> str:
    """Host and port, and the word to say first; part of a manifest."""
    host, port = self._server.server_address[:2]
    return f'{host!s}:{port}/{self._token}'

  def close(self) -> None:
    """Stops to listen; may be called twice."""
    self._server.shutdown()
    self._server.server_close()


class Line:
  """The subscriber's end: asks a desk."""

  def __init__(self, address: str, watch: watch_lib.Watch) -> None:
    """Connects.

    Args:
      address: of a desk.
      watch: to be asked in every wait.

    Raises:
      WeightTransferError: nobody listens there.
    """
    place, self._token = address.split('/')
    host, port = place.rsplit(':', 1)
    self._peer = place
    self._watch = watch
    self._received = b''
    try:
      self._socket = socket.create_connection((host, int(port)), timeout=5.0)
    except OSError as error:
      raise weights.WeightTransferError(
        f'the publisher at {place} was lost: {error}'
      ) from error

  def ask(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the answer to one question.

    Raises:
      WeightTransferError: the peer was lost, or the watch says to stop.
    """
    line = json.dumps({**question, 'token': self._token}) + '\n'
    try:
      self._socket.sendall(line.encode())
      while b'\n' not in self._received:
        self._watch.check(f'an answer of the publisher at {self._peer}')
        if select.select([self._socket], [], [], _POLL_SECONDS)[0]:
          data = self._socket.recv(1 << 16)
          if not data:
            raise ConnectionResetError('it closed the connection')
          self._received += data
    except OSError as error:
      raise weights.WeightTransferError(
        f'the publisher at {self._peer} was lost: {error}'
      ) from error
    answer, self._received = self._received.split(b'\n', 1)
    return json.loads(answer)

  def close(self) -> None:
    """Ends the session at the publisher."""
    self._socket.close()


class _Server(socketserver.ThreadingTCPServer):
  allow_reuse_address = True
  daemon_threads = True


def _handler(
  open_session: Callable[[], Session], token: str, silence_seconds: float
) -> type[socketserver.StreamRequestHandler]:
  """Returns the class whose objects each serve one connection."""

  class Handler(socketserver.StreamRequestHandler):
    timeout = silence_seconds

    def handle(self) -> None:
      session = open_session()
      try:
        while line := self.rfile.readline(_MAX_LINE_BYTES):
          question = json.loads(line)
          if not secrets.compare_digest(str(question.get('token')), token):
            return
          answer = session.answer(question)
          self.wfile.write((json.dumps(answer) + '\n').encode())
      except (OSError, json.JSONDecodeError) as error:
        _LOGGER.warning(
          'subscriber at %s was left: %s', self.client_address, error
        )
      finally:
        session.close()

  return Handler

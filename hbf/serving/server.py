"""The server of `hbf serve`: connections, their limits, and the end of the process."""

import json
import logging
import signal
import socket
import sys
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from hbf.errors import UserError

MOST_CONNECTIONS = 512  # many systems allow a process 1,024 open files
GRACE = 2.0  # seconds of a graceful end beyond the limits of a request

log = logging.getLogger('hbf.serve')


class GuardedProtocol(H11Protocol):
  """A connection that is closed if the headers of a request do not come in time, or answers are not read in time.

  Uvicorn itself would wait for both without end.
  """

  _late: Any = None  # timer of the head that is awaited
  _unread: Any = None  # timer of the answers that the client does not read

  def connection_made(self, transport: Any) -> None:
    """Accept the connection, or refuse it if there are too many."""
    super().connection_made(transport)
    if len(self.connections) > MOST_CONNECTIONS:
      self._refuse(503, f'{MOST_CONNECTIONS} connections are open, the most that this server takes: try again later')
    else:
      self._await_head()

  def connection_lost(self, exc: Exception | None) -> None:
    """Stop the timer that waits for the headers of a request."""
    self._stop_timer()
    self.resume_writing()
    super().connection_lost(exc)

  def pause_writing(self) -> None:
    """Wait until the client reads its answers, but not without end."""
    super().pause_writing()
    self._unread = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

  def resume_writing(self) -> None:
    """Go on: the client reads."""
    if self._unread is not None:
      self._unread.cancel()
      self._unread = None
    super().resume_writing()

  @override
  def send_400_response(self, msg: str) -> None:
    if self.cycle and self.cycle.response_started and not self.cycle.response_complete:
      self.transport.close()  # the connection can take no second answer
    else:
      self._refuse(400, f'the request is no valid HTTP ({msg})')

  def data_received(self, data: bytes) -> None:
    """Take data from the client. If they belong to a request that is already answered, close the connection."""
    super().data_received(data)
    if self.conn.their_state is not h11.IDLE:
      self._stop_timer()
      if self.cycle and self.cycle.response_complete and self.conn.their_state is h11.SEND_BODY:
        self.transport.close()
    elif self._late is None:
      self._await_head()

  def _await_head(self) -> None:
    self._late = self.loop.call_later(self.timeout_keep_alive, self._refuse_late)

  def _stop_timer(self) -> None:
    if self._late is not None:
      self._late.cancel()
      self._late = None

  def _refuse_late(self) -> None:
    if not self.transport.is_closing():
      self._refuse(408, f'no request came within {self.timeout_keep_alive:g} s')

  def _refuse(self, status: int, reason: str) -> None:
    """Write an error as the answer, and close the connection."""
    log.warning('refused %d %s: %s', status, self.client[0] if self.client else 'unknown', reason)
    body = json.dumps({'error': reason}).encode()
    again = [('retry-after', '1')] if status == 503 else []
    headers = [('content-type', 'application/json'), ('content-length', str(len(body))), ('connection', 'close')]
    phrase = {400: 'Bad Request', 408: 'Request Timeout', 503: 'Service Unavailable'}[status]
    head = [f'HTTP/1.1 {status} {phrase}', *(f'{name}: {value}' for name, value in headers + again)]
    self.transport.write('\r\n'.join([*head, '', '']).encode() + body)
    self.transport.close()


def listen(host: str, port: int) -> socket.socket:
  """Return a socket that is bound to an address. Port 0 means any free port.

  Raises:
    UserError: the address can't be used.
  """
  try:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=MOST_CONNECTIONS)
  except (OSError, OverflowError, UnicodeError) as error:
    raise UserError(f'{host}:{port} can not be used ({error}): choose another --host or --port') from error


class _Server(uvicorn.Server):
  """A server that prints its address when it is ready."""

  async def startup(self, sockets: list[socket.socket] | None = None) -> None:
    """Start, and print the address of each of the sockets."""
    await super().startup(sockets)
    for bound in sockets or []:
      host, port, *_ = bound.getsockname()
      print(f'ready: http://{f"[{host}]" if ":" in host else host}:{port}', flush=True)


def run(application: Starlette, bound: socket.socket, seconds: float) -> None:
  """Serve until SIGTERM or Ctrl-C. Then take no more connections, answer the requests that have come, and return.

  Args:
    application: the application.
    bound: the socket, as returned by `listen`.
    seconds: the longest time for a client to send the headers of a request. The image and the answer may each take as
      long again.
  """
  handler = logging.StreamHandler(sys.stderr)
  handler.setFormatter(logging.Formatter('%(asctime)s %(message)s', '%Y-%m-%d %H:%M:%S'))
  for name in ('hbf.serve', 'uvicorn.error'):
    logger = logging.getLogger(name)
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.WARNING)
  config = uvicorn.Config(
    application,
    http=GuardedProtocol,
    ws='none',
    lifespan='on',
    log_config=None,
    access_log=False,
    server_header=False,
    proxy_headers=False,
    timeout_keep_alive=seconds,  # type: ignore[arg-type]
    timeout_graceful_shutdown=round(2 * seconds + GRACE),
  )
  # Uvicorn handles the signals, and raises them once more when it has ended.
  before = {kind: signal.signal(kind, lambda *_: None) for kind in (signal.SIGTERM, signal.SIGINT)}
  try:
    _Server(config).run(sockets=[bound])
  finally:
    for kind, handled in before.items():
      signal.signal(kind, handled)

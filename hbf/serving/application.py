"""The web application of `hbf serve`: its addresses, its limits and its answers."""

import asyncio
import contextlib
import dataclasses
import importlib.resources
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent import futures
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from hbf.errors import UserError
from hbf.serving.batcher import Batcher, OverloadedError
from hbf.serving.uploads import NAME, read_upload
from hbf.training.predict import NOT_FINITE, Classifier

DECODERS = 2  # threads that decode images; each may need 0.7 GB for the largest image
TOP = 3  # classes in an answer, if the request does not say a number
HEADERS = {
  'x-content-type-options': 'nosniff',
  'content-security-policy': "default-src 'none'; img-src 'self' data: blob:; connect-src 'self'; "
  "script-src 'unsafe-inline'; style-src 'unsafe-inline'; frame-ancestors 'none'",
}

log = logging.getLogger('hbf.serve')
Explain = Callable[[np.ndarray], list[dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of requests.

  Attributes:
    bytes: the largest number of bytes of an image file.
    seconds: the longest time for a client to send an image, and again the longest time for the server to answer it.
  """

  bytes: int = 10_000_000
  seconds: float = 10.0


class Refused(Exception):
  """A request that gets an error in place of an answer.

  Attributes:
    status: the status code of HTTP.
    reason: the reason, in one line.
  """

  def __init__(self, status: int, reason: str):
    super().__init__(reason)
    self.status, self.reason = status, ' '.join(reason.split())


class Refusal(JSONResponse):
  """An answer {"error": reason}, which is sent at once. If a part of the request is then unread, the connection ends.

  Before the connection ends, this part is read and dropped. A connection that is closed with unread data is reset,
  and then many clients lose the answer.
  """

  def __init__(self, refused: Refused, linger: float):
    """Make the answer. `__call__` sends it.

    Args:
      refused: the status and the reason.
      linger: the longest time to read the rest of the request, in seconds. 0 if the whole request has been read.
    """
    more = {'retry-after': '1'} if refused.status == 503 else {}
    more |= {'connection': 'close'} if linger else {}
    super().__init__({'error': refused.reason}, refused.status, {**more, **HEADERS})
    self._linger = linger

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    """Send the answer, then read until the request ends or the time is over."""
    await send({'type': 'http.response.start', 'status': self.status_code, 'headers': self.raw_headers})
    await send({'type': 'http.response.body', 'body': self.body, 'more_body': self._linger > 0})
    if self._linger:
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(self._linger):
          while (await receive()).get('more_body'):
            pass
      await send({'type': 'http.response.body', 'body': b''})


class Service:
  """A classifier that answers requests over HTTP."""

  def __init__(
    self, classifier: Classifier, about: dict[str, Any], batcher: Batcher, limits: Limits, explain: Explain | None
  ):
    """Make the service.

    Args:
      classifier: the object that knows the image shape and the classes, and makes answers from logits.
      about: facts about the model, for the page and the address /health.
      batcher: the object that computes the classifier's logits in batches.
      limits: the limits of requests.
      explain: a function that `hbf.serving.patches.nearest_patches` returns. None: /patches gives an error.
    """
    self._classifier, self._about, self._batcher, self._limits = classifier, about, batcher, limits
    self._explain = explain
    self._decoders = futures.ThreadPoolExecutor(DECODERS, 'decode')
    self._count: Counter[int] = Counter()  # requests for an answer by status
    self._began = time.monotonic()
    page = (importlib.resources.files('hbf.serving') / 'page.html').read_text('utf-8')
    shown = {**about, 'patches': explain is not None, 'bytes': limits.bytes}
    # A name of a class with '</script>' must not end the script.
    self._page = page.replace('{{ ABOUT }}', json.dumps(shown).replace('<', r'\u003c'))

  def application(self) -> Starlette:
    """Return the ASGI application."""
    routes = [
      Route('/', self._index),
      Route('/health', self._health),
      Route('/predict', self._predict, methods=['POST']),
      Route('/patches', self._patches, methods=['POST']),
    ]
    handlers: Any = {Refused: self._refuse, HTTPException: self._refuse_address}
    made = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)
    made.router.redirect_slashes = False  # an unknown address is refused with a reason
    return made

  @contextlib.asynccontextmanager
  async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
    async with self._batcher.open():
      yield
    self._decoders.shutdown()

  async def _index(self, _: Request) -> Response:
    return HTMLResponse(self._page, headers=HEADERS)

  async def _health(self, _: Request) -> Response:
    counts = {str(status): count for status, count in sorted(self._count.items())}
    running = {'seconds': round(time.monotonic() - self._began), 'inside': self._batcher.inside}
    return JSONResponse(
      {'status': 'ok', **self._about, **running, 'requests': counts, 'batches': self._batcher.batches}
    )

  async def _predict(self, request: Request) -> Response:
    classes, form = self._classifier.classes, self._classifier.form
    top = _top(request, len(classes))
    async with self._image(request) as image:
      logits = await self._batcher.logits(image)
      if not np.isfinite(logits).all():
        raise Refused(500, f'{NOT_FINITE}: serve another checkpoint')
      return self._answer(form.to_json(form.answer(classes, logits, top)))

  async def _patches(self, request: Request) -> Response:
    if self._explain is None:
      raise Refused(404, 'this server does not look for training patches: start it with --patches')
    async with self._image(request) as image:
      return self._answer({'centers': await self._batcher.in_thread(self._explain, image)})

  def _answer(self, content: dict[str, Any]) -> Response:
    """Return an answer, and count it. Call this inside `_image`, which refuses what can't be written as JSON."""
    response = JSONResponse(content, headers=HEADERS)
    self._count[200] += 1
    return response

  @contextlib.asynccontextmanager
  async def _image(self, request: Request) -> AsyncIterator[np.ndarray]:
    """Open a context with the image of a request, uint8 [H, W, C].

    Until the context ends, the image counts among the images that the server may hold.

    Raises:
      Refused: the server holds as many images as it may, the request breaks a limit, or it has no image that can be
        read. Any other error inside the context becomes a `Refused` too.
    """
    seconds = self._limits.seconds
    try:
      with self._batcher.admitted():
        content = await self._read(request)
        async with asyncio.timeout(seconds):
          loop = asyncio.get_running_loop()
          yield await loop.run_in_executor(self._decoders, read_upload, content, self._classifier.image_shape)
    except Refused:
      raise
    except OverloadedError as error:
      raise Refused(503, str(error)) from error
    except UserError as error:
      raise Refused(400, str(error)) from error
    except ClientDisconnect as error:
      raise Refused(499, 'the client left before it had sent the image') from error
    except TimeoutError as error:
      raise Refused(503, f'no answer within {seconds:g} s: the server is slow, try again later') from error
    except Exception as error:
      raise Refused(500, f'the server failed ({type(error).__name__}): its log has the reason') from error

  async def _read(self, request: Request) -> bytes:
    """Return the body of a request. Raise `Refused` if it is compressed, too large or too slow."""
    most, seconds = self._limits.bytes, self._limits.seconds
    if request.headers.get('content-encoding', 'identity').lower() != 'identity':
      raise Refused(415, f'{NAME} is compressed (Content-Encoding): send the image file as it is')
    too_large = f'{NAME} has more than {most:,} bytes: send a smaller image'
    if int(request.headers.get('content-length', 0)) > most:
      raise Refused(413, too_large)
    content = bytearray()
    try:
      async with asyncio.timeout(seconds):
        async for part in request.stream():
          content += part
          if len(content) > most:
            raise Refused(413, too_large)
    except TimeoutError as error:
      raise Refused(408, f'only {len(content):,} bytes of {NAME} came within {seconds:g} s') from error
    request.state.whole = True
    return bytes(content)

  async def _refuse(self, request: Request, refused: Any) -> Response:
    self._count[refused.status] += 1
    client = request.client.host if request.client else 'unknown'
    cause = f' [{" ".join(str(refused.__cause__).split())}]' if refused.status == 500 and refused.__cause__ else ''
    path = request.url.path.encode('unicode_escape').decode()  # it may have bytes that change a terminal
    log.warning('refused %d %s %s: %s%s', refused.status, client, path, refused.reason, cause)
    # They would keep the image in memory until the answer is sent.
    refused.__traceback__ = refused.__cause__ = refused.__context__ = None
    return Refusal(refused, 0 if hasattr(request.state, 'whole') else self._limits.seconds)

  async def _refuse_address(self, request: Request, error: Any) -> Response:
    reason = f'{request.method} {request.url.path} is not known: POST an image to /predict, or GET / or /health'
    return await self._refuse(request, Refused(error.status_code, reason))


def _top(request: Request, most: int) -> int:
  """Return the number of classes that a request asks for (`?top=`), but at most `most`.

  Raises:
    Refused: the request asks for something else than a positive number.
  """
  said = request.query_params.get('top', str(TOP))
  if not (said.isascii() and said.isdigit() and len(said) < 10 and int(said)):
    raise Refused(400, f'top is {said!r}: expected a whole number of classes, 1 or more')
  return min(int(said), most)

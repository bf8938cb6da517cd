"""The HTTP endpoint of health and metrics, on a separate thread: no client can delay the training.

It answers GET and HEAD, one request per connection. A client that sends nothing, or only a byte from time to time, is
disconnected after `patience_s`; when all places are taken, the oldest connection makes room, so that such clients do
not block others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pipar.monitoring.http_server import DeadlineProtocol, cut_off_all, http_server
from pipar.transport.addresses import listen_on

#: The answer for a path: status, content type and body.
Answer = Callable[[str], tuple[HTTPStatus, str, bytes]]

_LARGEST_REQUEST = 8192  # bytes of its first line and headers
_SHUTDOWN_S = 1  # time for a connection to end
_HEADERS = {"Server": "pipar", "Connection": "close"}  # one answer per connection: places are few

_log = logging.getLogger("pipar.monitoring.metrics")


class MetricsEndpoint:
    """Listens from its construction until `stop` has returned."""

    def __init__(self, answer: Answer, address: str, *, patience_s: float = 5.0, places: int = 16) -> None:
        self._socket = listen_on(address, "serve metrics")
        self.port: int = self._socket.getsockname()[1]
        self._opened: list[DeadlineProtocol] = []  # the oldest connection first
        self._server = http_server(
            _application(answer),
            _protocol(self._opened, patience_s, places),
            shutdown_s=_SHUTDOWN_S,
            largest_request_bytes=_LARGEST_REQUEST,
        )
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()
        _log.info("health and metrics at http://%s:%d", address.rpartition(":")[0], self.port)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:  # noqa: BLE001 - the thread ends here, and the training continues
            _log.warning("The endpoint for health and metrics has failed; training continues.", exc_info=True)

    async def _serve(self) -> None:
        await self._server.serve(sockets=[self._socket])
        await cut_off_all(self._server)

    def stop(self) -> None:
        """Stop listening, and disconnect all clients."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


def _application(answer: Answer) -> ASGIApp:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await _response(Request(scope), answer)(scope, receive, send)

    return application


def _response(request: Request, answer: Answer) -> Response:
    if _size_bytes(request) > _LARGEST_REQUEST:
        return _refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    if request.method not in ("GET", "HEAD"):
        return _refusal(HTTPStatus.NOT_IMPLEMENTED)
    status, content_type, body = answer(request.scope["path"])
    return Response(body, status, headers={**_HEADERS, "Content-Type": content_type})


def _size_bytes(request: Request) -> int:
    """Return the size of a request without its body; uvicorn limits only what arrives piece by piece."""
    address = len(request.scope["raw_path"]) + len(request.scope["query_string"])
    return address + sum(len(name) + len(value) for name, value in request.headers.raw)


def _refusal(status: HTTPStatus) -> Response:
    return PlainTextResponse(f"{status.phrase}\n", status, headers=_HEADERS)


def _protocol(opened: list[DeadlineProtocol], patience_s: float, places: int) -> type[DeadlineProtocol]:
    """Return a protocol that keeps at most `places` connections in `opened`, each for at most `patience_s`."""

    class BoundedProtocol(DeadlineProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.set_deadline(patience_s, _hang_up, self, opened)
            opened.append(self)
            if len(opened) > places:
                _hang_up(opened[0], opened)

        def connection_lost(self, exc: Exception | None) -> None:
            if self in opened:
                opened.remove(self)
            super().connection_lost(exc)

    return BoundedProtocol


def _hang_up(connection: DeadlineProtocol, opened: list[DeadlineProtocol]) -> None:
    """End a connection in order: its client reads an end, not a reset."""
    opened.remove(connection)
    connection.set_deadline(_SHUTDOWN_S, connection.transport.abort)
    with contextlib.suppress(OSError):  # the client has left already
        connection.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

"""The live page over HTTP: the page, its stream of events, and access to them."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import gzip
import hashlib
import re
import sys
import termios
from functools import cache

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipar.live_page.access import Access
from pipar.live_page.feed import Feed
from pipar.monitoring.http_server import DeadlineProtocol, cut_off, http_server
from pipar.report.page import render

#: Connections at the same time, with or without a request: a training needs files and sockets, too.
MOST_CONNECTIONS = 48
#: A client that sends no request, or reads nothing of an answer, for this long is disconnected.
REQUEST_WITHIN_S = 10.0
READ_WITHIN_S = 20.0

_HEADERS = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Connection": "close",  # one request each: a client with half a second request would keep its place forever
}


def application(feed: Feed, access: Access, port: int) -> ASGIApp:
    """Return the application that answers requests."""
    routes = [Route("/", _page), Route("/events", _Events(feed)), Route("/favicon.ico", _no_icon)]
    # Browsers keep cookies by host, not by port: each port has its own cookie name.
    return _AccessMiddleware(Starlette(routes=routes), access, cookie=f"pipar-{port}")


async def _page(request: Request) -> Response:
    html, policy = _rendered()
    headers = {"Content-Security-Policy": policy, "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return HTMLResponse(_compressed(), headers={**headers, "Content-Encoding": "gzip"})
    return HTMLResponse(html, headers=headers)


@cache
def _rendered() -> tuple[str, str]:
    html = render(None, live=True)
    return html, content_security_policy(html)


@cache
def _compressed() -> bytes:
    """Return the compressed page, a third of its size; it is the same for all requests."""
    return gzip.compress(_rendered()[0].encode())


async def _no_icon(_: Request) -> Response:
    return Response(status_code=204)


class _Events:
    """Answers with a stream of events."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = self._feed.open()
        if stream is None:
            await PlainTextResponse("Too many browsers are connected already.\n", 503)(scope, receive, send)
            return
        try:
            await StreamingResponse(stream.messages(), media_type="text/event-stream")(scope, receive, send)
        finally:
            self._feed.close(stream)


# --- access


class _AccessMiddleware:
    """Passes on requests that `Access` allows, and adds security headers to every answer."""

    def __init__(self, app: ASGIApp, access: Access, *, cookie: str) -> None:
        self._app = app
        self._access = access
        self._cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        answer = self._refusal(Request(scope)) or self._app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request without access, or with the token; None if the request may pass."""
        if not self._access.knows_host(request.headers.get("host", "")):
            return PlainTextResponse("This page is not served under that host name.\n", 421)
        if request.headers.get("sec-fetch-site") == "cross-site" and request.url.path != "/":
            return PlainTextResponse("Requests from other sites are refused.\n", 403)
        if request.url.path == "/" and self._access.is_token(request.query_params.get("token", "")):
            welcome = RedirectResponse("/", 303)  # without the token, which would otherwise stay in the address bar
            # The token may come from a link in a chat or mail: after it, a strict cookie would not be sent.
            welcome.set_cookie(self._cookie, self._access.session, httponly=True, samesite="lax")
            return welcome
        if not self._access.is_session(request.cookies.get(self._cookie, "")):
            return PlainTextResponse("Open the address that pipar printed: it contains the token of this page.\n", 403)
        return None


_SCRIPT = re.compile(r"<script\b([^>]*)>(.*?)</script>", re.DOTALL)
_STYLE = re.compile(r"<style\b[^>]*>(.*?)</style>", re.DOTALL)


def content_security_policy(html: str) -> str:
    """Return the policy of a page: it may run its own scripts and styles and connect to its server, nothing else."""
    scripts = [_digest(body) for words, body in _SCRIPT.findall(html) if "json" not in words]
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(scripts) or "'none'",
        "style-src-elem": " ".join(_digest(body) for body in _STYLE.findall(html)) or "'none'",
        "style-src-attr": "'unsafe-inline'",  # charts position their tooltips this way
        "img-src": "data: blob:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# --- connections


class _PageProtocol(DeadlineProtocol):
    """A connection that is closed if its client does nothing: places are few."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            cut_off(transport)
        else:
            self.set_deadline(REQUEST_WITHIN_S, self._cut_off_if_silent)

    def _cut_off_if_silent(self) -> None:
        if self.cycle is None:
            cut_off(self.transport)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_later(_unread_bytes(self.transport))

    def _check_later(self, unread: int) -> None:
        self.set_deadline(READ_WITHIN_S, self._cut_off_unless_read, unread)

    def _cut_off_unless_read(self, before: int) -> None:
        if (unread := _unread_bytes(self.transport)) < before:
            self._check_later(unread)  # over a slow link, the page takes a while
        else:
            cut_off(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.clear_deadline()


def _unread_bytes(transport: asyncio.Transport) -> int:
    """Return the bytes that the client has not received: those queued here, and those queued by the system."""
    queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    return transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)


def page_server(app: ASGIApp, shutdown_s: int) -> uvicorn.Server:
    """Return the server of the page; at its end, browsers have `shutdown_s` seconds to read what is left."""
    return http_server(app, _PageProtocol, shutdown_s=shutdown_s)

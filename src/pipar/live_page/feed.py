"""Messages to the browsers: the latest of each kind, as fast as each browser reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Any

#: After this long without a message, a keep-alive is sent: proxies close silent streams, and a page without
#: keep-alives reconnects.
KEEP_ALIVE_S = 10.0
_RETRY_MS = 1000


def message(kind: str, document: Any) -> bytes:
    """Return a server-sent event; its JSON is one line of data."""
    data = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


class Stream:
    """The stream of one browser: the latest unsent message of each kind. Older ones are dropped."""

    def __init__(self) -> None:
        self._waiting: dict[str, bytes] = {}
        self._changed = asyncio.Event()
        self._is_over = False

    def put(self, kind: str, text: bytes) -> None:
        self._waiting[kind] = text
        self._changed.set()

    def end(self) -> None:
        """End the stream when everything has been sent."""
        self._is_over = True
        self._changed.set()

    async def messages(self, keep_alive_s: float = KEEP_ALIVE_S) -> AsyncIterator[bytes]:
        """Yield the messages to send, until the end."""
        yield f"retry: {_RETRY_MS}\n\n".encode()
        while not (self._is_over and not self._waiting):
            try:
                async with asyncio.timeout(keep_alive_s):
                    await self._changed.wait()
            except TimeoutError:
                yield message("alive", None)
                continue
            self._changed.clear()
            while self._waiting:
                yield self._waiting.pop(next(iter(self._waiting)))


class Feed:
    """All streams, and the latest message of each kind, made only if there is a stream to send it to.

    Messages of a `dated` kind contain the time when they were made, so a new stream gets a new one.
    """

    def __init__(
        self, most_streams: int, makers: Mapping[str, Callable[[], Any]], *, dated: Collection[str] = ()
    ) -> None:
        self._most = most_streams
        self._makers = makers  # by kind of message, of the document to send
        self._dated = dated
        self._made: dict[str, bytes] = {}
        self._streams: set[Stream] = set()

    def open(self) -> Stream | None:
        """Return a new stream that begins with the latest message of each kind; None if there are too many."""
        if len(self._streams) >= self._most:
            return None
        stream = Stream()
        for kind in self._dated:
            self._made.pop(kind, None)
        for kind in self._makers:
            stream.put(kind, self._latest(kind))
        self._streams.add(stream)
        return stream

    def close(self, stream: Stream) -> None:
        """Remove a stream whose browser has left."""
        self._streams.discard(stream)

    def renew(self, kind: str) -> None:
        """Send a new message of this kind to all streams, also to later ones."""
        self._made.pop(kind, None)
        if self._streams:
            latest = self._latest(kind)
            for stream in self._streams:
                stream.put(kind, latest)

    def end(self) -> None:
        """End all streams when everything has been sent."""
        for stream in self._streams:
            stream.end()

    def _latest(self, kind: str) -> bytes:
        if kind not in self._made:
            self._made[kind] = message(kind, self._makers[kind]())
        return self._made[kind]

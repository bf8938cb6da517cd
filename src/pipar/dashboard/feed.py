"""What goes to the browsers: the latest of each kind of message, to each as quickly as it takes them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Any

#: A stream on which nothing is said for so long says that it is still there: proxies end what is silent, and a page
#: looks for a new connection when not even that comes.
KEEP_ALIVE_S = 10.0
_RETRY_MS = 1000


def message(kind: str, document: Any) -> bytes:
    """Return a server-sent event; JSON without line ends is one line of data."""
    data = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


class Stream:
    """One browser's place: the latest message of each kind that it has not taken yet. Older ones are dropped."""

    def __init__(self) -> None:
        self._waiting: dict[str, bytes] = {}
        self._changed = asyncio.Event()
        self._is_over = False

    def put(self, kind: str, said: bytes) -> None:
        self._waiting[kind] = said
        self._changed.set()

    def end(self) -> None:
        """Let it end when everything has been taken."""
        self._is_over = True
        self._changed.set()

    async def messages(self, keep_alive_s: float = KEEP_ALIVE_S) -> AsyncIterator[bytes]:
        """Give what is to be sent, until the end."""
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
    """All streams, and the latest message of each kind, which is made when there is somebody to take it.

    Those of a kind that is `dated` hold the time at which they were made: who comes later gets one of its own.
    """

    def __init__(
        self, most_streams: int, makers: Mapping[str, Callable[[], Any]], *, dated: Collection[str] = ()
    ) -> None:
        self._most = most_streams
        self._makers = makers  # of a document, by kind of message
        self._dated = dated
        self._made: dict[str, bytes] = {}
        self._streams: set[Stream] = set()

    def open(self) -> Stream | None:
        """Return a new stream that begins with the latest of everything; None if there are too many."""
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
        """Nobody listens to this one any more."""
        self._streams.discard(stream)

    def renew(self, kind: str) -> None:
        """Tell everybody what is new of this kind, and everybody who comes later."""
        self._made.pop(kind, None)
        if self._streams:
            said = self._latest(kind)
            for stream in self._streams:
                stream.put(kind, said)

    def end(self) -> None:
        """Let all streams end when they have been taken from."""
        for stream in self._streams:
            stream.end()

    def _latest(self, kind: str) -> bytes:
        if kind not in self._made:
            self._made[kind] = message(kind, self._makers[kind]())
        return self._made[kind]

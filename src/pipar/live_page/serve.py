"""The live page of a training, on a thread with its own event loop: it never delays the training.

The training's thread only appends events to a queue. The page's thread turns them into a state and JSON, and serves the
browsers. A browser that reads slowly gets only the latest state, or is disconnected; nothing accumulates for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipar.events import Event, Progress, Stopping
from pipar.live_page.access import AUTO, Access, shown_host
from pipar.live_page.feed import Feed
from pipar.live_page.history import History
from pipar.live_page.state import LiveState
from pipar.storage.run_json import strict_json
from pipar.transport.addresses import listen_on

THREAD = "live-page"
#: How often changes are sent to the browsers.
REFRESH_S = 0.25
#: Most browsers at the same time.
MOST_STREAMS = 16
#: When the program ends, browsers have this long to read the last messages.
_SHUTDOWN_S = 1
#: Largest share of a core for updating the report: in a server, Python's lock holds up the training meanwhile.
_REPORTING_SHARE = 0.003
#: If more events than this are waiting, reports of progress are dropped: others follow.
_MOST_WAITING = 10_000

_log = logging.getLogger("pipar.live_page")


@contextlib.contextmanager
def served(address: str, token: str | None = None) -> Iterator[LivePage]:
    """Yield a live page at HOST:PORT until the block ends; its last state shows how the block ended."""
    page = LivePage(address, token)
    trouble = ""
    try:
        yield page
    except KeyboardInterrupt:
        page.observe(Stopping("It was interrupted."))
        raise
    except Exception as error:
        trouble = str(error)
        raise
    finally:
        page.stop(trouble)


class LivePage:
    """The live page; it listens from its construction until `stop` has returned."""

    def __init__(self, address: str, token: str | None = None) -> None:
        access = Access.of(address, token)
        self._socket = listen_on(address, "serve the live page")
        port = self._socket.getsockname()[1]
        # A token given by the user is known to the user, and does not belong on a screen or in a log.
        query = "" if access.token is None else f"?token={access.token if token in (None, AUTO) else '...'}"
        self.url = f"http://{shown_host(access.host)}:{port}/{query}"
        self._inbox: deque[tuple[float, Event]] = deque()
        self._program = _Program(access, self._inbox)
        self._thread = threading.Thread(target=self._program.run, args=(self._socket,), name=THREAD, daemon=True)
        self._thread.start()

    def observe(self, event: Event) -> None:
        """Queue one event; this is all that the training's thread does for the page."""
        if not self._thread.is_alive():
            return  # nothing would ever read it
        if len(self._inbox) < _MOST_WAITING or not isinstance(event, Progress):
            self._inbox.append((time.time(), event))

    def stop(self, trouble: str = "") -> None:
        """End the page; its last state shows the end of the run, and `trouble` if it failed."""
        self._program.end(trouble)
        self._thread.join(timeout=10 * _SHUTDOWN_S)
        self._socket.close()


class _Program:
    """The work of the page's thread."""

    def __init__(self, access: Access, inbox: deque[tuple[float, Event]]) -> None:
        self._access = access
        self._inbox = inbox
        self._state = LiveState()
        self._history = History()
        self._feed = Feed(MOST_STREAMS, {"state": self._stamped_state, "content": self._content}, dated=("state",))
        self._session = secrets.token_hex(8)  # tells a browser's page that a new program serves it
        self._trouble = ""
        self._should_end = threading.Event()
        self._has_missed = False  # an event that the page could not process
        self._has_news = False  # for the report
        self._report_again_at = 0.0

    def run(self, listening: socket.socket) -> None:
        """Serve until the end; no error here reaches the training."""
        with contextlib.suppress(OSError):  # the thread's name in the system, so that `top -H` shows its cost
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(THREAD)
        try:
            asyncio.run(self._serve(listening))
        except Exception:  # noqa: BLE001 - the thread ends here, and the training continues
            _log.warning("The live page has failed; training continues without it.", exc_info=True)
        finally:
            listening.close()  # a new browser is refused immediately instead of waiting for an answer
            self._inbox.clear()

    def end(self, trouble: str) -> None:
        """Request the end, from any thread."""
        self._trouble = trouble
        self._should_end.set()

    async def _serve(self, listening: socket.socket) -> None:
        from pipar.live_page.web import application, page_server
        from pipar.monitoring.http_server import cut_off_all

        server = page_server(application(self._feed, self._access, listening.getsockname()[1]), _SHUTDOWN_S)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not self._should_end.is_set() and not serving.done():
            self._keep_up()
            await asyncio.sleep(REFRESH_S)
        self._keep_up()
        self._send_last()
        server.should_exit = True
        await serving
        await cut_off_all(server)

    def _keep_up(self) -> None:
        """Process new events, and send the changes to the browsers."""
        if self._inbox:
            while self._inbox:
                self._take(*self._inbox.popleft())
            self._feed.renew("state")
        if self._has_news and time.monotonic() >= self._report_again_at:
            began_s = time.thread_time()
            self._feed.renew("content")
            self._has_news = False
            self._report_again_at = time.monotonic() + (time.thread_time() - began_s) / _REPORTING_SHARE

    def _take(self, at: float, event: Event) -> None:
        """Process one event; skip one that fails."""
        try:
            self._state.take(event, at)
            self._has_news |= self._history.take(event)
        except Exception:  # noqa: BLE001 - an incomplete page is better than none
            kind = type(event).__name__
            if not self._has_missed:
                _log.warning("The live page is incomplete: it could not process %s.", kind, exc_info=True)
            self._has_missed = True

    def _send_last(self) -> None:
        self._state.end(time.time(), self._trouble)
        self._history.end()
        self._feed.renew("content")
        self._feed.renew("state")
        self._feed.end()

    def _stamped_state(self) -> dict[str, Any]:
        """Return the state with the time of this clock, which may differ from a browser's."""
        return {**self._state.picture(), "now": time.time(), "session": self._session}

    def _content(self) -> dict[str, Any] | None:
        try:
            content: dict[str, Any] | None = strict_json(self._history.content())
        except Exception:  # noqa: BLE001 - a page without charts is better than none
            _log.warning("The live page cannot show the report of this run.", exc_info=True)
            return None
        return content

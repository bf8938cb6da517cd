"""The live page beside a training, and never in its way.

A thread of its own with an event loop of its own serves it. The training's thread does one thing for it: it appends
events to a queue. Everything else, folding events into a state, JSON, browsers, happens here, and a browser that does
not take what it is sent gets the latest when it does, or is cut off; nothing is kept for it meanwhile.
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

from pipar.dashboard.access import AUTO, Access, shown_host
from pipar.dashboard.feed import Feed
from pipar.dashboard.history import History
from pipar.dashboard.state import LiveState
from pipar.events import Event, Progress, Stopping
from pipar.storage.run_folder import strict_json
from pipar.transport.addresses import listen_on

THREAD = "dashboard"
#: How often browsers are told what has changed.
REFRESH_S = 0.25
#: Browsers that watch at once.
MOST_STREAMS = 16
#: When the program ends, browsers have so long to take what was said last.
_LAST_WORDS_S = 1
#: Reports are made anew with no more than this share of a core: in a server, the training waits for Python meanwhile.
_REPORTING_SHARE = 0.003
#: Beyond so many events that were not taken in, reports of progress are dropped: others follow.
_MOST_WAITING = 10_000

_log = logging.getLogger("pipar.dashboard")


@contextlib.contextmanager
def served(address: str, token: str | None = None) -> Iterator[Dashboard]:
    """Give a live page that can be opened at HOST:PORT until the block ends; then the page says how that was."""
    dashboard = Dashboard(address, token)
    trouble = ""
    try:
        yield dashboard
    except KeyboardInterrupt:
        dashboard.observe(Stopping("It was interrupted."))
        raise
    except Exception as error:
        trouble = str(error)
        raise
    finally:
        dashboard.stop(trouble)


class Dashboard:
    """The live page; it listens when this is made, and no longer when `stop` has returned."""

    def __init__(self, address: str, token: str | None = None) -> None:
        access = Access.of(address, token)
        self._socket = listen_on(address, "serve the live page")
        port = self._socket.getsockname()[1]
        # A token that somebody gave is known to who is to know it, and does not belong on a screen or into a log.
        query = "" if access.token is None else f"?token={access.token if token in (None, AUTO) else '...'}"
        self.url = f"http://{shown_host(access.host)}:{port}/{query}"
        self._inbox: deque[tuple[float, Event]] = deque()
        self._program = _Program(access, self._inbox)
        self._thread = threading.Thread(target=self._program.run, args=(self._socket,), name=THREAD, daemon=True)
        self._thread.start()

    def observe(self, event: Event) -> None:
        """Take one event; this is all that a training does for its page."""
        if not self._thread.is_alive():
            return  # nobody would ever take it
        if len(self._inbox) < _MOST_WAITING or not isinstance(event, Progress):
            self._inbox.append((time.time(), event))

    def stop(self, trouble: str = "") -> None:
        """Say that it is over, for this reason if it is no good one, and end."""
        self._program.end(trouble)
        self._thread.join(timeout=10 * _LAST_WORDS_S)
        self._socket.close()


class _Program:
    """What the dashboard's thread does."""

    def __init__(self, access: Access, inbox: deque[tuple[float, Event]]) -> None:
        self._access = access
        self._inbox = inbox
        self._state = LiveState()
        self._history = History()
        self._feed = Feed(MOST_STREAMS, {"state": self._stamped_state, "content": self._content}, dated=("state",))
        self._session = secrets.token_hex(8)  # tells a page that another program has taken this one's place
        self._trouble = ""
        self._end_is_near = threading.Event()
        self._has_missed = False  # an event that the page does not understand
        self._has_news = False  # for the report
        self._report_again_at = 0.0

    def run(self, listening: socket.socket) -> None:
        """Serve until the end; whatever goes wrong here stays here."""
        with contextlib.suppress(OSError):  # by its name in the system, anybody can see what it costs: `top -H`
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(THREAD)
        try:
            asyncio.run(self._serve(listening))
        except Exception:  # noqa: BLE001 - the thread ends here, and the training goes on
            _log.warning("The live page has failed; the training goes on without it.", exc_info=True)
        finally:
            listening.close()  # a browser that comes now is refused, and does not wait for an answer
            self._inbox.clear()

    def end(self, trouble: str) -> None:
        """Ask for the end, from any thread."""
        self._trouble = trouble
        self._end_is_near.set()

    async def _serve(self, listening: socket.socket) -> None:
        from pipar.dashboard.web import application, page_server
        from pipar.monitoring.http_server import cut_off_all

        server = page_server(application(self._feed, self._access, listening.getsockname()[1]), _LAST_WORDS_S)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not self._end_is_near.is_set() and not serving.done():
            self._keep_up()
            await asyncio.sleep(REFRESH_S)
        self._keep_up()
        self._say_goodbye()
        server.should_exit = True
        await serving
        await cut_off_all(server)

    def _keep_up(self) -> None:
        """Take in what has happened, and tell who watches."""
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
        """Take one event in; the page goes on without one that it cannot take."""
        try:
            self._state.take(event, at)
            self._has_news |= self._history.take(event)
        except Exception:  # noqa: BLE001 - a page that lacks something is better than none
            kind = type(event).__name__
            if not self._has_missed:
                _log.warning("The live page does not show everything: it cannot take %s.", kind, exc_info=True)
            self._has_missed = True

    def _say_goodbye(self) -> None:
        self._state.end(time.time(), self._trouble)
        self._history.end()
        self._feed.renew("content")
        self._feed.renew("state")
        self._feed.end()

    def _stamped_state(self) -> dict[str, Any]:
        """Return the state with the time of this clock, which a browser's may differ from."""
        return {**self._state.picture(), "now": time.time(), "session": self._session}

    def _content(self) -> dict[str, Any] | None:
        try:
            content: dict[str, Any] | None = strict_json(self._history.content())
        except Exception:  # noqa: BLE001 - a page without charts is better than none
            _log.warning("The live page cannot show a report of this run.", exc_info=True)
            return None
        return content

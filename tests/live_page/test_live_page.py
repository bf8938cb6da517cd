"""The live page over real sockets: access, headers, and clients that hang."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import json
import logging
import re
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from support.waiting import PATIENCE_S

from pipar.errors import InputError, TrainingError
from pipar.events import Event, Joined, Lost, Progress, Started
from pipar.execution.clock import run_virtually
from pipar.live_page import serve, web
from pipar.live_page.access import Access
from pipar.live_page.history import History
from pipar.live_page.serve import LivePage, served
from pipar.live_page.state import LiveState
from pipar.monitoring import http_server

TOKEN = "correct-horse-battery"
_PLACE = re.compile(r"http://([^:/]+):(\d+)/")


@contextlib.contextmanager
def opened(token: str | None = None, address: str = "127.0.0.1:0") -> Iterator[LivePage]:
    dashboard = LivePage(address, token)
    try:
        yield dashboard
    finally:
        dashboard.stop()


@pytest.fixture(scope="module")
def page() -> Iterator[LivePage]:
    """One page for the tests that only ask."""
    with opened() as dashboard:
        yield dashboard


def place(dashboard: LivePage) -> tuple[str, int]:
    match = _PLACE.match(dashboard.url)
    assert match is not None
    return match[1], int(match[2])


def ask(dashboard: LivePage, path: str = "/", method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(*place(dashboard), timeout=PATIENCE_S)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    return connection.getresponse()


class Watcher:
    """A browser's stream of events."""

    def __init__(self, dashboard: LivePage, **headers: str) -> None:
        self._answer = ask(dashboard, "/events", **headers)
        assert self._answer.status == 200
        self.kind = self._answer.headers["content-type"]

    def next(self, kind: str = "state") -> Any:
        """Return the content of the next event of a kind."""
        name = ""
        while line := self._answer.readline().decode():
            if line.startswith("event: "):
                name = line.removeprefix("event: ").strip()
            elif line.startswith("data: ") and name == kind:
                return json.loads(line.removeprefix("data: "))
        raise EOFError

    def until(self, is_so: Any) -> Any:
        """Return the first state that is so."""
        while not is_so(state := self.next()):
            pass
        return state

    def close(self) -> None:
        self._answer.close()


@contextlib.contextmanager
def watching(dashboard: LivePage, **headers: str) -> Iterator[Watcher]:
    watcher = Watcher(dashboard, **headers)
    try:
        yield watcher
    finally:
        watcher.close()


def states_of(state: dict[str, Any]) -> dict[str, str]:
    return {device["name"]: device["state"] for device in state["devices"]}


# --- the page and its headers


def test_the_page_is_complete_and_may_run_only_its_own_scripts(page: LivePage) -> None:
    answer = ask(page)
    html, policy = answer.read().decode(), answer.headers["content-security-policy"]
    assert answer.status == 200
    assert '<section id="live"' in html
    assert re.search(r"<(script|link|img)[^>]+(src|href)=[\"']?(https?:)?//", html) is None
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert rules["script-src"].count("sha256-") == len(re.findall(r"<script>", html)) > 0
    assert "unsafe" not in rules["script-src"]


@pytest.mark.parametrize("path", ["/", "/nowhere", "/favicon.ico"])
def test_every_answer_has_security_headers(page: LivePage, path: str) -> None:
    headers = ask(page, path).headers
    assert (headers["x-frame-options"], headers["x-content-type-options"]) == ("DENY", "nosniff")
    assert (headers["cache-control"], headers["referrer-policy"]) == ("no-store", "no-referrer")
    assert "server" not in headers


@pytest.mark.parametrize(("path", "method", "status"), [("/nowhere", "GET", 404), ("/", "POST", 405)])
def test_other_paths_and_methods_are_refused(page: LivePage, path: str, method: str, status: int) -> None:
    assert ask(page, path, method).status == status


# --- access


def test_a_foreign_host_name_is_refused(page: LivePage) -> None:
    assert ask(page, Host="evil.example").status == 421
    assert ask(page, "/events", Host="evil.example").status == 421


def test_pages_of_other_sites_get_no_stream(page: LivePage) -> None:
    assert ask(page, "/events", Sec_Fetch_Site="cross-site").status == 403
    assert ask(page, "/", Sec_Fetch_Site="cross-site").status == 200  # a link on another site was clicked


def test_a_token_is_presented_once_and_then_a_cookie() -> None:
    with opened(TOKEN) as dashboard:
        assert TOKEN not in dashboard.url
        refused = [ask(dashboard, path).status for path in ("/", "/events", "/?token=wrong", f"/events?token={TOKEN}")]
        assert refused == [403] * 4
        welcome = ask(dashboard, f"/?token={TOKEN}")
        cookie = welcome.headers["set-cookie"]
        assert (welcome.status, welcome.headers["location"]) == (303, "/")
        assert {"httponly", "samesite=lax", "path=/"} <= {part.strip().lower() for part in cookie.split(";")}
        shown = cookie.partition(";")[0]
        assert TOKEN not in shown
        assert ask(dashboard, Cookie=shown).status == 200
        assert ask(dashboard, Cookie=shown[:-1]).status == 403
        with watching(dashboard, Cookie=shown) as watcher:
            assert watcher.next()["phase"] == "preparing"


def test_a_created_token_is_in_the_url() -> None:
    with opened(address="0.0.0.0:0") as dashboard:
        made = dashboard.url.partition("?token=")[2]
        port = int(dashboard.url.rpartition(":")[2].partition("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        connection.request("GET", "/")
        assert connection.getresponse().status == 403
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        connection.request("GET", f"/?token={made}")
        assert connection.getresponse().status == 303


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("nonsense", "'nonsense' is not an address"),
        ("127.0.0.1:99999", "is not an address"),
        ("no.such.host.invalid:0", "Cannot serve the live page on no.such.host.invalid:0: there is no such host."),
        ("192.0.2.1:0", "Cannot serve the live page on 192.0.2.1:0: "),
    ],
)
def test_an_invalid_address_is_refused_in_one_sentence(address: str, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        LivePage(address)


def test_a_port_in_use_is_refused_in_one_sentence(page: LivePage) -> None:
    taken = f"127.0.0.1:{place(page)[1]}"
    with pytest.raises(InputError, match=f"Cannot serve the live page on {taken}: address already in use"):
        LivePage(taken)


def test_the_page_is_compressed_for_browsers_that_accept_it(page: LivePage) -> None:
    plain, packed = ask(page), ask(page, Accept_Encoding="gzip, deflate, br")
    assert (plain.headers["content-encoding"], packed.headers["content-encoding"]) == (None, "gzip")
    whole, small = plain.read(), packed.read()
    assert gzip.decompress(small) == whole
    assert len(small) < len(whole) / 2


# --- the stream


def test_a_browser_gets_the_state_immediately_and_changes_soon() -> None:
    with opened() as dashboard, watching(dashboard) as watcher:
        assert watcher.kind.startswith("text/event-stream")
        assert watcher.next()["devices"] == []
        dashboard.observe(Joined("pi-1", 1))
        assert states_of(watcher.next()) == {"pi-1": "joined"}
        dashboard.observe(Lost("pi-1", "its link broke"))
        assert states_of(watcher.next()) == {"pi-1": "lost"}
        with watching(dashboard) as late:
            assert states_of(late.next()) == {"pi-1": "lost"}


@pytest.mark.parametrize("after_s", [0.0, 0.1, 1.0, 60.0])
def test_a_browser_gets_a_change_within_two_seconds(after_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long the page's thread waits before it sends, in virtual time and without sockets."""
    ended = asyncio.Event()

    class Server:
        should_exit = False

        async def serve(self, **_: object) -> None:
            await ended.wait()

    async def nothing_to_cut_off(_: object) -> None:
        pass

    monkeypatch.setattr(web, "page_server", lambda *_: Server())
    monkeypatch.setattr(http_server, "cut_off_all", nothing_to_cut_off)
    inbox: deque[tuple[float, Event]] = deque()
    program = serve._Program(Access.of("127.0.0.1:0", None), inbox)

    async def main() -> float:
        loop = asyncio.get_running_loop()
        with socket.socket() as listening:
            serving = asyncio.create_task(program._serve(listening))
            stream = program._feed.open()
            assert stream is not None
            await asyncio.sleep(after_s)
            inbox.append((0.0, Lost("pi-1", "its link broke")))
            began = loop.time()
            async for message in stream.messages():
                if b'"lost"' in message:
                    break
            took_s = loop.time() - began
            program.end("")
            ended.set()
            await serving
        return took_s

    assert run_virtually(main()) < 2.0


def test_browsers_get_the_final_state() -> None:
    watchers: list[Watcher] = []

    def fail() -> None:
        with served("127.0.0.1:0") as dashboard:
            watchers.append(Watcher(dashboard))
            assert watchers[0].next()["phase"] == "preparing"
            raise TrainingError("The process of pi-1 was ended by signal 9.")

    with pytest.raises(TrainingError):
        fail()
    (watcher,) = watchers
    last = watcher.next()
    assert (last["phase"], last["trouble"]) == ("failed", "The process of pi-1 was ended by signal 9.")
    with pytest.raises(EOFError):
        watcher.next()
    watcher.close()


# --- clients that hang


def hanging(dashboard: LivePage, said: bytes = b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n") -> socket.socket:
    """Return a connection that asks for the stream, and never reads of it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(place(dashboard))
    if said:  # a client that is already disconnected cannot send
        client.sendall(said)
    return client


def make_large(dashboard: LivePage) -> None:
    """Start a run with a large state: three kilobytes for each of a hundred devices."""
    names = [f"device-{number:03}" for number in range(100)]
    dashboard.observe(Started("runs/x", "pipar", 5, 2, dict.fromkeys(names, "P=2 N=4"), dict.fromkeys(names, 1), {}))
    for name in names:
        dashboard.observe(Lost(name, "x" * 3000))


def is_cut_off(client: socket.socket) -> bool:
    """Return whether the other side ends a connection, whatever it has sent before."""
    client.settimeout(PATIENCE_S)
    with contextlib.suppress(ConnectionError):
        while client.recv(1 << 16):
            pass
    return True


@pytest.mark.slow
def test_browsers_that_never_read_delay_nothing_and_cost_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[Any] = []

    def capturing(*words: Any) -> Any:
        servers.append(make(*words))
        return servers[-1]

    make = web.page_server
    monkeypatch.setattr(web, "page_server", capturing)
    monkeypatch.setattr(serve, "REFRESH_S", 0.005)
    with opened() as dashboard, contextlib.ExitStack() as stack:
        make_large(dashboard)
        for _ in range(8):
            stack.enter_context(hanging(dashboard))
        watcher = stack.enter_context(watching(dashboard))
        sizes = []
        for number in range(40):
            dashboard.observe(Joined(f"device-{number:03}", number))
            state = watcher.until(lambda state, name=f"device-{number:03}": states_of(state).get(name) == "joined")
            sizes.append(len(json.dumps(state)))
        held = [connection.transport.get_write_buffer_size() for connection in servers[0].server_state.connections]
    assert sum(sizes) > 8e6  # more than the system's buffers hold of one connection
    assert len([size for size in held if size]) == 8
    assert max(held) < 65536 + 2 * max(sizes)


@pytest.mark.slow
def test_a_browser_that_reads_nothing_for_long_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "REFRESH_S", 0.002)
    monkeypatch.setattr(web, "READ_WITHIN_S", 0.2)
    with opened() as dashboard, hanging(dashboard) as client:
        make_large(dashboard)
        ends, deadline = select.poll(), time.monotonic() + PATIENCE_S
        ends.register(client, select.POLLHUP)
        while not ends.poll(2) and time.monotonic() < deadline:  # milliseconds
            dashboard.observe(Joined("a", 1))
        assert ends.poll(0)


@pytest.mark.slow
def test_a_browser_that_reads_slowly_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    html = "x" * 10_000_000  # more than the system's buffers hold
    monkeypatch.setattr(web, "_rendered", lambda: (html, "default-src 'none'"))
    monkeypatch.setattr(web, "READ_WITHIN_S", 2.0)
    with opened() as dashboard, hanging(dashboard, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") as client:
        client.settimeout(PATIENCE_S)
        slowly_until, size = time.monotonic() + 4.0, 0
        while said := client.recv(1 << 16):
            size += len(said)
            if time.monotonic() < slowly_until:
                time.sleep(0.1)
    assert size > len(html)


def test_a_client_that_sends_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "REQUEST_WITHIN_S", 0.5)
    with opened() as dashboard:
        for said in (b"", b"GET / HTTP/1.1\r\nHost: loc"):
            with hanging(dashboard, said) as client:
                assert is_cut_off(client)
        with watching(dashboard) as watcher:  # a client with a request may stay
            watcher.next()
            time.sleep(1.0)
            dashboard.observe(Joined("a", 1))
            assert states_of(watcher.next()) == {"a": "joined"}


def test_connections_are_limited_so_that_the_training_keeps_its_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MOST_CONNECTIONS", 3)
    with opened() as dashboard, contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(hanging(dashboard))
        assert is_cut_off(stack.enter_context(hanging(dashboard, b"")))


def test_one_browser_too_many_is_refused() -> None:
    with opened() as dashboard, contextlib.ExitStack() as stack:
        for _ in range(serve.MOST_STREAMS):
            stack.enter_context(watching(dashboard))
        assert ask(dashboard, "/events").status == 503
        assert ask(dashboard, "/").status == 200


@pytest.mark.slow
def test_a_training_never_waits_for_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    held, release, went_on = threading.Event(), threading.Event(), threading.Event()

    def wait(_: History) -> None:
        held.set()
        release.wait(PATIENCE_S)
        went_on.set()

    monkeypatch.setattr(History, "content", wait)
    with opened() as dashboard:
        threading.Thread(target=lambda: ask(dashboard, "/events"), daemon=True).start()
        assert held.wait(PATIENCE_S)  # the page's thread is held up
        for number in range(30_000):
            dashboard.observe(Progress("a", 1, number, 1, 1.0, 1.0))
        waiting = len(dashboard._inbox)
        assert not went_on.is_set()
        release.set()
    assert waiting <= 10_001


def test_a_page_that_cannot_process_an_event_logs_it_once_and_continues(
    monkeypatch: pytest.MonkeyPatch, log_records: list[logging.LogRecord]
) -> None:
    take = LiveState.take

    def take_no_loss(state: LiveState, event: Event, at: float) -> None:
        if isinstance(event, Lost):
            raise KeyError(event.device)
        take(state, event, at)

    monkeypatch.setattr(LiveState, "take", take_no_loss)
    with opened() as dashboard, watching(dashboard) as watcher:
        for event in (Lost("a", "gone"), Lost("b", "gone"), Joined("c", 1)):
            dashboard.observe(event)
        watcher.until(lambda state: states_of(state) == {"c": "joined"})
    (record,) = log_records
    assert record.getMessage() == "The live page is incomplete: it could not process Lost."


def test_a_failed_page_leaves_no_thread_or_socket(
    monkeypatch: pytest.MonkeyPatch, log_records: list[logging.LogRecord]
) -> None:
    with opened() as dashboard:
        monkeypatch.setattr(dashboard._program, "_keep_up", None)  # of this page alone
        for _ in range(2):
            dashboard.observe(Joined("a", 1))
            dashboard._thread.join(PATIENCE_S)
            assert not dashboard._inbox
        with pytest.raises(ConnectionRefusedError):
            ask(dashboard)
    assert [record.getMessage() for record in log_records] == [
        "The live page has failed; training continues without it."
    ]

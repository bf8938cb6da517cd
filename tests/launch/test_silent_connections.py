"""Connections that send nothing do not take the files that a server needs for its checkpoints."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.deployments import check_nothing_is_left, check_weights, counted, training
from support.programs import Place, Program, address_of, place
from support.waiting import until

pytestmark = pytest.mark.slow
#: What an HTTP/2 connection begins with: without it, the server closes it after some seconds.
_SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")


@pytest.fixture
def here(tmp_path: Path, profiles: Path) -> Iterator[Place]:
    with place(tmp_path, profiles, training()) as made:
        yield made


@pytest.fixture(autouse=True)
def _many_files() -> Iterator[None]:
    """Let the test itself open two thousand files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] not in (resource.RLIM_INFINITY,) and before[1] < 4096:
        pytest.skip("needs 4096 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 4096), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def silent_connections(address: str, count: int) -> Iterator[list[socket.socket]]:
    """Keep this many connections open that send no request; the server closes each of them after a minute."""
    host, _, port = address.rpartition(":")
    place_of, ended = (host, int(port)), threading.Event()
    kept: list[socket.socket] = []

    def is_open(connection: socket.socket) -> bool:
        try:
            return connection.recv(4096, socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def keep() -> None:
        while not ended.wait(0.1):
            for connection in [connection for connection in kept if not is_open(connection)]:
                kept.remove(connection)
                connection.close()
            with contextlib.suppress(OSError):
                while len(kept) < count and not ended.is_set():
                    kept.append(socket.create_connection(place_of, timeout=1.0))
                    kept[-1].sendall(_SETTINGS)

    keeping = threading.Thread(target=keep)
    keeping.start()
    try:
        yield kept
    finally:
        ended.set()
        keeping.join()
        for connection in kept:
            connection.close()


def check_every_round_is_saved(server: Program) -> None:
    assert "File descriptor limit reached" not in server.text()
    assert "could not be saved" not in server.text()
    assert server.text().count(" saved in ") == 6


def test_devices_join_and_checkpoints_are_saved_among_silent_connections(here: Place) -> None:
    """The usual soft limit is 1,024 files; the server raises it."""
    server = here.server(files=(1024, 4096))
    address = address_of(server)
    here.hold("pi-1")
    first = here.device("pi-1", address)
    here.wait_until_held("pi-1")
    with silent_connections(address, 1100) as kept:
        until(lambda: len(kept) == 1100, "the connections")
        second = here.device("pi-2", address)
        server.says("pi-2 joined")
        here.let_go("pi-1")
        assert [program.ends() for program in (server, first, second)] == [0, 0, 0]
    assert counted(here)[-1] == {"pi-1", "pi-2"}
    check_every_round_is_saved(server)
    check_weights(here, training())
    check_nothing_is_left(here)


def test_checkpoints_are_saved_where_the_limit_cannot_be_raised(here: Place) -> None:
    server = here.server(files=(256, 256))
    server.says(r"at most \d+ connections")
    address = address_of(server)
    here.hold("pi-1")
    device = here.device("pi-1", address)
    here.wait_until_held("pi-1")
    with silent_connections(address, 400):
        until(lambda: server.open_files() > 120, "connections to the server")
        here.let_go("pi-1")
        assert [program.ends() for program in (server, device)] == [0, 0]
    check_every_round_is_saved(server)
    check_weights(here, training())
    check_nothing_is_left(here)

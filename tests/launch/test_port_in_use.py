"""A server whose port is taken for a while is restarted by systemd: any program may hold a port for a moment."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.deployments import check_nothing_is_left, training
from support.programs import Place, place

pytestmark = pytest.mark.slow


@pytest.fixture
def here(tmp_path: Path, profiles: Path) -> Iterator[Place]:
    with place(tmp_path, profiles, training()) as made:
        yield made


def test_a_port_in_use_does_not_end_a_server_for_good(here: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for server in (here.server(listen=address), here.server("--metrics", address)):
            assert server.ends() == 1  # 2 would leave it stopped
            assert server.lines()[-1].endswith(f"on {address}: address already in use.")
            assert "Traceback" not in server.text()
    check_nothing_is_left(here)


def test_an_address_that_cannot_be_right_ends_a_server_for_good(here: Place) -> None:
    server = here.server("--insecure", listen="no.such.host.invalid:7700")
    assert server.ends() == 2
    assert "there is no such host" in server.lines()[-1]

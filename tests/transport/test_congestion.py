"""Connections leave BBR where the system allows another congestion control."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pipar.transport import congestion
from pipar.transport.congestion import congestion_control, prefer_cubic_at, prefer_cubic_to


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch, listener: socket.socket) -> str:
    """Let the system's default stand for BBR, and "reno", which every Linux has, for CUBIC."""
    default = congestion_control(listener)
    if default == "reno":
        pytest.skip("the default is the only congestion control that every system allows")
    monkeypatch.setattr(congestion, "_AVOIDED", default)
    monkeypatch.setattr(congestion, "_PREFERRED", "reno")
    return default


def test_a_connection_to_the_port_changes_and_another_one_does_not(listener: socket.socket, replaced: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        ours, other = (socket.create_connection(one.getsockname()) for one in (listener, elsewhere))
        with closing(ours), closing(other):
            prefer_cubic_to(listener.getsockname()[1])
            assert (congestion_control(ours), congestion_control(other)) == ("reno", replaced)


def test_accepted_connections_have_what_the_listening_socket_was_given(listener: socket.socket, replaced: str) -> None:
    prefer_cubic_at(listener.getsockname()[1])
    with socket.create_connection(listener.getsockname()) as theirs:
        accepted, _ = listener.accept()
        with accepted:
            assert (congestion_control(accepted), congestion_control(theirs)) == ("reno", replaced)


@pytest.mark.usefixtures("replaced")
def test_what_the_system_does_not_allow_is_left_as_it_is(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(congestion, "_PREFERRED", "no-such-control")
    before = congestion_control(listener)
    prefer_cubic_at(listener.getsockname()[1])
    assert congestion_control(listener) == before


def test_a_control_that_somebody_chose_other_than_bbr_stays(listener: socket.socket) -> None:
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    prefer_cubic_at(listener.getsockname()[1])
    assert congestion_control(listener) == "reno"


def test_a_descriptor_that_becomes_a_file_meanwhile_leaves_no_copy_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    with (tmp_path / "file").open("w") as file, socket.socket() as before:
        number, dup = before.fileno(), os.dup
        monkeypatch.setattr(congestion, "_DESCRIPTORS", tmp_path / "fd")
        (tmp_path / "fd").mkdir()
        (tmp_path / "fd" / str(number)).touch()

        def reused(_: int) -> int:
            copies.append(dup(file.fileno()))
            return copies[-1]

        monkeypatch.setattr(os, "dup", reused)
        prefer_cubic_to(1)
    (copied,) = copies
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(copied)

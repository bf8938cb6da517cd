"""Access to the live page."""

from __future__ import annotations

import pytest

from pipar.errors import InputError
from pipar.live_page.access import Access, shown_host

TOKEN = "correct-horse-battery"


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:8080", "[::1]:0"])
def test_this_machine_needs_no_token(address: str) -> None:
    access = Access.of(address, None)
    assert access.token is None
    assert access.is_session("")


@pytest.mark.parametrize("address", ["0.0.0.0:0", "192.168.0.5:8080", "train.local:80", "[::]:0"])
def test_beyond_loopback_there_always_is_a_token(address: str) -> None:
    access = Access.of(address, None)
    assert access.token is not None
    assert len(access.token) >= 32
    assert not access.is_session("")
    assert not access.is_token("")


def test_tokens_and_sessions_are_new_each_time() -> None:
    one, other = Access.of("127.0.0.1:0", "auto"), Access.of("127.0.0.1:0", "auto")
    assert one.token != other.token
    assert one.session != other.session


def test_token_and_session_are_different() -> None:
    access = Access.of("127.0.0.1:0", TOKEN)
    assert access.is_token(TOKEN)
    assert access.is_session(access.session)
    assert not access.is_session(TOKEN)
    assert not access.is_token(access.session)
    assert not access.is_token("tökén")


@pytest.mark.parametrize("token", ["", "short", "with space in the middle", "with/slash/and?question"])
def test_an_invalid_token_is_refused_in_one_sentence(token: str) -> None:
    with pytest.raises(InputError, match="16 or more letters"):
        Access.of("127.0.0.1:0", token)


LOCAL = ["127.0.0.1", "127.0.0.1:8080", "localhost:9000", "LOCALHOST", "[::1]:80", "127.0.0.2:1"]
FOREIGN = [
    "",
    "evil.example",
    "evil.example:8080",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "192.168.0.5:80",
]


@pytest.mark.parametrize("header", LOCAL)
def test_names_of_this_machine_are_accepted(header: str) -> None:
    assert Access.of("127.0.0.1:0", None).knows_host(header)


@pytest.mark.parametrize("header", FOREIGN)
def test_foreign_names_are_refused(header: str) -> None:
    assert not Access.of("127.0.0.1:0", None).knows_host(header)


def test_a_page_beyond_loopback_accepts_addresses_and_its_own_names_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Board")
    access = Access.of("0.0.0.0:8080", None)
    assert all(access.knows_host(name) for name in ["192.168.0.5:8080", "board:8080", "board.local", "[fe80::1]:80"])
    assert not any(access.knows_host(name) for name in ["evil.example:8080", "board.evil.example"])
    assert Access.of("train.local:80", None).knows_host("train.local")


def test_the_url_has_a_host_that_reaches_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "board")
    assert [shown_host(host) for host in ("127.0.0.1", "0.0.0.0", "::1", "train.local")] == [
        "127.0.0.1", "board", "[::1]", "train.local",
    ]  # fmt: skip

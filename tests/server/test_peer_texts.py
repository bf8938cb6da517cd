"""A peer's text in messages and log lines is short and printable, whatever the peer sends."""

from __future__ import annotations

import pytest
from support.server_world import by_hand, hello, honest, scripted, train, until

from pipar.device.program import _fault
from pipar.errors import ProtocolError, VersionError, describe, peer_text
from pipar.events import Lost
from pipar.monitoring.logs import EventDescriber
from pipar.transport.channel import Channel
from pipar.wire.frames import VERSION, cut_message, pack_frame, unpack_frame
from pipar.wire.messages import Kind, Message, json_body

LONG = "\x1b[2J" + "gone\n" * 1_200


def test_a_device_that_gives_up_with_a_long_reason_leaves_one_short_line() -> None:
    fault = Message(Kind.FAULT, body=json_body({"reason": LONG}))
    outcome = train([honest("a"), by_hand(Kind.ROUND, fault, leaves=True)], epochs=2)
    (lost,) = outcome.of(Lost)
    line = EventDescriber().sentence(lost)
    assert len(line) < 2100
    assert len(lost.reason) < 2100
    assert lost.reason.isprintable()
    assert lost.reason.startswith("it gave up: \\x1b[2Jgone")


def test_a_server_that_refuses_with_a_long_reason_leaves_one_short_line() -> None:
    error = _fault(Message(Kind.FAULT, body=json_body({"reason": LONG})), "refused this device")
    assert len(str(error)) < 2100
    assert str(error).isprintable()


@pytest.mark.parametrize("more", [{"profile": {"format": LONG}}, {"profile": {LONG: 1}}])
def test_a_profile_with_a_long_text_is_refused_in_a_short_sentence(more: dict[str, object]) -> None:
    async def live(channel: Channel) -> None:
        channel.post(hello("b", **more))
        await until(channel, Kind.STOP)

    outcome = train([honest("a"), scripted(live, "b")], begin_with=1, epochs=1)
    assert len(str(outcome.lives[1])) < 2100
    assert str(outcome.lives[1]).isprintable()
    assert outcome.counted == [{"a": 20}]


def test_a_name_that_cannot_be_printed_is_refused() -> None:
    async def live(channel: Channel) -> None:
        channel.post(hello("b\n12:00:00  a joined"))
        await until(channel, Kind.STOP)

    outcome = train([honest("a"), scripted(live, "b")], begin_with=1, epochs=1)
    assert "a name has 1 to 64 characters, all printable" in str(outcome.lives[1])


def test_texts_are_cut_and_escaped() -> None:
    assert peer_text("short") == "short"
    assert peer_text("x" * 1001) == "x" * 1000 + " ..."
    assert peer_text("a\tb\x00") == "a\\tb\\x00"
    assert describe(ValueError("one\ntwo")) == "ValueError: one two"
    assert describe(MemoryError()) == "MemoryError"


@pytest.mark.parametrize(("theirs", "age"), [(VERSION - 1, "an older"), (VERSION + 1, "a newer")])
def test_another_version_is_named_with_the_remedy(theirs: int, age: str) -> None:
    (frame,) = cut_message(Message(Kind.HELLO, body=json_body({})), 0, 0)
    data = bytearray(pack_frame(frame))
    data[2] = theirs
    with pytest.raises(VersionError) as other:
        unpack_frame(bytes(data))
    sentence = str(other.value)
    assert f"version {theirs} of the protocol, and this side version 3: the peer has {age} pipar than" in sentence
    assert "this side, which has pipar 0.1.0" in sentence
    assert "pip install pipar==0.1.0" in sentence
    assert isinstance(other.value, ProtocolError)

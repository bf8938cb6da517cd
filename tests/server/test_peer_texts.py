"""A peer's text in messages and log lines is short and printable, whatever the peer sends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from support.server_world import World, by_hand, hello, honest, scripted, train, until

from pipar.device.interfaces import Equipment
from pipar.device.program import Device, _fault
from pipar.errors import ProtocolError, VersionError, describe, peer_text
from pipar.events import Lost, Refused, ignore
from pipar.execution.clock import run_virtually
from pipar.execution.spans import UPLINK, Recorder
from pipar.launch.sizes_only import SizesOnlySamples
from pipar.monitoring.event_text import EventDescriber
from pipar.server.session import fault
from pipar.transport.channel import Channel
from pipar.transport.in_memory import memory_pair
from pipar.wire.frames import VERSION, Frame, cut_message, pack_frame, unpack_frame
from pipar.wire.messages import Kind, Message, json_body, read_json

LONG = "\x1b[2J" + "gone\n" * 1_200


def test_a_device_that_gives_up_with_a_long_reason_leaves_one_short_line() -> None:
    farewell = Message(Kind.FAULT, body=json_body({"reason": LONG}))
    outcome = train([honest("a"), by_hand(Kind.ROUND, farewell, leaves=True)], epochs=2)
    (lost,) = outcome.of(Lost)
    line = EventDescriber().sentence(lost)
    assert len(line) < 2100
    assert len(lost.reason) < 2100
    assert lost.reason.isprintable()
    assert lost.reason.startswith("it ended its session (\\x1b[2Jgone")


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
    assert (
        f"version {theirs} of the protocol, and this side version {VERSION}: the peer has {age} pipar than" in sentence
    )
    assert "this side, which has pipar 0.1.0" in sentence
    assert "pip install pipar==0.1.0" in sentence
    assert isinstance(other.value, ProtocolError)


@pytest.mark.parametrize(
    "message",
    [
        Message(Kind.HELLO, body=json_body({"name": "pi", "pipar": "0.9.1", "samples": 3})),
        replace(fault(VersionError("It is another.")), epoch=7),
    ],
)
def test_the_package_of_a_peer_with_another_version_is_named_if_it_says_so(message: Message) -> None:
    (frame,) = cut_message(message, 0, 0)
    data = bytearray(pack_frame(frame))
    data[2] = VERSION + 1
    said = "0.9.1" if message.kind is Kind.HELLO else "0.1.0"
    with pytest.raises(VersionError, match=rf"the peer has a newer pipar \({said}\) than this side") as other:
        unpack_frame(bytes(data))
    assert other.value.device == ("pi" if message.kind is Kind.HELLO else "")


@pytest.mark.parametrize("credential", [None, "pi-7"])
def test_a_device_with_another_version_is_reported_by_its_name(credential: str | None) -> None:
    class Older:
        async def read(self) -> Frame:
            raise VersionError("The peer uses version 1 of the protocol.", "pi-8")

        async def write(self, frame: Frame) -> None:
            pass

        async def close(self) -> None:
            pass

    async def knock(world: World) -> None:
        await world.server.admit(Older(), credential)

    outcome = train([("nobody", knock), honest("a")], devices=("a",))
    assert [(event.device, event.reason) for event in outcome.of(Refused)] == [
        (credential or "pi-8", "The peer uses version 1 of the protocol.")
    ]


@pytest.mark.parametrize("is_real", [True, False])
def test_a_device_of_a_deployment_tells_its_version(is_real: bool) -> None:
    said: list[dict[str, object]] = []

    async def main() -> None:
        near, far = memory_pair()
        channel = Channel(near, Recorder("pi"), UPLINK, is_real=is_real)
        equipment = Equipment(SizesOnlySamples(3), pytest.fail, pytest.fail)
        lanes: Any = None
        device = Device("pi", equipment, lanes, channel, Recorder("pi"), ignore)
        joining = asyncio.ensure_future(device.train())
        said.append(read_json((await far.read()).only()))
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)
        await channel.close()

    run_virtually(main())
    assert said[0].get("pipar") == ("0.1.0" if is_real else None)

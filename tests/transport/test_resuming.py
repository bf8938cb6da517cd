"""A channel over one link after another: every message arrives once and in order, whatever a link loses."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from support.cutting import CutLink, Loss

from pipar.errors import LinkError, ProtocolError
from pipar.execution.clock import run_virtually
from pipar.execution.spans import DOWNLINK, UPLINK, Recorder
from pipar.transport.channel import Channel
from pipar.transport.in_memory import MemoryTransport, memory_pair
from pipar.wire.frames import cut_message
from pipar.wire.messages import Body, Kind, Message, json_body

UP = (
    Message(Kind.ACTIVATION, 1, 1, 1, 1, 1, Body.of(b"one")),
    Message(Kind.MODEL, 1, body=Body.of(bytes(range(250)) * 10_000, encoding="safetensors")),  # three chunks
    Message(Kind.ACTIVATION, 1, 2, 1, 1, 1, Body.of(b"three")),
    Message(Kind.END_EPOCH, 1, body=json_body({"samples": 1})),
)
DOWN = (
    Message(Kind.GRADIENT, 1, 1, 1, 1, 1, Body.of(b"1")),
    Message(Kind.ROUND, 1),
    Message(Kind.MODEL, 1, body=Body.of(bytes(range(200)) * 7_500, encoding="safetensors")),  # two chunks
    Message(Kind.GRADIENT, 1, 2, 1, 1, 1, Body.of(b"4")),
)
FRAMES = 6 + 5  # of both directions


def content_of(message: Message) -> tuple[Message, bytes]:
    return replace(message, body=Body()), bytes(message.body.contiguous())


@dataclass
class Conversation:
    """What each side received from the other, over how many links, and what was kept at the end."""

    up: list[Message] = field(default_factory=list)
    down: list[Message] = field(default_factory=list)
    links: int = 0
    ended_at: float = 0.0
    left_running: int = 0


def converse(
    frames: Sequence[int], loss: Loss, *, rate_bps: float | None = None, latency_s: float = 0.0, pauses_s: float = 0.0
) -> Conversation:
    """Send all of UP and DOWN over links that are lost after these numbers of frames; the last one stays."""
    said = Conversation()

    async def main() -> None:
        lost: asyncio.Queue[LinkError] = asyncio.Queue()
        near, far = memory_pair()
        left = iter(frames)
        device = Channel(CutLink(near, next(left, None), loss), Recorder("pi"), UPLINK, on_lost=lost.put_nowait)
        server = Channel(far, Recorder("server"), DOWNLINK, on_lost=lambda _: None)
        for channel in (device, server):
            channel.shape(rate_bps, latency_s)
            channel.session = 1

        async def reconnect() -> None:
            while True:
                await lost.get()
                await asyncio.sleep(1.0)
                near, far = memory_pair()
                said.links += 1
                # As the greetings do: each side says which messages it has received.
                server.attach(far, device.received)
                device.attach(CutLink(near, next(left, None), loss), server.received)

        async def say(channel: Channel, messages: Sequence[Message]) -> None:
            for message in messages:
                channel.post(message)
                await asyncio.sleep(pauses_s)

        async def hear(channel: Channel, heard: list[Message]) -> None:
            while True:
                heard.append(await channel.receive())
                if (len(said.up), len(said.down)) == (len(UP), len(DOWN)):
                    over.set()

        over = asyncio.Event()
        beside = [asyncio.create_task(one) for one in (reconnect(), hear(server, said.up), hear(device, said.down))]
        async with asyncio.timeout(1e6):
            await asyncio.gather(say(device, UP), say(server, DOWN), over.wait())
        said.ended_at = asyncio.get_running_loop().time()
        await asyncio.sleep(10.0)  # does anything arrive twice?
        for task in beside:
            task.cancel()
        await asyncio.gather(device.close(), server.close(), *beside, return_exceptions=True)
        said.left_running = len(asyncio.all_tasks()) - 1

    run_virtually(main())
    return said


WAYS = {
    "at once": {},
    "slowly": {"rate_bps": 8e6, "latency_s": 0.05},
    "in turn": {"rate_bps": 80e6, "latency_s": 0.2, "pauses_s": 0.3},
}


@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("way", WAYS)
def test_every_message_arrives_once_and_in_order_wherever_a_link_is_lost(way: str, loss: Loss) -> None:
    for frames in range(1, FRAMES + 1):
        said = converse([frames], loss, **WAYS[way])
        assert list(map(content_of, said.up)) == list(map(content_of, UP)), frames
        assert list(map(content_of, said.down)) == list(map(content_of, DOWN)), frames
        assert said.links == 1 or frames == FRAMES
        assert said.left_running == 0


@pytest.mark.parametrize("loss", Loss)
def test_links_may_be_lost_repeatedly(loss: Loss) -> None:
    for first in range(1, FRAMES):
        said = converse([first, *range(1, 9), 3, 8, 2, 9, 1], loss, **WAYS["slowly"])
        assert list(map(content_of, said.up)) == list(map(content_of, UP))
        assert list(map(content_of, said.down)) == list(map(content_of, DOWN))
        assert said.links >= 2
        assert said.left_running == 0


def test_a_message_is_sent_again_at_the_links_rate_and_with_its_latency() -> None:
    undisturbed = converse([], Loss.CLEAN, rate_bps=8e6, latency_s=0.5)
    assert undisturbed.ended_at == pytest.approx((2_500_000 + 6 * 49 + 8 + 14) * 8 / 8e6 + 0.5, abs=1e-4)
    # The third frame arrives at 0.5 s, in the middle of the model's first chunk. A second later all of it is sent
    # again.
    late = converse([3], Loss.FRAMES, rate_bps=8e6, latency_s=0.5)
    assert late.ended_at == pytest.approx(undisturbed.ended_at + 0.5 + 1.0, abs=1e-3)


# --- kept messages


def two_channels() -> tuple[Channel, Channel, MemoryTransport, MemoryTransport]:
    near, far = memory_pair()
    device = Channel(near, Recorder("pi"), UPLINK, on_lost=lambda _: None)
    return device, Channel(far, Recorder("server"), DOWNLINK, on_lost=lambda _: None), near, far


def test_acknowledged_messages_are_not_kept() -> None:
    async def main() -> int:
        device, server, _, _ = two_channels()
        sent, most = [], 0
        for number in range(1, 51):
            body = Body.of(bytearray(1000))
            sent.append(weakref.ref(body.buffers[0]))
            device.post(Message(Kind.ACTIVATION, 1, number, 1, 1, 1, body))
            del body
            await server.receive()
            server.post(Message(Kind.GRADIENT, 1, number, 1))
            await device.receive()
            gc.collect(0)
            most = max(most, sum(one() is not None for one in sent))
        await asyncio.gather(device.close(), server.close())
        return most

    assert run_virtually(main()) <= 2  # the latest, and the one that a loop variable still holds


def test_unacknowledged_messages_are_kept_over_any_number_of_lost_links() -> None:
    async def main() -> list[int]:
        device, server, near, _ = two_channels()
        for number in range(1, 6):
            device.post(Message(Kind.ACTIVATION, 1, number, 1, 1, 1))
        for _ in range(3):
            await asyncio.sleep(1.0)
            await near.close()
            near, far = memory_pair()
            device.attach(near, 0)
        server.attach(far, 0)
        received = [(await server.receive()).iteration for _ in range(5)]
        await asyncio.gather(device.close(), server.close())
        return received

    # The server has read nothing yet, and messages that waited in the first link are ignored.
    assert run_virtually(main()) == [1, 2, 3, 4, 5]


# --- breaches


@pytest.mark.parametrize(
    ("kind", "sequence", "acknowledged", "reason"),
    [
        (Kind.ROUND, 1, 3, "acknowledges message 3, but only 2 messages were sent"),
        (Kind.ROUND, 2, 0, "has number 2, but 1 comes next"),
        (Kind.ROUND, 0, 0, "has number 0; only messages that open or end"),
        (Kind.FAULT, 1, 0, "has number 1; only messages that open or end"),
    ],
    ids=["acknowledges too much", "skips a number", "no number", "a number too many"],
)
def test_a_peer_that_miscounts_breaks_the_protocol(kind: Kind, sequence: int, acknowledged: int, reason: str) -> None:
    async def main() -> None:
        device, server, _, far = two_channels()
        for _ in range(2):
            device.post(Message(Kind.ACTIVATION, 1))
        await device.drain()
        (frame,) = cut_message(Message(kind, 1), 1, sequence, acknowledged)
        await far.write(frame)
        with pytest.raises(ProtocolError, match=reason):
            await device.receive()
        await asyncio.gather(device.close(), server.close())

    run_virtually(main())


def test_a_link_to_a_peer_that_has_more_than_was_sent_is_not_attached() -> None:
    async def main() -> bool:
        device, server, near, _ = two_channels()
        await near.close()
        with pytest.raises(TimeoutError):  # it waits for another link
            async with asyncio.timeout(1.0):
                await device.receive()
        other, _ = memory_pair()
        with pytest.raises(ProtocolError, match="only 0 messages were sent"):
            device.attach(other, 1)
        is_attached = device.is_attached
        await asyncio.gather(device.close(), server.close())
        return is_attached

    assert run_virtually(main()) is False


# --- links that are replaced


def test_late_frames_of_a_former_link_are_ignored() -> None:
    async def main() -> list[int]:
        device, server, _, far = two_channels()
        near, newer = memory_pair()
        receiving = asyncio.create_task(device.receive())
        await asyncio.sleep(0.1)
        device.attach(near, 0)
        (old,) = cut_message(Message(Kind.ROUND, 99), 1, 1)
        await far.write(old)
        server.attach(newer, 0)
        server.post(Message(Kind.ROUND, 1))
        server.post(Message(Kind.ROUND, 2))
        received = [(await receiving).epoch, (await device.receive()).epoch]
        await asyncio.gather(device.close(), server.close())
        return received

    assert run_virtually(main()) == [1, 2]


def test_a_link_that_is_replaced_while_a_frame_is_paced_does_not_hold_up_the_greeting() -> None:
    async def main() -> tuple[float, list[Kind]]:
        device, server, _, _ = two_channels()
        server.shape(8_000.0, 0.0)  # a chunk takes 1000 s
        server.post(Message(Kind.MODEL, 1, body=Body(1_000_000)))
        await asyncio.sleep(5.0)
        near, far = memory_pair()
        device.attach(near, 0)
        server.attach(far, 0, greeting=Message(Kind.WELCOME))
        kinds = [(await device.receive()).kind]
        greeted_at = asyncio.get_running_loop().time()
        kinds.append((await device.receive()).kind)
        await asyncio.gather(device.close(), server.close())
        return greeted_at, kinds

    greeted_at, kinds = run_virtually(main())
    assert greeted_at == pytest.approx(5.0 + 49 * 8 / 8_000)
    assert kinds == [Kind.WELCOME, Kind.MODEL]


class Stuck:
    """A link whose peer neither reads nor sends anything, as after a cable is pulled."""

    def __init__(self) -> None:
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def write(self, _: object) -> None:
        await asyncio.Event().wait()

    async def read(self) -> None:  # type: ignore[override]
        await asyncio.shield(self._ended)
        raise LinkError("closed")

    async def close(self) -> None:
        self._ended.set_result(None)


@pytest.mark.parametrize("latency_s", [0.0, 0.5])
def test_a_link_that_takes_nothing_is_given_up_when_another_one_comes(latency_s: float) -> None:
    async def main() -> list[Kind]:
        server = Channel(Stuck(), Recorder("server"), DOWNLINK, on_lost=lambda _: None)  # type: ignore[arg-type]
        server.shape(None, latency_s)
        receiving = asyncio.create_task(server.receive())
        server.post(Message(Kind.ROUND, 1))
        await asyncio.sleep(10.0)
        near, far = memory_pair()
        device = Channel(near, Recorder("pi"), UPLINK)
        server.attach(far, 0)
        device.post(Message(Kind.ACTIVATION, 1))
        async with asyncio.timeout(5.0):
            kinds = [(await receiving).kind, (await device.receive()).kind]
            await asyncio.gather(device.close(), server.close())
        return kinds

    assert run_virtually(main()) == [Kind.ACTIVATION, Kind.ROUND]


def test_the_last_messages_are_delivered_before_a_link_counts_as_lost() -> None:
    async def main() -> tuple[Kind, float]:
        device, server, _, far = two_channels()
        server.shape(None, 2.0)
        server.post(Message(Kind.FAULT, body=json_body({"reason": "enough"})))
        await server.drain()
        server.fail(LinkError("dismissed"))
        await server.until_lost(far)
        over_at = asyncio.get_running_loop().time()
        kind = (await device.receive()).kind
        await asyncio.gather(device.close(), server.close())
        return kind, over_at

    assert run_virtually(main()) == (Kind.FAULT, 2.0)


def test_draining_ends_when_the_link_is_lost() -> None:
    async def main() -> int:
        device, server, near, _ = two_channels()
        device.shape(8.0, 0.0)
        device.post(Message(Kind.MODEL, 1, body=Body(1_000_000)))
        draining = asyncio.create_task(device.drain())
        receiving = asyncio.create_task(device.receive())
        await asyncio.sleep(1.0)
        await near.close()
        async with asyncio.timeout(1.0):
            await draining
        receiving.cancel()
        await asyncio.gather(device.close(), server.close(), receiving, return_exceptions=True)
        return len(asyncio.all_tasks()) - 1

    assert run_virtually(main()) == 0

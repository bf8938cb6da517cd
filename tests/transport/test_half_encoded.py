"""Messages that are lost while they are still being encoded arrive whole, each chunk once, wherever they were cut."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
import torch
from support.cutting import CutLink, Loss

from pipar.errors import LinkError
from pipar.execution.clock import run_virtually
from pipar.execution.spans import DOWNLINK, UPLINK, Recorder
from pipar.server.at_once import Turn
from pipar.server.device_messages import Introduction
from pipar.server.serving import GradientReply
from pipar.server.session import Allowance, Session
from pipar.tensors.bodies import read_tensor, tensor_body
from pipar.transport.channel import Channel
from pipar.transport.in_memory import MemoryTransport, memory_pair
from pipar.wire.frames import Frame
from pipar.wire.messages import Body, Chunks, Kind, Message, Payload
from tests.support.labels import label_bytes, read_labels

CHUNKS = 5
#: Seconds to encode a chunk; on the link it takes half of that, or twice as much.
ENCODING_S = 0.1
TENSOR = torch.randn((CHUNKS, 50_000), generator=torch.Generator().manual_seed(1)).relu()  # a sample is a chunk
LABELS = torch.arange(CHUNKS)


def coded(encoding: str = "sparse-planes") -> tuple[Message, list[int]]:
    """Return a message whose first chunk is encoded, and a list that receives the number of each encoded chunk."""
    body, asked = tensor_body(TENSOR, label_bytes(LABELS), encoding=encoding), [0]
    chunks = body.chunks
    assert chunks is not None
    assert chunks.count == CHUNKS
    encode = chunks._encode
    assert encode is not None

    def counted(number: int) -> Payload:
        asked.append(number)
        return encode(number)

    chunks._encode = counted
    return Message(Kind.ACTIVATION, 1, 1, 1, CHUNKS, CHUNKS, body), asked


class Tap:
    """A transport that remembers which chunks of numbered messages it carried."""

    def __init__(self, link: CutLink | MemoryTransport) -> None:
        self._link = link
        self.sent: list[tuple[int, int]] = []

    async def write(self, frame: Frame) -> None:
        self.sent.append((frame.sequence, frame.chunk))
        await self._link.write(frame)

    async def read(self) -> Frame:
        return await self._link.read()

    async def close(self) -> None:
        await self._link.close()


@dataclass
class Arrived:
    """The outcome of a message and of the one after it, over several links."""

    messages: list[Message] = field(default_factory=list)
    encoded: list[int] = field(default_factory=list)
    taps: list[Tap] = field(default_factory=list)
    left_running: int = 0


def send(cuts: list[int], loss: Loss, *, rate_bps: float, away_s: float) -> Arrived:
    """Send a message while it is encoded, and one after it, over links that are lost after these numbers of frames."""
    out = Arrived()

    async def main() -> None:
        lost: asyncio.Queue[LinkError] = asyncio.Queue()
        left = iter(cuts)

        def tapped(near: MemoryTransport) -> Tap:
            out.taps.append(Tap(CutLink(near, next(left, None), loss)))
            return out.taps[-1]

        near, far = memory_pair()
        device = Channel(tapped(near), Recorder("pi"), UPLINK, on_lost=lost.put_nowait)
        server = Channel(far, Recorder("server"), DOWNLINK, on_lost=lambda _: None)
        device.shape(rate_bps, 0.0)

        async def reconnect() -> None:
            while True:
                await lost.get()
                await asyncio.sleep(away_s)
                near, far = memory_pair()
                server.attach(far, device.received)
                device.attach(tapped(near), server.received)

        async def hear() -> None:
            while len(out.messages) < 2:
                out.messages.append(await server.receive())

        async def encode(chunks: Chunks) -> None:
            for _ in range(CHUNKS - 1):
                await asyncio.sleep(ENCODING_S)
                device.add_chunk(chunks, chunks.encode_next())

        message, out.encoded = coded()
        assert message.body.chunks is not None
        receiving = asyncio.create_task(device.receive())
        beside = [asyncio.create_task(reconnect()), receiving]
        device.post(message)
        device.post(Message(Kind.END_EPOCH, 1))
        async with asyncio.timeout(100.0):
            await asyncio.gather(encode(message.body.chunks), hear())
        await asyncio.sleep(10.0)
        for task in beside:
            task.cancel()
        await asyncio.gather(device.close(), server.close(), *beside, return_exceptions=True)
        out.left_running = len(asyncio.all_tasks()) - 1

    run_virtually(main())
    return out


def came_whole(arrived: Arrived) -> None:
    first, second = arrived.messages
    assert torch.equal(read_tensor(first, "sparse-planes"), TENSOR)
    assert torch.equal(read_labels(first, CHUNKS), LABELS)
    assert second.kind is Kind.END_EPOCH
    assert arrived.encoded == list(range(CHUNKS))
    assert arrived.left_running == 0


@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("rate_bps", [20e6, 5e6])
@pytest.mark.parametrize("away_s", [0.0, 0.25, 3.0])
def test_a_message_cut_after_any_chunk_arrives_whole_over_the_next_link(
    loss: Loss, rate_bps: float, away_s: float
) -> None:
    for cut in range(1, CHUNKS + 1):
        arrived = send([cut], loss, rate_bps=rate_bps, away_s=away_s)
        came_whole(arrived)
        assert arrived.taps[0].sent == [(1, chunk) for chunk in range(CHUNKS)][:cut]
        wanted = [(1, chunk) for chunk in range(CHUNKS)] + [(2, 0)]
        got_all_of_it = cut == CHUNKS and loss is Loss.CLEAN
        assert arrived.taps[1].sent == (wanted[-1:] if got_all_of_it else wanted), cut


@pytest.mark.parametrize("loss", [Loss.FRAMES, Loss.SILENT])
def test_a_message_may_be_cut_repeatedly(loss: Loss) -> None:
    arrived = send([1, 2, 3, 1, 4, 5], loss, rate_bps=20e6, away_s=0.03)
    came_whole(arrived)
    assert len(arrived.taps) == 7
    assert [tap.sent[0] for tap in arrived.taps] == [(1, 0)] * 7  # from its beginning each time


def test_a_message_that_is_encoded_without_a_link_arrives_over_the_next_one() -> None:
    arrived = send([1], Loss.SILENT, rate_bps=20e6, away_s=50.0)
    came_whole(arrived)
    assert arrived.taps[1].sent == [(1, chunk) for chunk in range(CHUNKS)] + [(2, 0)]


# --- rounds that are abandoned between two chunks


@pytest.mark.parametrize("chunks_before", range(1, CHUNKS))
def test_a_device_that_abandons_a_round_between_two_chunks_gets_both_in_order(chunks_before: int) -> None:
    """The rest of a message that has begun is sent even if it is not needed: later messages wait for it."""

    async def main() -> list[Kind]:
        near, far = memory_pair()
        device = Channel(near, Recorder("pi"), UPLINK)
        server = Channel(far, Recorder("server"), DOWNLINK)
        session = Session(Introduction("pi", 5), 1, server, Recorder("pi"))
        session.allow(Allowance(micro_batches=1))
        activation, _ = coded()
        session.take(activation)
        answer = GradientReply(session, activation, Turn())
        ended = answer.chunk_sender(1)
        body = tensor_body(TENSOR, encoding="planes")
        ended(0, body)
        before: Body | Payload = body
        heard: list[Message] = []

        async def hear() -> None:
            while len(heard) < 3:
                heard.append(await device.receive())

        hearing = asyncio.create_task(hear())
        for chunk in range(1, CHUNKS):
            await asyncio.sleep(ENCODING_S)
            if chunk == chunks_before:
                session.abandon(1)
                assert session.round.outstanding == 0
                server.post(Message(Kind.ROUND, 2))
            before = answer.encode_next(before)
            ended(chunk, before)
        async with asyncio.timeout(10.0):
            await hearing
        assert session.round.outstanding == 0
        assert torch.equal(read_tensor(heard[0], "planes"), TENSOR)
        await asyncio.gather(device.close(), server.close())
        return [message.kind for message in heard]

    assert run_virtually(main()) == [Kind.GRADIENT, Kind.ABANDON, Kind.ROUND]


def test_no_answer_to_an_abandoned_round_is_started() -> None:
    """Micro-batches that were outstanding when the round was abandoned are not counted as answered again."""

    async def main() -> tuple[int, list[Kind]]:
        near, far = memory_pair()
        device = Channel(near, Recorder("pi"), UPLINK)
        server = Channel(far, Recorder("server"), DOWNLINK)
        session = Session(Introduction("pi", 5), 1, server, Recorder("pi"))
        session.allow(Allowance(micro_batches=1))
        activation, _ = coded()
        session.take(activation)
        answer = GradientReply(session, activation, Turn())
        session.abandon(1)
        ended, body = answer.chunk_sender(1), tensor_body(TENSOR, encoding="planes")
        ended(0, body)
        payload: Body | Payload = body
        for chunk in range(1, CHUNKS):
            payload = answer.encode_next(payload)
            ended(chunk, payload)
        await server.drain()
        kinds = []
        while not kinds or kinds[-1] is not Kind.ABANDON:
            kinds.append((await device.receive()).kind)
        await asyncio.gather(device.close(), server.close())
        return session.round.outstanding, kinds

    outstanding, kinds = run_virtually(main())
    assert outstanding == 0
    assert kinds == [Kind.ABANDON]

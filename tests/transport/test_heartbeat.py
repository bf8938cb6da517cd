"""Signs of life: a device shows them as its server asks, and gives up a connection on which nothing arrives."""

from __future__ import annotations

import asyncio

from pipar.errors import LinkError
from pipar.execution.clock import VirtualTimeLoop, run_virtually
from pipar.execution.spans import DOWNLINK, UPLINK, Recorder
from pipar.transport.channel import Channel
from pipar.transport.heartbeat import Heartbeat
from pipar.transport.in_memory import memory_pair
from pipar.wire.messages import Body, Kind, Message

TOLD = {"alive_every_s": 1.0, "silent_after_s": 5.0}


class Pair:
    """Both ends of a connection; the server's end answers, unless it is deaf."""

    def __init__(self, *, answers: bool = True) -> None:
        near, far = memory_pair()
        self.lost: list[LinkError] = []
        self.device = Channel(near, Recorder("a"), UPLINK, on_lost=self.lost.append)
        self.server = Channel(far, Recorder("a"), DOWNLINK, on_lost=lambda _: None)
        self.server.answers_alive = answers
        self.heartbeat = Heartbeat(self.device)
        self._reading = [asyncio.ensure_future(self.device.receive()), asyncio.ensure_future(self.server.receive())]

    async def close(self) -> None:
        await self.heartbeat.end()
        for task in self._reading:
            task.cancel()
        await asyncio.gather(self.device.close(), self.server.close(), *self._reading, return_exceptions=True)


def test_a_device_shows_signs_of_life_when_it_has_nothing_else_to_send() -> None:
    async def main() -> None:
        pair = Pair()
        await asyncio.sleep(100.0)
        assert not pair.server.silence.peer_shows_life, "not before it is asked"
        pair.heartbeat.follow(TOLD)
        await asyncio.sleep(60.0)
        assert pair.server.silence.peer_shows_life
        assert 1.0 <= pair.server.silence.take_longest_s() <= 1.5
        assert pair.lost == [], "the server has answered"
        await pair.close()

    run_virtually(main())


def test_signs_of_life_belong_to_no_epoch_and_are_not_kept() -> None:
    async def main() -> None:
        pair = Pair()
        pair.heartbeat.follow(TOLD)
        await asyncio.sleep(1000.0)
        for channel in (pair.device, pair.server):
            assert channel.unacknowledged == 0
            assert channel.counts.sent == channel.counts.received == {}
        await pair.close()

    run_virtually(main())


def test_a_device_gives_up_a_connection_on_which_nothing_arrives() -> None:
    async def main() -> None:
        pair = Pair(answers=False)
        pair.heartbeat.follow(TOLD)
        await asyncio.sleep(20.0)
        assert [str(error) for error in pair.lost] == ["Nothing arrived from the server for 5.5 s."]
        await pair.close()

    run_virtually(main())


def test_a_process_that_was_asleep_does_not_blame_its_peer() -> None:
    async def main() -> None:
        pair = Pair()
        pair.heartbeat.follow(TOLD)
        await asyncio.sleep(10.0)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.leap(30.0)
        await asyncio.sleep(10.0)
        assert pair.lost == []
        await pair.close()

    run_virtually(main())


def test_what_is_not_a_range_of_times_is_ignored() -> None:
    async def main() -> None:
        pair = Pair()
        for told in (
            {},
            {"alive_every_s": 1e-9, "silent_after_s": 5.0},
            {"alive_every_s": "often"},
            {**TOLD, "silent_after_s": 0},
        ):
            pair.heartbeat.follow(told)
        await asyncio.sleep(100.0)
        assert not pair.server.silence.peer_shows_life
        await pair.close()

    run_virtually(main())


def test_no_sign_of_life_waits_behind_a_message_that_is_being_sent() -> None:
    async def main() -> None:
        pair = Pair()
        pair.device.shape(8000.0, 0.0)
        pair.heartbeat.follow(TOLD)
        await asyncio.sleep(1.0)
        pair.device.post(Message(Kind.MODEL, 1, body=Body(30_000, encoding="safetensors")))  # 30 s
        await asyncio.sleep(25.0)
        assert not pair.device._outbox.has_unnumbered
        await pair.close()

    run_virtually(main())

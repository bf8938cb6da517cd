"""A device that has nothing to send stays connected, although gRPC by default disconnects peers that often ping."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpc._cython import cygrpc
from support.over_grpc import train_over_grpc
from support.roaming import same
from support.training import Case
from support.waiting import PATIENCE_S

import pipar
from pipar.errors import LinkError, PiparError
from pipar.events import Away, Event, Lost, Refused, RoundOver
from pipar.settings.config import Config
from pipar.transport.grpc_connect import connect
from pipar.transport.grpc_listener import Listener
from pipar.transport.interface import Transport
from pipar.transport.limits import Keepalive, Limits
from pipar.wire.frames import cut_message
from pipar.wire.messages import Kind, Message

REPOSITORY = Path(__file__).parents[2]
#: gRPC's default: the third ping within five minutes of silence is one too many.
GRPC_DEFAULT_S = 300.0
PINGS = Keepalive(every_s=0.3, timeout_s=PATIENCE_S)


def channel_arguments(source: Path) -> set[str]:
    """The string literals in a file that are names of gRPC's channel arguments."""
    constants = (node.value for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Constant))
    return {text for text in constants if isinstance(text, str) and re.fullmatch(r"grpc\.[a-z0-9_.]+", text)}


@pytest.mark.slow
def test_grpc_has_every_channel_argument_that_is_set() -> None:
    """gRPC ignores an argument that it does not know, so that a misspelt one goes unnoticed."""
    library = Path(cygrpc.__file__).read_bytes()
    sources = [
        *Path(pipar.__file__).parent.rglob("*.py"),
        *(path for name in ("tests", "simulation", "benchmarks") for path in (REPOSITORY / name).rglob("*.py")),
    ]
    named = {argument for source in sources for argument in channel_arguments(source)}
    assert "grpc.keepalive_time_ms" in named, "the search finds the arguments of the transport"
    assert {argument for argument in named if argument.encode() + b"\0" not in library} == set()


@contextlib.asynccontextmanager
async def idle_device(limits: Limits, server: Keepalive, device: Keepalive) -> AsyncIterator[asyncio.Task[PiparError]]:
    """A device that sends one frame and is then silent; the task ends when its connection does."""
    released = asyncio.Event()

    async def accept(transport: Transport, _: str | None) -> None:
        await transport.read()
        await released.wait()

    async def wait_for_its_end(transport: Transport) -> PiparError:
        with pytest.raises(LinkError) as lost:
            await transport.read()
        return lost.value

    listener = Listener(accept, limits=limits, keepalive=server)
    transport = await connect(f"127.0.0.1:{await listener.start('127.0.0.1:0')}", keepalive=device)
    (hello,) = cut_message(Message(Kind.STOP), 0, 1)
    await transport.write(hello)
    waiting = asyncio.create_task(wait_for_its_end(transport))
    try:
        yield waiting
    finally:
        released.set()
        await transport.close()
        await asyncio.wait([waiting])
        await listener.stop()


@pytest.mark.slow
@pytest.mark.parametrize("server", [PINGS, Keepalive()], ids=["same keepalive", "server pings less often"])
def test_an_idle_device_outlasts_the_pings_after_which_grpc_by_default_disconnects(server: Keepalive) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        ours = Limits(ping_s=PINGS.every_s / 2)
        async with (
            idle_device(ours, server, PINGS) as honest,
            idle_device(Limits(ping_s=GRPC_DEFAULT_S), server, PINGS) as control,
        ):
            began = loop.time()
            await control  # as long as gRPC's defaults allow, on a machine of any speed
            await asyncio.sleep(2 * (loop.time() - began))
            assert not honest.done()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


@pytest.mark.slow
def test_devices_that_are_idle_for_many_pings_train_the_same_weights_and_none_is_lost() -> None:
    case = Case("pipar", sizes=(20, 20), even=True)
    first, last = case.workload().names
    seen: list[Event] = []
    often = Keepalive(every_s=0.5, timeout_s=PATIENCE_S)  # gRPC by default disconnects at the third ping
    idle = asyncio.run(train_over_grpc(case, observe=seen.append, late_s={last: 4.0}, keepalive=often))
    prompt = asyncio.run(train_over_grpc(case))
    assert same(idle.state, prompt.state)
    assert [type(event) for event in seen if isinstance(event, Away | Lost | Refused)] == []
    assert [sorted(event.counted) for event in seen if isinstance(event, RoundOver)] == [[first, last]] * 2


def test_a_server_tolerates_the_shortest_keepalive_that_a_device_can_configure() -> None:
    shortest = Config.model_validate({"server": {"keepalive": "1s"}}).server.keepalive
    with pytest.raises(ValueError, match="at most every 1 s"):
        Config.model_validate({"server": {"keepalive": "0.9s"}})
    assert Limits().ping_s <= shortest / 2

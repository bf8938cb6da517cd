"""The measured rate of a link that the kernel shapes is its real rate, through gRPC's and TCP's buffers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress

import pytest
from support.waiting import PATIENCE_S, until

from pipar.execution.spans import DOWNLINK, UPLINK, Recorder
from pipar.transport.channel import Channel
from pipar.transport.grpc_connect import connect
from pipar.transport.grpc_listener import Listener
from pipar.transport.interface import Transport
from pipar.transport.rate_estimate import estimate_traffic, read_frame_times
from pipar.wire.messages import Body, Kind, Message, json_body, read_json

RATE_BPS = 8e6
#: A process that is never later than this gives its frames good enough times: a frame takes 140 ms or more.
PUNCTUAL_S = 0.05


async def measured(frames: int, size_bytes: int, bursts: int) -> list[float | None]:
    """Send bursts up, each answered by as many frames down; return the rates of both directions, in bit/s."""
    rates: asyncio.Future[list[float | None]] = asyncio.get_running_loop().create_future()

    def tensor(kind: Kind, number: int, n: int) -> Message:
        return Message(kind, 1, number, n, body=Body.of(bytes(size_bytes)))

    async def serve(transport: Transport, _: str | None) -> None:
        channel = Channel(transport, Recorder("server"), DOWNLINK, is_real=True)
        while (message := await channel.receive()).kind is Kind.ACTIVATION:
            if message.micro_batch == frames:  # both directions share the loopback
                for n in range(1, frames + 1):
                    channel.post(tensor(Kind.GRADIENT, message.iteration, n))
        ready, came = (read_frame_times(read_json(message)[key]) for key in ("ready", "came"))
        assert ready is not None
        assert came is not None
        up, down = (
            estimate_traffic(ready, channel.received_frames.times),
            estimate_traffic(channel.sent_frames.times, came),
        )
        rates.set_result([up.rate_bps if up.is_enough else None, down.rate_bps if down.is_enough else None])
        await channel.close()

    listener = Listener(serve)
    port = await listener.start("127.0.0.1:0")
    channel = Channel(await connect(f"127.0.0.1:{port}"), Recorder("pi"), UPLINK, is_real=True)
    for number in range(1, bursts + 1):
        for n in range(1, frames + 1):
            channel.post(tensor(Kind.ACTIVATION, number, n))
        for _ in range(frames):
            await channel.receive()
    channel.post(Message(Kind.END_EPOCH, 1, body=json_body(channel.frame_times())))
    found = await rates
    await channel.close()
    await listener.stop()
    return found


def _run(*words: str) -> str:
    around = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # for this module, which is also a program
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=PATIENCE_S, env=around).stdout


@pytest.fixture(scope="module")
def shaped() -> Iterator[str]:
    """Yield a network namespace whose loopback carries 8 Mbit/s in total."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("a shaped loopback needs root, ip and tc")
    namespace = f"pipar-{uuid.uuid4().hex[:8]}"
    try:
        _run("ip", "netns", "add", namespace)
        _run("ip", "-n", namespace, "link", "set", "lo", "mtu", "1500", "up")
        shaping = ("tbf", "rate", f"{RATE_BPS:.0f}bit", "burst", "16kb", "latency", "400ms")
        _run("tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", *shaping)
        yield namespace
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"network namespaces do not work here: {error}")
    finally:
        with suppress(subprocess.SubprocessError, OSError):
            _run("ip", "netns", "delete", namespace)


@pytest.mark.slow
@pytest.mark.parametrize(("frames", "size_bytes", "bursts"), [(6, 140_000, 1), (6, 330_000, 1)])
def test_bursts_show_the_rate_of_a_shaped_link(shaped: str, frames: int, size_bytes: int, bursts: int) -> None:
    words = [str(word) for word in (sys.executable, __file__, frames, size_bytes, bursts)]

    def punctual() -> list[float | None] | None:
        rates, late_s = json.loads(_run("ip", "netns", "exec", shaped, *words))
        return rates if late_s < PUNCTUAL_S else None

    # Only measurements that the machine's load has disturbed are repeated: the first rates of a punctual process count.
    up_bps, down_bps = until(punctual, "a process that is not held up")
    # Headers of TCP and IP take 4 %; acknowledgements of one side use the same link.
    assert up_bps == pytest.approx(RATE_BPS, rel=0.2)
    assert down_bps == pytest.approx(RATE_BPS, rel=0.2)


async def measured_with_lateness(frames: int, size_bytes: int, bursts: int) -> tuple[list[float | None], float]:
    """Return the rates of both directions, and the longest delay of this process in seconds."""
    late_s = 0.0

    async def watch() -> None:
        nonlocal late_s
        while True:
            due = asyncio.get_running_loop().time() + 0.005
            await asyncio.sleep(0.005)
            late_s = max(late_s, asyncio.get_running_loop().time() - due)

    watching = asyncio.create_task(watch())
    rates = await measured(frames, size_bytes, bursts)
    watching.cancel()
    return rates, late_s


if __name__ == "__main__":
    # Frames get their times when this process runs: at high priority, or the rate would depend on the machine's load.
    os.nice(-20)
    print(json.dumps(asyncio.run(measured_with_lateness(*map(int, sys.argv[1:])))))

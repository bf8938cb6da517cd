"""Does a link of 10 Mbit/s have this rate? pipar's shaping, measured by independent clocks and counters.

A process independent of pipar reads the kernel's byte counter of a separate loopback. The same bytes are also sent by a
plain socket over a pair of virtual network cards that the kernel itself limits (tc tbf).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from benchmarks.record import Claim

_BYTES = 20_000_000
_RATES_MBIT = (10, 25)

_OURS = """
import asyncio, sys, time
from pipar.transport.channel import Channel
from pipar.transport.grpc_listener import Listener, connect
from pipar.wire.messages import Body, Kind, Message
from pipar.execution.spans import Recorder
rate, size = float(sys.argv[1]) * 1e6, int(sys.argv[2])

async def main():
    arrived = asyncio.get_running_loop().create_future()
    async def accept(transport, peer):
        channel = Channel(transport, Recorder("server"), "downlink")
        await channel.receive()
        arrived.set_result(time.perf_counter())
        await channel.close()
    listener = Listener(accept)
    port = await listener.start("127.0.0.1:0")
    channel = Channel(await connect(f"127.0.0.1:{port}"), Recorder("device"), "uplink")
    channel.shape(rate, 0.0)
    start = time.perf_counter()
    channel.post(Message(Kind.MODEL, body=Body.of(bytes(size))))
    end = await arrived
    await channel.close()
    await listener.stop()
    print(end - start)

asyncio.run(main())
"""
_SAMPLER = """
import json, time
while True:
    loopback = next(line for line in open("/proc/net/dev") if line.strip().startswith("lo:"))
    print(json.dumps((time.perf_counter(), int(loopback.split()[9]))), flush=True)
    time.sleep(0.02)
"""


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    claims, details = [], {}
    for rate in _RATES_MBIT:
        seconds, counted_rate = _ours_in_a_namespace(rate, folder)
        claims.append(Claim(f"kernel-counted rate / {rate} Mbit/s", counted_rate / rate, "", least=0.97, most=1.03))
        with _limited_cable(rate) as (sender, receiver):
            by_kernel = _plain_transfer(sender, receiver)
        ratio = seconds / by_kernel
        claims.append(
            Claim(f"seconds of {_BYTES} bytes, ours / tc tbf at {rate} Mbit/s", ratio, "", least=0.95, most=1.05)
        )
        details[f"{rate}Mbit/s"] = {"ours_s": seconds, "tbf_s": by_kernel, "ideal_s": _BYTES * 8 / rate / 1e6}
    return claims, details


def _ours_in_a_namespace(rate: int, folder: Path) -> tuple[float, float]:
    """Return the seconds of pipar's transfer, and its rate by the kernel's counter in Mbit/s."""
    log = folder / "samples.jsonl"
    script = 'ip link set lo up; "$1" -c "$2" > "$3" & sampler=$!; "$1" -c "$4" "$5" "$6"; kill $sampler'
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", script, "sh", sys.executable, _SAMPLER, str(log), _OURS, str(rate), str(_BYTES)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    samples = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("]")]
    return float(done.stdout), _rate_mbit(samples)


def _rate_mbit(samples: list[tuple[float, int]]) -> float:
    """Return the slope of the counter between 20 % and 80 % of the bytes, without start, end and handshake."""
    last = samples[-1][1]
    middle = [(t, n) for t, n in samples if 0.2 * last <= n <= 0.8 * last]
    # The counter increases by whole chunks, so measure from one increase to another.
    steps = [middle[0]] + [b for a, b in pairwise(middle) if b[1] != a[1]]
    (t0, n0), (t1, n1) = steps[1], steps[-1]
    return (n1 - n0) * 8 / (t1 - t0) / 1e6


@contextmanager
def _limited_cable(rate: int) -> Iterator[tuple[str, str]]:
    """Provide two network namespaces with a cable between them that the kernel limits to `rate` Mbit/s."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise RuntimeError("this measurement needs iproute2 (ip and tc) and root.")
    tag = uuid.uuid4().hex[:6]
    names = (f"pipar-{tag}-a", f"pipar-{tag}-b")
    commands = [
        *(f"ip netns add {name}" for name in names),
        f"ip link add v{tag}a netns {names[0]} type veth peer name v{tag}b netns {names[1]}",
        f"ip -n {names[0]} addr add 192.0.2.1/24 dev v{tag}a",
        f"ip -n {names[1]} addr add 192.0.2.2/24 dev v{tag}b",
        # Large packets: tc counts headers, which are 4 % of small packets; pipar does not count them.
        f"ip -n {names[0]} link set v{tag}a mtu 9000 up",
        f"ip -n {names[1]} link set v{tag}b mtu 9000 up",
        f"tc -n {names[0]} qdisc add dev v{tag}a root tbf rate {rate}mbit burst 32kb latency 400ms",
    ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, timeout=20)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=20)


_RECEIVE = """
import socket, sys, time
with socket.create_server(("192.0.2.2", 5000)) as server:
    print("ready", flush=True)
    peer, _ = server.accept()
    left = int(sys.argv[1])
    while left > 0:
        left -= len(peer.recv(1 << 16))
    peer.sendall(b"!")
"""
_SEND = """
import socket, sys, time
with socket.create_connection(("192.0.2.2", 5000)) as peer:
    start = time.perf_counter()
    peer.sendall(bytes(int(sys.argv[1])))
    peer.recv(1)
    print(time.perf_counter() - start)
"""


def _plain_transfer(sender: str, receiver: str) -> float:
    """Return the seconds of sending the same bytes by a plain socket between two namespaces."""
    command = ["ip", "netns", "exec"]
    listening = subprocess.Popen(
        [*command, receiver, sys.executable, "-c", _RECEIVE, str(_BYTES)], stdout=subprocess.PIPE, text=True
    )
    assert listening.stdout is not None
    listening.stdout.readline()
    sending = [*command, sender, sys.executable, "-c", _SEND, str(_BYTES)]
    done = subprocess.run(sending, capture_output=True, text=True, check=True, timeout=120)
    listening.wait(20)
    return float(done.stdout)

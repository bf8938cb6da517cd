"""Garbage for a live server: damaged frames over real streams, from peers with and without credentials, in training.

`PIPAR_FUZZ_FRAMES=100000 pytest tests/launch/test_live_fuzz.py` sends as many as that; without it there are 5,000.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import stat
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support.credentials import certs
from support.deployments import check_nothing_is_left, training
from support.garbage import changes_bodies, coded_body, damaged, good_frames
from support.programs import Place, Program, address_of, place
from support.waiting import PATIENCE_S

from pipar.config_file import config_from
from pipar.job.profiles import measured_profile
from pipar.job.workload import Workload
from pipar.transport.credentials import add_token
from pipar.units import split_address
from pipar.wire.frames import cut_message, pack_frame, unpack_frame
from pipar.wire.messages import Body, Kind, Message, json_body, read_json

FRAMES = int(os.environ.get("PIPAR_FUZZ_FRAMES", "5000"))  # on streams that the server has taken
LAST_EPOCHS = 10  # are trained when all garbage is sent
EPOCHS = LAST_EPOCHS + FRAMES // 100
STEPS = max(10, FRAMES // 500)
ROUND_WITHIN_S = 1.0
BURST = 8  # frames on one stream, at most; the server ends most streams at one of the first
AT_ONCE = 8  # peers
#: Allowed growth in the second half: of memory in use, and of the allocator's, which fragments.
MOST_LIVE_BYTES, MOST_RSS_BYTES = 1 << 20, 8 << 20
ROUND_BYTES = 10_000  # that a server keeps of a round, without any garbage
ROGUES = tuple(f"rogue-{number}" for number in range(1, 31))  # a single peer may connect five times per second
CLIENTS = (*ROGUES, None, "guessed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(max(3600, FRAMES // 10))]


def fuzzed_training() -> dict[str, Any]:
    tree = training(epochs=EPOCHS, trace="off")
    tree["plan"]["replan"] = False
    tree["model"]["factory"] = "support.gated:rectified"
    tree["wire"] = {"encoding": "sparse-planes"}
    # The server waits for an admitted device whose link is lost: only briefly here.
    tree["server"]["resume_window"] = "100ms"
    tree["devices"] = [{"name": "pi-1"}]
    tree["data"]["samples_per_device"] = 40
    return tree


@pytest.fixture
def here(tmp_path: Path, profiles: Path) -> Iterator[Place]:
    with place(tmp_path, profiles, fuzzed_training()) as made:
        certs("init", "--folder", str(tmp_path / "certs"))
        yield made


class _NoRoundError(Exception):
    """Slow the honest device down."""


class Garbler:
    """One peer that sends garbage: immediately, after a valid hello, or in the middle of a round."""

    def __init__(self, name: str | None, token: str | None, address: str, ca: bytes, profile: dict[str, Any]) -> None:
        self.sent = 0
        self.was_welcome = 0
        self._name = name
        self._metadata = [] if token is None else [("authorization", f"Bearer {token}")]
        self._address = address
        self._credentials = grpc.ssl_channel_credentials(ca)
        about = {"name": name or "nobody", "samples": 20, "profile": profile}
        self._hello = [pack_frame(one) for one in cut_message(Message(Kind.HELLO, body=json_body(about)), 0, 0)]
        self._chance = random.Random(f"{name}")
        self._known = good_frames()

    async def garble(self) -> None:
        """Send a few frames over a separate connection, if the server accepts it."""
        # A server that ends streams unread may leave a connection without free streams: each peer has its own.
        alone = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(self._address, self._credentials, options=alone) as channel:
            call: Any = channel.stream_stream("/pipar.Link/Connect")(metadata=self._metadata)
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError, _NoRoundError):
                async with asyncio.timeout(PATIENCE_S):  # the server answers every peer and does not hang
                    if ("pipar", "welcome") in tuple(await call.initial_metadata() or ()):
                        await self._send(call)

    async def _send(self, call: Any) -> None:
        approach, known = self._chance.random(), self._known
        if approach < 0.6:
            for frame in self._hello:
                await call.write(frame)
        if approach < 0.2 and self._name is not None:
            known = await self._until_the_round(call)
        for _ in range(self._chance.randint(1, BURST)):
            await call.write(damaged(self._chance, known))
            self.sent += 1
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass

    async def _until_the_round(self, call: Any) -> list[bytes]:
        """Return frames that fit into the round that this peer is to train."""
        session = 0
        try:
            async with asyncio.timeout(ROUND_WITHIN_S):
                while (data := await call.read()) is not grpc.aio.EOF:
                    frame = unpack_frame(data)
                    if frame.message.kind is Kind.WELCOME:
                        session = read_json(frame.only())["session"]
                    if frame.message.kind is Kind.ROUND:
                        self.was_welcome += 1
                        return frames_of_a_round(session, frame.message.epoch)
        except TimeoutError:
            raise _NoRoundError from None
        return self._known


def frames_of_a_round(session: int, epoch: int) -> list[bytes]:
    """Return the messages of a device in a round, with a wrong model that must never count."""
    values, labels = np.maximum(0.0, np.sin(np.arange(320.0))).reshape(5, 4, 4, 4), struct.pack("<5i", *range(5))
    raw = Body.of(values.tobytes(), labels, dtype="float64", shape=values.shape)
    piece = coded_body(values, "sparse-planes", labels)
    end = json_body({"samples": 20, "loss_sum": None, "up_bytes": 1, "up_s": 0.1})
    messages = [
        Message(Kind.ACTIVATION, epoch, 1, 1, 5, 10, piece), Message(Kind.ACTIVATION, epoch, 1, 2, 5, 10, piece),
        Message(Kind.ACTIVATION, epoch, 1, 1, 5, 10, raw),
        *(Message(Kind.MODEL, epoch, body=body) for body in changes_bodies()),
        Message(Kind.END_EPOCH, epoch, body=end), Message(Kind.MODEL, epoch, body=Body.of(bytes(80))),
        Message(Kind.TRACE, epoch, body=Body.of(b"{}", encoding="trace")), Message(Kind.STATE, epoch),
        Message(Kind.FAULT, body=json_body({"reason": "none"})), Message(Kind.HELLO, body=json_body({"name": "pi-1"})),
    ]  # fmt: skip
    return [
        pack_frame(frame)
        for number, message in enumerate(messages, start=1)
        for sequence in {number, 1}
        for frame in cut_message(message, session, sequence)
    ]


@dataclass(frozen=True)
class Size:
    """The memory of a program: in use, and allocated from the system."""

    live_bytes: int
    rss_bytes: int


def least(sizes: list[Size]) -> Size:
    return Size(min(size.live_bytes for size in sizes), min(size.rss_bytes for size in sizes))


@dataclass(frozen=True)
class Sent:
    """What was sent to a server, and its memory after each step."""

    frames: int
    rounds: int  # that a peer got into
    sizes: list[Size]

    @property
    def grown(self) -> Size:
        """Growth of the server in the second half, after each kind of peer has connected: between minima of three.

        Sometimes a megabyte is still on its way to a peer that is gone, so the minimum is taken.
        """
        before, after = least(self.sizes[STEPS // 2 - 2 : STEPS // 2 + 1]), least(self.sizes[-3:])
        return Size(after.live_bytes - before.live_bytes, after.rss_bytes - before.rss_bytes)


async def send_garbage(here: Place, server: Program, address: str, tokens: dict[str, str]) -> Sent:
    """Send all frames from many peers, a few of them at a time."""
    workload = Workload(config_from(fuzzed_training()))
    profile = json.loads(measured_profile(workload, workload.checked_model()).to_json())
    ca = (here.folder / "certs" / "ca.pem").read_bytes()
    garblers = [Garbler(name, tokens.get(name or "", name), address, ca, profile) for name in CLIENTS]
    waiting, sizes, files = deque(garblers), [], server.open_files()

    def sent() -> int:
        return sum(one.sent for one in garblers)

    async def garble(until: int) -> None:
        while sent() < until:
            garbler = waiting.popleft()
            await garbler.garble()
            waiting.append(garbler)

    pacing = asyncio.create_task(keep_pace(here, sent))
    for step in range(1, STEPS + 1):
        await asyncio.gather(*(garble(FRAMES * step // STEPS) for _ in range(AT_ONCE)))
        assert server.poll() is None, server.text()
        hang_up(address)
        await are_gone(server, files)
        sizes.append(Size(server.live_bytes(), server.rss_bytes()))
    pacing.cancel()
    return Sent(sent(), sum(one.was_welcome for one in garblers), sizes)


def hang_up(address: str) -> None:
    """Close this process's connections: gRPC and the server keep one whose stream ended while it was writing."""
    _, port = split_address(address)
    for file in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # it is no socket, or closed by now
            if stat.S_ISSOCK(os.fstat(file).st_mode):
                with socket.socket(fileno=os.dup(file)) as one:
                    if one.family is not socket.AF_UNIX and one.getpeername()[1] == port:
                        one.shutdown(socket.SHUT_RDWR)


async def are_gone(server: Program, files: int) -> None:
    """Wait until a server has no more open files, including connections, than before."""
    async with asyncio.timeout(PATIENCE_S):
        while server.open_files() > files:
            await asyncio.sleep(0.02)


async def keep_pace(here: Place, sent: Callable[[], int]) -> None:
    """Hold the honest device back, so that the training lasts as long as garbage is sent."""
    gate, rounds = here.folder / "pi-1.hold", here.run_folder / "rounds.jsonl"
    while True:
        if rounds.read_bytes().count(b"\n") > sent() * (EPOCHS - LAST_EPOCHS) // FRAMES:
            gate.touch()
        else:
            gate.unlink(missing_ok=True)
        await asyncio.sleep(0.02)


def train(here: Place, *, garbage: bool) -> str:
    """Train with one honest device and return the hash of the weights."""
    tokens = {name: add_token(here.folder / "certs" / "tokens.json", name, force=True) for name in ("pi-1", *ROGUES)}
    token = here.folder / "pi-1.token"
    token.write_text(tokens["pi-1"])
    token.chmod(0o600)
    server = here.server("--certs", "certs", "--tokens")
    address = address_of(server)
    device = here.device("pi-1", address, "--certs", "certs", "--token-file", "pi-1.token")
    if garbage:
        device.says("finished its part of round 1")
        sent = asyncio.run(send_garbage(here, server, address, tokens))
        print(sent, sent.grown)  # shown by -s, and where the test fails
        assert sent.frames >= FRAMES
        assert sent.rounds > 0
        assert sent.grown.live_bytes < MOST_LIVE_BYTES + ROUND_BYTES * EPOCHS // 2, sent
        assert sent.grown.rss_bytes < MOST_RSS_BYTES, sent
        assert len(here.rounds()) < EPOCHS
        here.let_go("pi-1")
    assert (server.ends(), device.ends()) == (0, 0)
    assert "Traceback" not in server.text()
    assert [entry["counted"] for entry in here.rounds()] == [{"pi-1": 40}] * EPOCHS
    check_nothing_is_left(here)
    weights: str = here.result()["weights_sha256"]
    return weights


def test_garbage_neither_stops_a_training_nor_changes_a_bit_of_it(
    here: Place, profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(profiles))
    undisturbed = train(here, garbage=False)
    here.run_folder.rename(here.folder / "undisturbed")
    assert train(here, garbage=True) == undisturbed

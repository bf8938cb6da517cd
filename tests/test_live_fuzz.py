"""Garbage for a live server: damaged frames over real streams, by peers with credentials and without, as it trains.

`PIPAR_FUZZ_FRAMES=100000 pytest tests/test_live_fuzz.py` sends as many as that; without it there are 20,000.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from credentials import certs
from garbage import damaged, good_frames
from programs import Place, Program, address_of, place
from test_deployment import check_nothing_is_left, training

from pipar.config import config_from
from pipar.link.register import add_token
from pipar.prepare import measured_profile
from pipar.protocol.messages import Body, Kind, Message, json_body, read_json
from pipar.protocol.wire import cut_message, pack_frame, unpack_frame
from pipar.workload import Workload

FRAMES = int(os.environ.get("PIPAR_FUZZ_FRAMES", "20000"))
EPOCHS, LAST_EPOCHS = 60, 10  # the last ones are trained when all garbage is sent
STEPS = 10
ROUND_WITHIN_S = 3.0
BURST = 25  # frames on one stream, at most; the server ends most streams at the first of them
MOST_GROWTH_BYTES = 64 << 20  # of a server whose buffers for one peer are 4 MB; a leak of 1 KB a frame would be 20 MB
CLIENTS = ("rogue-1", "rogue-2", "rogue-3", None, "guessed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(max(600, FRAMES // 50))]


def fuzzed_training() -> dict[str, Any]:
    tree = training(epochs=EPOCHS, trace="off")
    tree["plan"]["replan"] = False
    # Who has a credential and is let in is waited for when its link is lost: not for long here.
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
    """The honest device takes its time."""


class Garbler:
    """One peer that sends garbage: at once, behind a proper hello, or in the middle of a round that it is part of."""

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

    async def send(self, frames: int) -> None:
        """Send so many frames, over as many connections as that takes."""
        until = self.sent + frames
        while self.sent < until:
            # A server that ends streams unread may leave a connection with none to give: each has its own.
            alone = [("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.aio.secure_channel(self._address, self._credentials, options=alone)
            call: Any = channel.stream_stream("/pipar.Link/Connect")(metadata=self._metadata)
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError, _NoRoundError):
                async with asyncio.timeout(60):  # the server neither hangs nor leaves anybody without an answer
                    await self._garble(call, min(BURST, until - self.sent))
            await channel.close()

    async def _garble(self, call: Any, frames: int) -> None:
        approach, known = self._chance.random(), self._known
        if approach < 0.6:
            for frame in self._hello:
                await call.write(frame)
        if approach < 0.2 and self._name is not None:
            known = await self._until_the_round(call)
        for _ in range(frames):
            self.sent += 1
            await call.write(damaged(self._chance, known))
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass

    async def _until_the_round(self, call: Any) -> list[bytes]:
        """Return frames that fit into the round that this peer is told to train."""
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
    """Return what a device says in a round, with a wrong model: it must never count."""
    activations = struct.pack("<320d", *range(320)), struct.pack("<5i", *range(5))
    piece = Body.of(*activations, dtype="float64", shape=(5, 4, 4, 4))
    end = json_body({"samples": 20, "loss_sum": None, "up_bytes": 1, "up_s": 0.1})
    messages = [
        Message(Kind.ACTIVATION, epoch, 1, 1, 5, 10, piece), Message(Kind.ACTIVATION, epoch, 1, 2, 5, 10, piece),
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


async def send_garbage(here: Place, server: Program, address: str, tokens: dict[str, str]) -> tuple[int, int, int]:
    """Send all frames; return how many, how often a peer got into a round, and what the server's memory grew by."""
    workload = Workload(config_from(fuzzed_training()))
    profile = json.loads(measured_profile(workload, workload.checked_model()).to_json())
    ca = (here.folder / "certs" / "ca.pem").read_bytes()
    garblers = [Garbler(name, tokens.get(name or "", name), address, ca, profile) for name in CLIENTS]
    before, pace = 0, Pace(here)
    pacing = asyncio.create_task(pace.keep())
    for step in range(1, STEPS + 1):
        pace.allowed = (EPOCHS - LAST_EPOCHS) * step // STEPS
        await asyncio.gather(*(garbler.send(-(-FRAMES // (STEPS * len(garblers)))) for garbler in garblers))
        assert server.poll() is None, server.text()
        before = before or server.rss_bytes()
    pacing.cancel()
    return sum(one.sent for one in garblers), sum(one.was_welcome for one in garblers), server.rss_bytes() - before


class Pace:
    """Holds the honest device back, so that the training is not over before the garbage is."""

    def __init__(self, here: Place) -> None:
        self.allowed = 1
        self._here = here

    async def keep(self) -> None:
        gate = self._here.folder / "pi-1.hold"
        while True:
            if len(self._here.rounds()) >= self.allowed:
                gate.touch()
            else:
                gate.unlink(missing_ok=True)
            await asyncio.sleep(0.02)


def train(here: Place, *, garbage: bool) -> str:
    """Train with one honest device and return the hash of the weights."""
    tokens = {
        name: add_token(here.folder / "certs" / "tokens.json", name, force=True) for name in ("pi-1", *CLIENTS[:3])
    }
    token = here.folder / "pi-1.token"
    token.write_text(tokens["pi-1"])
    token.chmod(0o600)
    server = here.server("--certs", "certs", "--tokens")
    address = address_of(server)
    device = here.device("pi-1", address, "--certs", "certs", "--token-file", "pi-1.token")
    if garbage:
        device.says("has trained its part of round 1")
        sent, was_welcome, grown_bytes = asyncio.run(send_garbage(here, server, address, tokens))
        assert sent >= FRAMES
        assert was_welcome > 0
        assert grown_bytes < MOST_GROWTH_BYTES
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

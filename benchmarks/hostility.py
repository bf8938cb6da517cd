"""A real server under attack while two honest devices train: by damaged frames, then by hostile conversations.

All connections use mutual TLS, and the attackers have certificates of the server's authority. `python -m benchmarks
hostility` sends 100,000 frames and has 10,000 conversations. The honest devices have to end with the weights of a
training without attackers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import stat
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import tomli_w
from torch import nn

from benchmarks.hostile_conversations import Line, Peer, RefusedError, Target, activation, converse, hello
from benchmarks.hostile_frames import damaged, good_frames
from benchmarks.record import Claim
from pipar.job.profiles import measured_profile
from pipar.job.workload import Workload
from pipar.settings.config_file import load_config
from pipar.units import split_address
from pipar.wire.frames import cut_message, pack_frame
from pipar.wire.messages import Kind, Message

FRAMES, CONVERSATIONS = 100_000, 10_000
HONEST = ("honest-1", "honest-2")
#: A single credential may connect five times per second.
ROGUES = tuple(f"rogue-{number:02}" for number in range(1, 61))
_MOST_ROUNDS = 1_000_000  # the training is stopped when the attack is over
_AT_ONCE = 24
_BURST = 8  # frames on one stream, at most; the server ends most streams at one of the first
_STEPS = 10  # of each part of the attack; after each, the server is measured without any attacker
_PATIENCE_S = 120.0


def network() -> nn.Sequential:
    """Return a tiny network of two layers for images of 4 x 4."""
    first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
    return nn.Sequential(first, nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))


def training(rounds: int = _MOST_ROUNDS) -> dict[str, Any]:
    """Return a training of two honest devices."""
    return {
        "run": {"name": "hostility", "epochs": rounds, "batch_size": 10, "trace": "off"},
        "model": {"factory": "benchmarks.hostility:network", "dtype": "float64"},
        "data": {
            "name": "synthetic", "shape": [1, 4, 4], "classes": 10, "samples_per_device": [40, 30],
            "validation": 0, "test": 0,
        },
        "plan": {"split_point": 1, "micro_batches": 2, "replan": False},
        "optimizer": {"clip_norm": 1e6},  # too large to clip anything, but both sides send norms
        "wire": {"encoding": "sparse-planes"},
        # The server waits for an attacker that has joined and is gone: only briefly here. Attackers and honest devices
        # share this machine's cores, so nothing but the end of a connection may exclude a device.
        "server": {
            "cores": 1, "min_devices": 2, "resume_window": "100ms", "round_deadline": "off", "keepalive": "30s",
        },
        "devices": [{"name": name} for name in HONEST],
    }  # fmt: skip


def measure(
    folder: Path, frames: int = FRAMES, conversations: int = CONVERSATIONS
) -> tuple[list[Claim], dict[str, object]]:
    place = _Place(folder)
    attack = Attack(place.victim, frames, conversations)
    attacked = place.train(_MOST_ROUNDS, attack)
    undisturbed = place.train(attacked.rounds)
    return _claims(attack, undisturbed, attacked), attack.details(attacked)


def _claims(attack: Attack, undisturbed: Outcome, attacked: Outcome) -> list[Claim]:
    files = [size.open_files for size in attack.sizes]
    rss = [size.rss_bytes / 2**20 for size in attack.sizes]
    return [
        Claim("damaged frames sent", attack.sent, "", least=attack.frames),
        Claim("hostile conversations", attack.held, "", least=attack.conversations),
        Claim("rounds finished during the attack", attack.rounds_meanwhile, "", least=10),
        Claim("rounds in which an attacker counted", attacked.rounds_with_others, "", most=0),
        Claim(
            "same weights as without attackers (1: yes)",
            float(undisturbed.weights == attacked.weights),
            "",
            least=1,
        ),
        Claim("exit codes of server and honest devices, summed", sum(map(abs, attacked.codes)), "", most=0),
        Claim("tracebacks in the server's log", attacked.tracebacks, "", most=0),
        Claim(
            "growth of the server's memory in the last half of the frames",
            _growth(rss[: len(rss) // 2]),
            "MiB",
            most=16,
        ),
        Claim(
            "growth of the server's memory in the last half of the conversations",
            _growth(rss[len(rss) // 2 :]),
            "MiB",
            most=16,
        ),
        Claim("largest memory of the server", max([*rss, attack.peak.rss_bytes / 2**20]), "MiB", most=1000.0),
        Claim("most open files of the server", attack.peak.open_files, "", most=1000),
        Claim("open files after the attack, beyond those before it", files[-1] - files[0], "", most=5),
    ]


def _growth(sizes: list[float]) -> float:
    """Return the growth from the middle to the end, between minima of three: the allocator's fragments come and go.

    Records of rounds account for some of it.
    """
    middle = len(sizes) // 2
    return min(sizes[-3:]) - min(sizes[middle - 1 : middle + 2])


@dataclass(frozen=True)
class Size:
    """The memory and the open files of a process."""

    rss_bytes: int
    open_files: int

    @classmethod
    def of(cls, pid: int) -> Size:
        status = Path(f"/proc/{pid}/status").read_text()
        rss = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
        return cls(rss, len(list(Path(f"/proc/{pid}/fd").iterdir())))


@dataclass(frozen=True)
class Outcome:
    """What is left of a training."""

    weights: str
    codes: tuple[int, ...]
    rounds: int
    rounds_with_others: int
    tracebacks: int
    events: dict[str, int]
    seconds: float


@dataclass(frozen=True)
class Victim:
    """What an attack has to know of a training."""

    config: Path
    certs: Path  # with certificates of the rogues
    round_log: Path
    rogues: tuple[str, ...] = ROGUES

    def rounds_done(self) -> int:
        return self.round_log.read_bytes().count(b"\n") if self.round_log.exists() else 0


class _Place:
    """A folder with the credentials and the configuration of a training; its programs run there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "runs" / "hostility"
        self.victim = Victim(folder / "train.toml", folder / "certs", self.run / "rounds.jsonl")
        self._environment = os.environ | {"PIPAR_RUNS": str(folder / "runs"), "XDG_CACHE_HOME": str(folder / "cache")}
        certs = ["--folder", str(self.victim.certs)]
        for words in (["init", *certs], ["issue", *HONEST, *ROGUES, *certs]):
            subprocess.run(
                [sys.executable, "-m", "pipar", "certs", *words], check=True, stdout=subprocess.DEVNULL, timeout=300
            )

    def train(self, rounds: int, attack: Attack | None = None) -> Outcome:
        """Train these rounds with the honest devices alone, or as many as there are during an attack."""
        self.victim.config.write_text(tomli_w.dumps(training(rounds)))
        began, log = time.monotonic(), self.folder / f"server-{'alone' if attack is None else 'attacked'}.log"
        with self._started("server", "--listen", "127.0.0.1:0", "--log-format", "json", log=log) as server:
            address = self._address(server, log)
            with self._device(HONEST[0], address) as one, self._device(HONEST[1], address) as other:
                if attack is not None:
                    asyncio.run(attack.run(server.pid, address))
                    for program in (server, one, other):
                        program.terminate()
                codes = tuple(program.wait(_PATIENCE_S + rounds) for program in (server, one, other))
        outcome = self._outcome(log, codes, time.monotonic() - began)
        self.run.rename(self.folder / log.stem)
        return outcome

    @contextmanager
    def _device(self, name: str, address: str) -> Iterator[subprocess.Popen[str]]:
        with self._started("device", "--server", address, "--name", name, log=self.folder / f"{name}.log") as device:
            yield device

    @contextmanager
    def _started(self, command: str, *words: str, log: Path) -> Iterator[subprocess.Popen[str]]:
        arguments = [sys.executable, "-m", "pipar", command, str(self.victim.config), *words]
        with log.open("w") as output:
            process = subprocess.Popen(
                [*arguments, "--certs", str(self.victim.certs)],
                stdout=output, stderr=output, text=True, env=self._environment,
            )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def _address(self, server: subprocess.Popen[str], log: Path) -> str:
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline and server.poll() is None:
            for line in log.read_text().splitlines():
                if '"Listening"' in line:
                    return str(json.loads(line)["address"])
            time.sleep(0.05)
        raise RuntimeError(f"the server does not listen: {log.read_text()[-2000:]}")

    def _outcome(self, log: Path, codes: tuple[int, ...], seconds: float) -> Outcome:
        rounds = [json.loads(line) for line in (self.run / "rounds.jsonl").read_text().splitlines()]
        lines, text = log.read_text().splitlines(), log.read_text()
        events = Counter(json.loads(line).get("event", "none") for line in lines if line.startswith("{"))
        return Outcome(
            weights=json.loads((self.run / "result.json").read_text())["weights_sha256"],
            codes=codes,
            rounds=len(rounds),
            rounds_with_others=sum(set(entry["counted"]) != set(HONEST) for entry in rounds),
            tracebacks=text.count("Traceback") + events["Failed"],
            events=dict(events),
            seconds=round(seconds, 1),
        )


class Attack:
    """All frames and conversations, by many peers at a time."""

    def __init__(self, victim: Victim, frames: int, conversations: int, steps: int = _STEPS) -> None:
        self.frames, self.conversations = frames, conversations
        self.sent = self.held = self.rounds_meanwhile = 0
        self.sizes: list[Size] = []  # without any attacker: before, and after each step
        self.peak = Size(0, 0)
        self.kinds: Counter[str] = Counter()
        self._victim, self._steps = victim, steps
        self._good = good_frames()
        self._chance = random.Random(20)
        ca, devices = (victim.certs / "ca.pem").read_bytes(), victim.certs / "devices"
        self._peers = deque(Peer(name, self._credentials(devices / name, ca)) for name in victim.rogues)

    @staticmethod
    def _credentials(path: Path, ca: bytes) -> grpc.ChannelCredentials:
        key, certificate = (path.with_name(f"{path.name}.{end}").read_bytes() for end in ("key", "pem"))
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def details(self, attacked: Outcome) -> dict[str, object]:
        return {
            "conversations": dict(self.kinds),
            "events": attacked.events,
            "seconds": attacked.seconds,
            "rounds": attacked.rounds,
            "sizes": [asdict(size) for size in self.sizes],
            "peak": asdict(self.peak),
        }

    async def run(self, pid: int, address: str) -> None:
        workload = Workload(load_config(self._victim.config))
        profile = json.loads(measured_profile(workload, workload.checked_model()).to_json())
        target = Target(address, profile, HONEST)
        await self._until(lambda: self._victim.rounds_done() > 0)
        before = self._victim.rounds_done()
        watching = asyncio.ensure_future(self._watch(pid))
        self.sizes.append(Size.of(pid))
        try:
            for part, most in ((self._send_frames, self.frames), (self._converse, self.conversations)):
                for step in range(1, self._steps + 1):
                    goal, at_once = most * step // self._steps, min(_AT_ONCE, len(self._peers) // 2)
                    await asyncio.gather(*(self._work(part, goal, target) for _ in range(at_once)))
                    _hang_up(address)
                    await self._until(lambda: Size.of(pid).open_files <= self.sizes[0].open_files + 5)
                    self.sizes.append(Size.of(pid))
        finally:
            watching.cancel()
        self.rounds_meanwhile = self._victim.rounds_done() - before

    async def _work(self, part: Callable[[Peer, Target, int], Awaitable[bool]], goal: int, target: Target) -> None:
        """Attack until the goal is reached, with a credential that no other attacker uses at the moment."""
        wants_more = True
        while wants_more:
            peer = self._peers.popleft()
            try:
                async with asyncio.timeout(_PATIENCE_S):  # the server answers every peer and does not hang
                    wants_more = await part(peer, target, goal)
            finally:
                self._peers.append(peer)

    async def _send_frames(self, peer: Peer, target: Target, goal: int) -> bool:
        """Send some damaged frames: immediately, after a valid hello, or in the middle of a round."""
        if self.sent >= goal:
            return False
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError, RefusedError):
            async with peer.connected(target) as line:
                approach = self._chance.random()
                if approach < 0.6:
                    await line.say(hello(peer.name, target.profile))
                known = self._good
                if approach < 0.2 and await line.round_begins():
                    known = _frames_of_round(self._chance, line)
                for _ in range(self._chance.randint(1, _BURST)):
                    await line.write(damaged(self._chance, known))
                    self.sent += 1
        return True

    async def _converse(self, peer: Peer, target: Target, goal: int) -> bool:
        if self.held >= goal:
            return False
        kind = await converse(peer, target, random.Random(self._chance.random()))
        self.kinds[kind] += 1
        self.held += kind != "refused"
        return True

    async def _watch(self, pid: int) -> None:
        while True:
            with contextlib.suppress(OSError, StopIteration):
                size = Size.of(pid)
                self.peak = Size(max(self.peak.rss_bytes, size.rss_bytes), max(self.peak.open_files, size.open_files))
            await asyncio.sleep(0.2)

    @staticmethod
    async def _until(is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(_PATIENCE_S):
            while not is_so():
                await asyncio.sleep(0.05)


def _frames_of_round(chance: random.Random, line: Line) -> list[bytes]:
    """Return frames that fit into the round that a peer is to train."""
    messages = [activation(chance, line.epoch, 1, piece) for piece in (1, 2)]
    messages += [Message(kind, line.epoch) for kind in (Kind.END_EPOCH, Kind.MODEL, Kind.TRACE, Kind.STATE, Kind.FAULT)]
    return [
        pack_frame(frame)
        for number, message in enumerate(messages, start=1)
        for sequence in {number, 1}
        for frame in cut_message(message, line.session, sequence)
    ]


def _hang_up(address: str) -> None:
    """Close this process's connections: gRPC and the server keep one whose stream ended while it was writing."""
    _, port = split_address(address)
    for file in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # it is no socket, or closed by now
            if stat.S_ISSOCK(os.fstat(file).st_mode):
                with socket.socket(fileno=os.dup(file)) as one:
                    if one.family is not socket.AF_UNIX and one.getpeername()[1] == port:
                        one.shutdown(socket.SHUT_RDWR)

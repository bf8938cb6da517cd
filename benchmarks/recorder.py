"""The flight recorder: what it costs, how large its file is, and how exactly real trainings are replayed.

The cost: epochs of twenty devices with and without it, alternating, so that other load on the machine affects both.
Epochs differ by some percent in any case; the CPU time of the recorder's thread is exact, and the training cannot wait
longer for it than that.

The replays: three trainings in real processes whose times are mostly those of emulated links and slow devices. One is
undisturbed, in one the links change, and in one, a deployment over loopback, a device is killed in the second round.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks import dashboard
from benchmarks.many_devices import ServerLog
from benchmarks.record import Claim, pipar
from pipar.launch.replay import replay
from pipar.recording.flight import Flight
from pipar.recording.recorder import FILE

DEVICES, EPOCHS, PAIRS = 20, 8, 3
_RUN = [
    "run.epochs=6", "data.name=synthetic", "data.shape=[3, 32, 32]", "data.samples_per_device=400", "data.validation=0",
    "data.test=0", "devices.count=2", "devices.speed=0.1", "plan.split_point=1", "plan.micro_batches=4",
    "plan.replan=false", "wire.encoding=raw", "server.cores=1",
]  # fmt: skip
_LINKS = {
    "plain": '{up = "20Mbit/s", down = "20Mbit/s"}',
    "changing link": '{cycle = ["wifi", {up = "10Mbit/s", down = "20Mbit/s"}], every = "5s"}',
}


def measure(folder: Path, pairs: int = PAIRS) -> tuple[list[Claim], dict[str, object]]:
    claims, details = _cost(folder, pairs)
    for name, link in _LINKS.items():
        settings = [f"--set={setting}" for setting in [*_RUN, f"devices.link={link}", f"run.name={name.split()[0]}"]]
        result = pipar(["run", "--record", *settings], folder)
        claims += _replayed(name, Path(result["folder"]) / FILE, details)
    claims += _replayed("killed device", _killed(folder), details)
    return claims, details


# --- the cost


def _cost(folder: Path, pairs: int) -> tuple[list[Claim], dict[str, object]]:
    config = folder / "cost.toml"
    config.write_text(tomli_w.dumps(dashboard.tree(DEVICES, EPOCHS, 8)))
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    shares, sizes = [], []
    for turn in range(pairs):
        for way, words in (("without", []), ("with", ["--record"])):
            runs = folder / f"{way}-{turn}"
            took = _run(config, runs, words)
            seconds[way].append(statistics.mean(took[1:]))
            for file in runs.glob(f"*/{FILE}"):
                flight = Flight.read(file)
                assert flight.recorder_cpu_s is not None
                shares.append(flight.recorder_cpu_s / sum(took))
                sizes.append(file.stat().st_size / len(flight.rounds))
    ratio = statistics.median(one / other for one, other in zip(seconds["with"], seconds["without"], strict=True))
    claims = [
        Claim(f"epoch of {DEVICES} devices with --record / without, median of {pairs} pairs", ratio, "", most=1.01),
        Claim("CPU seconds of the recorder's thread / seconds", statistics.median(shares), "", most=0.01),
        Claim(f"100 rounds of {DEVICES} devices", 100 * statistics.median(sizes) / 1e6, "MB", most=1.0),
    ]
    return claims, {"seconds": seconds, "recorder's share of a core": shares, "bytes a round": sizes}


def _run(config: Path, runs: Path, words: list[str]) -> list[float]:
    """Return the seconds of each epoch of a deployment."""
    address = _free_address()
    with _Server(config, runs, address, words) as server:
        took, _ = asyncio.run(dashboard.train(config, server, "without", EPOCHS, address))
        server.wait(timeout=120)
    return took


def _free_address() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


class _Server(subprocess.Popen[str]):
    """A server that is ended at the end of the block."""

    def __init__(self, config: Path, runs: Path, address: str, words: list[str]) -> None:
        command = [sys.executable, "-m", "pipar", "server", str(config), "--listen", address, "--log-format", "json"]
        environment = os.environ | {"PIPAR_RUNS": str(runs)}
        super().__init__([*command, *words], stderr=subprocess.PIPE, text=True, env=environment)

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        if self.stderr is not None:
            self.stderr.close()


# --- replays


def _replayed(name: str, file: Path, details: dict[str, object]) -> list[Claim]:
    flight = Flight.read(file)
    again = replay(flight)
    pairs = [(one.seconds, again.results[one.number].seconds) for one in flight.rounds]
    details[f"recorded and replayed seconds, {name}"] = pairs
    details[f"bytes, {name}"] = file.stat().st_size
    worst = max(abs(replayed / recorded - 1) for recorded, replayed in pairs)
    return [Claim(f"largest difference of a replayed epoch of {len(pairs)}, {name}", 100 * worst, "%", most=3.0)]


def _killed(folder: Path) -> Path:
    """Return the recording of a deployment of three devices, one of which is killed in the second round."""
    config = folder / "killed.toml"
    config.write_text(tomli_w.dumps(_killed_tree()))
    devices: dict[str, subprocess.Popen[bytes]] = {}
    runs, address = folder / "killed", _free_address()
    try:
        with _Server(config, runs, address, ["--record"]) as server:
            asyncio.run(_train_and_kill(config, server, devices, address))
            server.wait(timeout=300)
    finally:
        for device in devices.values():
            device.kill()
            device.wait()
    return runs / "killed" / FILE


def _killed_tree() -> dict[str, Any]:
    link = {"up": "20Mbit/s", "down": "20Mbit/s"}
    return {
        "run": {"name": "killed", "epochs": 5, "batch_size": 100},
        "data": {"name": "synthetic", "shape": [3, 32, 32], "samples_per_device": 400, "validation": 0, "test": 0},
        "plan": {"split_point": 1, "micro_batches": 4, "replan": False},
        "wire": {"encoding": "raw"},
        "server": {"cores": 1, "min_devices": 2, "resume_window": 6.0},
        "devices": [{"name": "board", "count": 3, "link": link, "speed": 0.1}],
    }


async def _train_and_kill(config: Path, server: subprocess.Popen[str], devices: dict[str, Any], address: str) -> None:
    log = ServerLog(server)
    await log.until("Listening")
    for number in (1, 2, 3):
        words = ["device", str(config), "--server", address, "--name", f"board-{number}"]
        command = [sys.executable, "-m", "pipar", *words]
        devices[f"board-{number}"] = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    await log.until("RoundOver")
    time.sleep(1.5)
    devices["board-3"].send_signal(signal.SIGKILL)
    while (await log.until("RoundOver"))["epoch"] < 5:
        pass

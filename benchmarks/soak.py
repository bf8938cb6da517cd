"""Memory and open files over a long time: three simulated trainings of 1,000 rounds, and real processes for 20 minutes.

In the real soak a server trains with devices over loopback. Every 45 seconds a device is killed and started again, and
three times the server is, by turns with SIGKILL and SIGTERM. Memory is flat if the medians of the second and the last
quarter agree: the first quarter fills caches.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from torch import nn

from benchmarks.record import RESULTS, Claim
from benchmarks.resource_picture import picture
from simulation.campaign import try_seeds
from simulation.resources import Sample, growth, sample

#: A share of growth that noise of the allocator explains.
_FLAT = 1.10
_VIRTUAL_SEEDS, _VIRTUAL_ROUNDS = range(3), 1000
_DEVICES = 4
_SECONDS = float(os.environ.get("PIPAR_SOAK_SECONDS", "1200"))
_SAMPLE_EVERY_S, _KILL_EVERY_S = 2.0, 45.0
#: Shares of the time at which the server is started again.
_RESTARTS = (0.1, 0.2, 0.5)
_ADDRESS = "127.0.0.1:50392"
_TREE: dict[str, Any] = {
    "run": {"name": "soak", "epochs": 1_000_000, "batch_size": 10, "trace": "full"},
    "model": {"factory": "benchmarks.soak:network"},
    "data": {
        "name": "synthetic",
        "shape": [1, 8, 8],
        "classes": 10,
        "samples_per_device": 200,
        "validation": 20,
        "test": 0,
    },
    "plan": {"split_point": 2, "micro_batches": 2},
    "server": {"min_devices": 1, "resume_window": "2s", "cores": 1},
    "devices": [{"name": "board", "count": _DEVICES}],
}


def network() -> nn.Sequential:
    """Return a small network with batch normalisation after the cut."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.Sequential(nn.BatchNorm1d(64), nn.ReLU()), nn.Linear(64, 10)
    )


def _flat(what: str, samples: Sequence[Sample]) -> list[Claim]:
    factor, files = growth(list(samples))
    return [
        Claim(f"{what}: resident memory, last / second quarter", factor, "", most=_FLAT),
        Claim(f"{what}: more open files in the last than in the second quarter", files, "", most=2),
    ]


def _write_picture(name: str, title: str, unit: str, series: Mapping[str, Sequence[Sample]]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.svg").write_text(picture(title, unit, series), "utf-8")


# --- in virtual time


def measure_virtual(folder: Path, rounds: int = _VIRTUAL_ROUNDS) -> tuple[list[Claim], dict[str, object]]:  # noqa: ARG001
    """Simulate long trainings, each in its own process, and return what these used."""
    claims, series, details = [], dict[str, list[Sample]](), dict[str, object]()
    reports = try_seeds(_VIRTUAL_SEEDS, 5, rounds, len(_VIRTUAL_SEEDS))
    for report in sorted(reports, key=lambda report: report.seed):
        seed = report.seed
        samples = [Sample(*one) for one in report.samples]
        series[f"seed {seed}, {report.method}"] = samples
        claims += [
            Claim(f"seed {seed}: invariants violated in {rounds} rounds", float(not report.holds), "", most=0),
            *_flat(f"seed {seed}", samples),
        ]
        details[str(seed)] = {
            "faults": len(report.faults),
            "restarts": report.restarts,
            "virtual_s": report.seconds,
            "violation": report.sentence,
            "samples": report.samples,
        }
    _write_picture("virtual_soak", f"{rounds} simulated rounds with faults and attacks", "round", series)
    return claims, details


# --- real processes


class _Program:
    """A command that is started again whenever it is ended."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self._command = [sys.executable, "-m", "pipar", *words]
        self._environment = os.environ | {"PIPAR_RUNS": str(folder / "runs")}
        self._log = folder / f"{words[0]}-{words[-1]}.log"
        self.process = self._start()
        self.unexpected_ends = 0

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, env=self._environment, stderr=log, stdout=log)

    def restart(self, number: signal.Signals) -> None:
        """End it by a signal, and start it again."""
        self.process.send_signal(number)
        self.process.wait(60)
        self.process = self._start()

    def keep_alive(self) -> None:
        """Start it again if it has ended by itself, as systemd does, and count that."""
        if self.process.poll() is not None:
            self.unexpected_ends += 1
            self.process = self._start()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def says(self) -> str:
        return self._log.read_text("utf-8", errors="replace")[-2000:]


def measure(folder: Path, seconds: float = _SECONDS) -> tuple[list[Claim], dict[str, object]]:
    """Train with real processes that are killed now and then, and return what they used."""
    config = folder / "soak.toml"
    config.write_text(tomli_w.dumps(_TREE))
    words = ("server", str(config), "--listen", _ADDRESS, "--resume")
    server = _Program(words, folder)
    names = [f"board-{number}" for number in range(1, _DEVICES + 1)]
    devices = [_Program(("device", str(config), "--server", _ADDRESS, "--name", name), folder) for name in names]
    try:
        series, kills = _soak(server, devices, seconds)
        rounds = _rounds(folder)
    finally:
        for program in (server, *devices):
            program.end()
    ends = sum(program.unexpected_ends for program in (server, *devices))
    claims = [
        Claim(f"rounds trained in {seconds:g} s", rounds, "", least=seconds / 10),
        Claim("programs that ended by themselves", ends, "", most=0),
        *_flat("server", series["server"]),
        *_flat("device 1", series["device 1"]),
    ]
    _write_picture("soak", f"Real processes for {seconds / 60:.0f} minutes, with kills", "s", series)
    rows = {name: [(one.at, one.rss_bytes, one.open_files) for one in samples] for name, samples in series.items()}
    last = {} if not ends else {"logs": [program.says() for program in (server, *devices)]}
    return claims, {"kills": kills, "rounds": rounds, "samples": rows, **last}


def _soak(
    server: _Program, devices: Sequence[_Program], seconds: float
) -> tuple[dict[str, list[Sample]], dict[str, int]]:
    """Sample the server and the first device, which is never killed, and kill the others."""
    began, draws = time.monotonic(), random.Random(20)
    series: dict[str, list[Sample]] = {"server": [], "device 1": []}
    kills = {"device": 0, "server": 0}
    next_kill, restarts = _KILL_EVERY_S, [share * seconds for share in _RESTARTS]
    while (now := time.monotonic() - began) < seconds:
        time.sleep(_SAMPLE_EVERY_S)
        for program in (server, *devices):
            program.keep_alive()
        for name, program in (("server", server), ("device 1", devices[0])):
            series[name] += _samples(now, program.process.pid)
        if now > next_kill:
            draws.choice(devices[1:]).restart(signal.SIGKILL)
            next_kill, kills["device"] = next_kill + _KILL_EVERY_S, kills["device"] + 1
        if restarts and now > restarts[0]:
            server.restart((signal.SIGKILL, signal.SIGTERM)[kills["server"] % 2])
            del restarts[0]
            kills["server"] += 1
    return series, kills


def _samples(at: float, pid: int) -> Iterable[Sample]:
    try:
        return [sample(round(at, 1), pid)]
    except OSError:  # it has ended meanwhile
        return []


def _rounds(folder: Path) -> int:
    try:
        return len((folder / "runs" / "soak" / "rounds.jsonl").read_text("utf-8").splitlines())
    except OSError:
        return 0

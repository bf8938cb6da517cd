"""How large a testbed a laptop can simulate: virtual, timing-only, one epoch."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.record import Claim

_SETTINGS = [
    "run.epochs=1", "data.name=synthetic", "data.shape=[3, 32, 32]", "data.samples_per_device=500",
    "plan.split_point=1", "plan.micro_batches=8", "server.cores=8",
]  # fmt: skip


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    interpreter = _seconds([sys.executable, "-c", "pass"], folder)
    _seconds(_command(10), folder)  # profiles the network once, before timing
    programs = _seconds(_command(100, "--programs"), folder) - interpreter
    hundred = _seconds(_command(100), folder) - interpreter
    ten_thousand = _seconds(_command(10_000), folder) - interpreter
    hundred_thousand = _seconds(_command(100_000), folder) - interpreter
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    return [
        Claim("100 devices, one epoch of 5 iterations, timing-only", hundred, "s", most=5),
        Claim("100 devices, the same, by the programs", programs, "s"),
        Claim("10,000 devices, the same", ten_thousand, "s", most=10),
        Claim("100,000 devices, the same", hundred_thousand, "s", most=120),
        Claim("peak memory of 100,000 devices", peak, "GiB", most=4),
        Claim(
            "epoch of 100 devices / the same by the programs", _epochs_ratio(folder), "", least=1 - 1e-4, most=1 + 1e-4
        ),
    ], {"interpreter_s": interpreter}


def _epochs_ratio(folder: Path) -> float:
    """Return the seconds of a simulated epoch over those of the programs."""
    runs = (_run(_command(100, *more), folder) for more in ((), ("--programs",)))
    simulated, programs = (json.loads(document)["epochs"][0]["seconds"] for document in runs)
    return float(simulated / programs)


def _command(devices: int, *more: str) -> list[str]:
    settings = [f"--set={setting}" for setting in [*_SETTINGS, f"devices.count={devices}"]]
    return [sys.executable, "-m", "pipar", "run", "--timing-only", "--json", *more, *settings]


def _seconds(command: list[str], folder: Path) -> float:
    start = time.perf_counter()
    _run(command, folder)
    return time.perf_counter() - start


def _run(command: list[str], folder: Path) -> bytes:
    environment = os.environ | {"PIPAR_RUNS": str(folder)}
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, timeout=1200).stdout

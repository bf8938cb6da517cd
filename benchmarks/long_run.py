"""The memory of trainings of 5,000 rounds: one in virtual time with sizes instead of tensors, and a real deployment.

In virtual time nothing is trained, and server and devices are one process: whatever grows with the rounds, on either
side, is visible. The deployment trains a tiny network over loopback and keeps every span: spans have to go to disk, and
writing its results must not need them all in memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import tomli_w
from torch import nn

from benchmarks.record import Claim
from simulation.resources import Sample, growth, sample

ROUNDS = 5000
#: A share of growth that noise of the allocator explains: without models to allocate, and with them.
_FLAT, _FLAT_TRAINED = 1.01, 1.02
#: A result of thousands of epochs and its report take some memory when they are written.
_MOST_TO_WRITE_BYTES = 100 * 2**20
#: About as many samples are written.
_ROWS = 200
_RUN = [
    "run.name=long", "data.name=synthetic", "data.samples_per_device=100", "devices.count=3", "devices.link=wifi",
    "devices.profile=raspberry-pi-3b", "server.profile=i7-11850h", "plan.split_point=1", "plan.micro_batches=1",
    "plan.replan=false", "wire.encoding=raw",
]  # fmt: skip


_ADDRESS = "127.0.0.1:50394"
_NAMES = ("board-1", "board-2")


def network() -> nn.Sequential:
    """Return a tiny network."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def measure(folder: Path, rounds: int = ROUNDS) -> tuple[list[Claim], dict[str, object]]:
    deployed, writing_bytes, trace_bytes = _deployed(folder, rounds)
    samples = {"virtual time": _in_virtual_time(folder, rounds), **deployed}
    claims = [
        Claim("server: spans on disk", trace_bytes / 1e6, "MB", least=rounds / 100),
        Claim(
            "server: largest memory while it writes the results, beyond that of the training",
            writing_bytes / 2**20,
            "MiB",
            most=_MOST_TO_WRITE_BYTES / 2**20,
        ),
    ]
    for name, series in samples.items():
        factor, files = growth(series)
        flat = _FLAT if name == "virtual time" else _FLAT_TRAINED
        claims.append(
            Claim(f"{name}: resident memory in {rounds} rounds, last / second quarter", factor, "", most=flat)
        )
        claims.append(Claim(f"{name}: more open files in the last than in the second quarter", files, "", most=2))
    return claims, {name: _rows(series) for name, series in samples.items()}


def _rows(samples: list[Sample]) -> list[tuple[float, int, int]]:
    return [(one.at, one.rss_bytes, one.open_files) for one in samples[:: max(1, len(samples) // _ROWS)]]


def _in_virtual_time(folder: Path, rounds: int) -> list[Sample]:
    words = [f"--set={setting}" for setting in [*_RUN, f"run.epochs={rounds}"]]
    command = [sys.executable, "-m", "pipar", "run", "--timing-only", *words]
    environment = os.environ | {"PIPAR_RUNS": str(folder)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        (samples,) = _sampled([process], folder / "long" / "metrics.jsonl", rounds)
    assert process.returncode == 0
    return samples


def _deployed(folder: Path, rounds: int) -> tuple[dict[str, list[Sample]], float, int]:
    """Return the samples of the server and of a device in real processes, what writing takes, and the trace's size."""
    config = folder / "deployed.toml"
    config.write_text(tomli_w.dumps(_tree(rounds)))
    environment = os.environ | {"PIPAR_RUNS": str(folder)}
    parts = [("server", "--listen", _ADDRESS), *(("device", "--server", _ADDRESS, "--name", name) for name in _NAMES)]
    with ExitStack() as stack:
        processes = []
        for command, *words in parts:
            process = subprocess.Popen(
                [sys.executable, "-m", "pipar", command, str(config), *words],
                stderr=subprocess.DEVNULL,
                env=environment,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        server, device = _sampled(processes[:2], folder / "deployed" / "metrics.jsonl", rounds)
        largest = _largest(processes[0])
        assert processes[0].returncode == 0
    trace_bytes = (folder / "deployed" / "trace.json").stat().st_size
    return {"server": server, "device": device}, largest - server[-1].rss_bytes, trace_bytes


def _largest(process: subprocess.Popen[bytes]) -> int:
    """Return the largest resident memory of a process until it ends."""
    largest = 0
    while process.poll() is None:
        with suppress(OSError):  # it has ended meanwhile
            largest = max(largest, sample(0, process.pid).rss_bytes)
        time.sleep(0.02)
    return largest


def _tree(rounds: int) -> dict[str, Any]:
    return {
        "run": {"name": "deployed", "epochs": rounds, "batch_size": 10, "trace": "full"},
        "model": {"factory": "benchmarks.long_run:network"},
        "data": {
            "name": "synthetic", "shape": [1, 8, 8], "classes": 10, "samples_per_device": 20,
            "validation": 0, "test": 0,
        },
        "plan": {"split_point": 2, "micro_batches": 2, "replan": False},
        "server": {"min_devices": len(_NAMES), "cores": 1},
        "devices": [{"name": "board", "count": len(_NAMES)}],
    }  # fmt: skip


def _sampled(processes: list[subprocess.Popen[bytes]], metrics: Path, rounds: int) -> list[list[Sample]]:
    """Return the memory of processes every half a second until the first one's last round is in its metrics."""
    samples: list[list[Sample]] = [[] for _ in processes]
    done, size = 0, 0
    while processes[0].poll() is None and done < rounds:
        time.sleep(0.5)
        if metrics.exists():
            with metrics.open("rb") as file:
                file.seek(size)
                new = file.read()
            done, size = done + new.count(b"\n"), size + len(new)
            if done and done < rounds:  # then it writes the result
                for process, series in zip(processes, samples, strict=True):
                    series.append(sample(done, process.pid))
    return samples

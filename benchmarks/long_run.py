"""The memory of a training of 5,000 rounds in virtual time, with sizes instead of tensors.

Nothing is trained, and server and devices are one process: whatever grows with the rounds, on either side, is visible.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.record import Claim
from simulation.resources import Sample, growth, sample

ROUNDS = 5000
#: A share of growth that noise of the allocator explains, without models to allocate.
_FLAT = 1.01
#: About as many samples are written.
_ROWS = 200
_RUN = [
    "run.name=long", "data.name=synthetic", "data.samples_per_device=100", "devices.count=3", "devices.link=wifi",
    "devices.profile=raspberry-pi-3b", "server.profile=i7-11850h", "plan.split_point=1", "plan.micro_batches=1",
    "plan.replan=false", "wire.encoding=raw",
]  # fmt: skip


def measure(folder: Path, rounds: int = ROUNDS) -> tuple[list[Claim], dict[str, object]]:
    words = [f"--set={setting}" for setting in [*_RUN, f"run.epochs={rounds}"]]
    command = [sys.executable, "-m", "pipar", "run", "--timing-only", *words]
    environment = os.environ | {"PIPAR_RUNS": str(folder)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        samples = _sampled(process, folder / "long" / "metrics.jsonl", rounds)
    assert process.returncode == 0
    factor, _ = growth(samples)
    return [
        Claim(f"resident memory in {rounds} rounds, last / second quarter", factor, "", most=_FLAT),
    ], {"samples": [(one.at, one.rss_bytes, one.open_files) for one in samples[:: max(1, len(samples) // _ROWS)]]}


def _sampled(process: subprocess.Popen[bytes], metrics: Path, rounds: int) -> list[Sample]:
    """Return the memory of a process every half a second until its last round is in its metrics."""
    samples: list[Sample] = []
    done, size = 0, 0
    while process.poll() is None and done < rounds:
        time.sleep(0.5)
        if metrics.exists():
            with metrics.open("rb") as file:
                file.seek(size)
                new = file.read()
            done, size = done + new.count(b"\n"), size + len(new)
            if done and done < rounds:  # then it writes the result
                samples.append(sample(done, process.pid))
    return samples

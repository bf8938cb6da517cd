"""Federated learning through gRPC with one device and no link limit, compared with a bare PyTorch loop."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.record import Claim, pipar

_PAIRS = 5
_SETTINGS = [
    "run.method=fl", "run.epochs=2", "data.name=synthetic", "data.shape=[3, 32, 32]", "data.samples_per_device=2000",
    "data.validation=0", "devices.count=1", "devices.link=unlimited", "devices.speed=1.0", "run.trace=off",
]  # fmt: skip
# The same loader, batches, optimiser and number of threads; one epoch to warm up, one that is measured.
_BARE = """
import json, sys, time, torch
from torch.nn import functional as F
from pipar.config_file import load_config
from pipar.job.workload import Workload
torch.set_num_threads(1)
workload = Workload(load_config(None, sys.argv[1:]))
shard = workload.keep_only_shard(workload.names[0])
model = workload.build_model().train()
for epoch in (1, 2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    start = time.perf_counter()
    order = shard.order(epoch)
    for at in range(0, len(order), 100):
        x, y = shard.batch(epoch, order[at : at + 100])
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    seconds = time.perf_counter() - start
print(seconds)
"""


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    ours, bare = [], []
    for _ in range(_PAIRS):
        bare.append(_bare_loop())
        ours.append(pipar(["run", *(f"--set={s}" for s in _SETTINGS)], folder)["epochs"][1]["seconds"])
    ratio = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
    claim = Claim("fl over gRPC / bare PyTorch loop, median of 5 pairs", ratio, "", most=1.05)
    return [claim], {"pipar_s": ours, "bare_s": bare}


def _bare_loop() -> float:
    done = subprocess.run(
        [sys.executable, "-c", _BARE, *_SETTINGS], capture_output=True, text=True, timeout=300, check=True
    )
    return float(done.stdout)

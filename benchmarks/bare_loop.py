"""Federated learning through gRPC with one device and no link limit, compared with a bare PyTorch loop: SGD, AdamW."""

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
from pipar.settings.config_file import load_config
from pipar.job.workload import Workload
torch.set_num_threads(1)
workload = Workload(load_config(None, sys.argv[1:]))
shard = workload.samples.keep_only_shard(workload.names[0])
model = workload.build_model().train()
for epoch in (1, 2):
    optimizer = %s
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


#: The optimisers that are compared, in pipar's words and in torch's.
_OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)",
    "adamw": "torch.optim.AdamW(model.parameters())",
}


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    claims, found = [], {}
    for name in _OPTIMIZERS:
        ours, bare = _pairs(name, folder)
        ratio = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
        # The claim about SGD has its name in earlier results.
        what = "" if name == "sgd" else f" with {name}"
        claims.append(Claim(f"fl over gRPC / bare PyTorch loop{what}, median of 5 pairs", ratio, "", most=1.05))
        prefix = "" if name == "sgd" else f"{name}_"
        found |= {f"{prefix}pipar_s": ours, f"{prefix}bare_s": bare}
    return claims, found


def _pairs(name: str, folder: Path) -> tuple[list[float], list[float]]:
    """Return the seconds of an epoch by pipar and by the bare loop, alternating."""
    ours, bare = [], []
    settings = [*_SETTINGS, f"optimizer.name={name}"]
    for _ in range(_PAIRS):
        bare.append(_bare_loop(name))
        ours.append(pipar(["run", *(f"--set={s}" for s in settings)], folder)["epochs"][1]["seconds"])
    return ours, bare


def _bare_loop(name: str) -> float:
    script = _BARE.replace("%s", _OPTIMIZERS[name])
    done = subprocess.run(
        [sys.executable, "-c", script, *_SETTINGS], capture_output=True, text=True, timeout=300, check=True
    )
    return float(done.stdout)

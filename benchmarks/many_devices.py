"""Two hundred devices, all in one process, at one server: a round of a tiny network, and the memory of an idle device.

The server waits for all devices, so those that have joined are idle: its memory with 50 and with 199 of them gives the
memory per device, before any has a replica. The training starts when the last one joins.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import nn

from benchmarks.record import Claim
from pipar.device.interfaces import Equipment
from pipar.events import ignore
from pipar.execution.lanes import ThreadLanes
from pipar.job.model_setup import part_builder
from pipar.job.profiles import measured_profile
from pipar.job.workload import Workload
from pipar.launch.assemble import run_device
from pipar.settings.config_file import load_config
from pipar.settings.links import Link
from pipar.transport.backoff import Backoff
from pipar.transport.grpc_connect import connect
from pipar.transport.reconnect import Reconnector

DEVICES, FIRST = 200, 50
ADDRESS = "127.0.0.1:50391"
_TREE: dict[str, Any] = {
    "run": {"name": "many", "epochs": 1, "batch_size": 10, "trace": "off"},
    "model": {"factory": "benchmarks.many_devices:network"},
    "data": {
        "name": "synthetic",
        "shape": [1, 8, 8],
        "classes": 10,
        "samples_per_device": 20,
        "validation": 0,
        "test": 0,
    },
    "plan": {"split_point": 2, "micro_batches": 2, "replan": False},
    "server": {"min_devices": DEVICES},
    "devices": [{"name": "board", "count": DEVICES}],
}


def network() -> nn.Sequential:
    """Return a tiny network."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def measure(folder: Path, devices: int = DEVICES, first: int = FIRST) -> tuple[list[Claim], dict[str, object]]:
    tree = {**_TREE, "server": {"min_devices": devices}, "devices": [{"name": "board", "count": devices}]}
    config = folder / "many.toml"
    config.write_text(tomli_w.dumps(tree))
    environment = os.environ | {"PIPAR_RUNS": str(folder / "runs")}
    words = ["server", str(config), "--listen", ADDRESS, "--log-format", "json"]
    server = subprocess.Popen(
        [sys.executable, "-m", "pipar", *words], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        found = asyncio.run(_train(config, ServerLog(server), devices, first))
        code = server.wait(60)
    finally:
        server.kill()
        server.wait()
        assert server.stderr is not None
        server.stderr.close()
    each = (found["with_all"] - found["with_first"]) / (devices - 1 - first)
    claims = [
        Claim(f"devices counted in one round, of {devices}", found["counted"], "", least=devices),
        Claim("server memory per additional idle device", each / 2**20, "MiB", most=2.0),
        Claim("exit code of the server", code, "", most=0),
    ]
    return claims, {"server_bytes": found, "round_s": found["round_s"]}


class ServerLog:
    """The server's log lines, and its memory."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    async def until(self, event: str, at_least: int = 0) -> dict[str, Any]:
        assert self._server.stderr is not None
        while True:
            line = await asyncio.to_thread(self._server.stderr.readline)
            if not line:
                raise RuntimeError(f"the server ended before {event}")
            said = json.loads(line) if line.startswith("{") else {}
            if said.get("event") == event and said.get("devices", at_least) >= at_least:
                return dict(said)

    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self._server.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))


async def _train(config_path: Path, log: ServerLog, devices: int, first: int) -> dict[str, float]:
    torch.set_num_threads(1)
    workload = Workload(load_config(config_path))
    profile = measured_profile(workload, workload.checked_model())
    clock = asyncio.get_running_loop().time

    async def live(name: str) -> None:
        reconnector = Reconnector(name, ADDRESS, partial(connect, ADDRESS), Backoff.of_device(0, name, clock), ignore)
        equipment = Equipment(workload.samples.shard(name), part_builder(workload, name), ThreadLanes, profile)
        take_part = partial(run_device, name, Link(), equipment, reconnector=reconnector, is_real=True, observe=ignore)
        await reconnector.run(take_part)

    await log.until("Listening")
    names, lives, seen = workload.names, [], {}
    for count, what in ((first, "with_first"), (devices - 1, "with_all")):
        lives += [asyncio.ensure_future(live(name)) for name in names[len(lives) : count]]
        await log.until("Joined", count)
        seen[what] = float(log.rss_bytes())
    began = time.monotonic()
    lives += [asyncio.ensure_future(live(names[-1]))]
    over = await log.until("RoundOver")
    seen |= {"round_s": time.monotonic() - began, "counted": float(len(over["counted"]))}
    await asyncio.gather(*lives)
    return seen

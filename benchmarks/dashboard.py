"""The cost of the live page: epochs of twenty devices without it, with one browser, and with some that hang.

The server is one process and all devices another, because in `pipar run` the page is in a process that does not train.
The three cases alternate, so that other load on the machine affects all of them, and the first epoch of each is left
out. Epochs differ by some percent in any case; the CPU time of the page's thread is exact, and the training cannot wait
longer for it than that.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import nn

from benchmarks.many_devices import ServerLog
from benchmarks.record import Claim
from pipar.device.interfaces import Equipment
from pipar.events import ignore
from pipar.execution.lanes import ThreadLanes
from pipar.job.model_setup import part_builder
from pipar.job.profiles import measured_profile
from pipar.job.workload import Workload
from pipar.launch.assemble import run_device
from pipar.live_page.serve import THREAD
from pipar.settings.config import device_specs
from pipar.settings.config_file import load_config
from pipar.transport.backoff import Backoff
from pipar.transport.grpc_connect import connect
from pipar.transport.reconnect import Reconnector

DEVICES, EPOCHS, TURNS, HANGING = 20, 4, 5, 8
ADDRESS, PAGE = "127.0.0.1:50392", ("127.0.0.1", 50393)
WAYS = ("without", "watched", "hanging")


def network() -> nn.Sequential:
    """Return a network with large activations and little computation."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def tree(devices: int, epochs: int, batches: int) -> dict[str, Any]:
    data = {"name": "synthetic", "shape": [1, 8, 8], "classes": 10, "samples_per_device": 100 * batches}
    return {
        "run": {"name": "page", "epochs": epochs, "batch_size": 100},
        "model": {"factory": "benchmarks.dashboard:network"},
        "data": {**data, "validation": 0, "test": 0},
        "plan": {"split_point": 2, "micro_batches": 4, "replan": False},
        "wire": {"encoding": "raw"},
        "server": {"min_devices": devices, "checkpoint_every": 0},
        "devices": [{"name": "board", "count": devices, "link": {"up": "2Mbit/s", "down": "2Mbit/s"}, "speed": 1.0}],
    }


def measure(
    folder: Path, devices: int = DEVICES, epochs: int = EPOCHS, turns: int = TURNS, batches: int = 8
) -> tuple[list[Claim], dict[str, object]]:
    config = folder / "page.toml"
    config.write_text(tomli_w.dumps(tree(devices, epochs, batches)))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    shares: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(turns):
        for way in WAYS:
            took, busy = _run(config, folder / f"{way}-{turn}", way, epochs)
            seconds[way].append(statistics.mean(took[1:]))
            shares[way].append(busy / sum(took[1:]))
    ratio = {
        way: statistics.median(one / plain for one, plain in zip(seconds[way], seconds["without"], strict=True))
        for way in WAYS
    }
    claims = [
        Claim(
            f"epoch of {devices} devices with a live page that is watched / without", ratio["watched"], "", most=1.01
        ),
        Claim(f"the same with {HANGING} browsers that never read / without", ratio["hanging"], "", most=1.01),
        *(
            Claim(f"CPU seconds of the page's thread / seconds, {way}", statistics.median(shares[way]), "", most=0.01)
            for way in WAYS[1:]
        ),
    ]
    return claims, {"seconds": seconds, "page's share of a core": shares}


def _run(config: Path, runs: Path, way: str, epochs: int) -> tuple[list[float], float]:
    """Return the seconds of each epoch, and the CPU seconds of the page after the first."""
    words = ["server", str(config), "--listen", ADDRESS, "--log-format", "json"]
    words += [] if way == "without" else ["--dashboard", f"{PAGE[0]}:{PAGE[1]}"]
    environment = os.environ | {"PIPAR_RUNS": str(runs)}
    server = subprocess.Popen(
        [sys.executable, "-m", "pipar", *words], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        return asyncio.run(train(config, server, way, epochs))
    finally:
        server.kill()
        server.wait()
        assert server.stderr is not None
        server.stderr.close()


async def train(
    config: Path, server: subprocess.Popen[str], way: str, epochs: int, address: str = ADDRESS
) -> tuple[list[float], float]:
    """Train with devices in this process, and return the seconds of each epoch and the CPU seconds of the page."""
    torch.set_num_threads(1)
    loaded = load_config(config)
    workload = Workload(loaded)
    profile = measured_profile(workload, workload.checked_model())
    clock, log = asyncio.get_running_loop().time, ServerLog(server)
    links = {spec.name: spec.link for spec in device_specs(loaded)}

    async def live(name: str) -> None:
        reconnector = Reconnector(name, address, partial(connect, address), Backoff.of_device(0, name, clock), ignore)
        equipment = Equipment(workload.samples.shard(name), part_builder(workload, name), ThreadLanes, profile)
        take_part = partial(
            run_device, name, links[name], equipment, reconnector=reconnector, is_real=True, observe=ignore
        )
        await reconnector.run(take_part)

    await log.until("Listening")
    with _browsers(way):
        lives = [asyncio.ensure_future(live(name)) for name in workload.names]
        took = [float((await log.until("EpochResult"))["seconds"])]
        before = _page_s(server.pid)
        took += [float((await log.until("EpochResult"))["seconds"]) for _ in range(epochs - 1)]
        busy = _page_s(server.pid) - before
        await asyncio.gather(*lives)
    return took, busy


def _page_s(pid: int) -> float:
    """Return the CPU seconds of the page's thread; 0 without a page."""
    tasks = [task for task in Path(f"/proc/{pid}/task").iterdir() if (task / "comm").read_text().strip() == THREAD]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@contextlib.contextmanager
def _browsers(way: str) -> Iterator[None]:
    """Connect the browsers of a case: one that reads everything, or some that never read."""
    with contextlib.ExitStack() as stack:
        if way == "watched":
            threading.Thread(target=_watch, daemon=True).start()
        for _ in range(HANGING if way == "hanging" else 0):
            stack.enter_context(_hanging())
        yield


def _hanging() -> socket.socket:
    """Return a browser that never reads; its system buffers a few kilobytes, not the megabytes of a whole run."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # the sender's buffer is a multiple of it
    client.connect(PAGE)
    client.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return client


def _watch() -> None:
    connection = http.client.HTTPConnection(*PAGE)
    connection.request("GET", "/events")
    answer = connection.getresponse()
    with contextlib.suppress(http.client.HTTPException, OSError):  # the server is gone
        while answer.read1(1 << 16):
            pass

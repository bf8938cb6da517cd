"""A device of a real deployment is killed or stopped, and the server, without a configured timeout, notices it."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import tomli_w
from torch import nn

#: About half a second, and about half a minute, for a round.
LINKS = {"7 Mbit/s": 7e6, "0.1 Mbit/s": 1e5}
DEATHS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
_NAMES = ("pi-1", "pi-2")
_ROUNDS = 3  # before the death
_LONGEST_S = 900.0


def network() -> nn.Sequential:
    """Return a small network whose activations and weights take most of a round on the link."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


@dataclass
class Noticed:
    """What a deployment showed."""

    normal_s: float
    noticed_s: float  # after the death
    falsely: list[str] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)

    @property
    def rounds(self) -> float:
        return self.noticed_s / self.normal_s


def notice(folder: Path, rate_bps: float, death: signal.Signals) -> Noticed:
    """Start a server and two devices, end one of them in the middle of a round, and wait until the server knows it."""
    folder.mkdir()
    config = folder / "train.toml"
    config.write_text(tomli_w.dumps(_tree(rate_bps)))
    with _programs() as started:
        log = _Log(started("server", str(config), "--listen", "127.0.0.1:0", folder=folder))
        address = log.until("Listening")["address"]
        devices = {
            name: started("device", str(config), "--server", address, "--name", name, folder=folder) for name in _NAMES
        }
        ends = [_time(log.until("RoundOver", epoch)) for epoch in range(1, _ROUNDS + 1)]
        normal_s = statistics.median(after - before for before, after in pairwise(ends))
        time.sleep(normal_s / 2)
        died = _NAMES[-1]
        devices[died].send_signal(death)
        died_at = time.time()
        lost = log.until("Lost", device=died)
        falsely = [one["message"] for one in log.seen if one["event"] in ("Lost", "Dropped") and one["device"] != died]
        chosen = [one["message"] for one in log.seen if one["event"] == "TimeoutsChosen"]
        return Noticed(normal_s, _time(lost) - died_at, falsely, chosen)


def _tree(rate_bps: float) -> dict[str, Any]:
    rate = f"{rate_bps:g}bit/s"
    return {
        "run": {"name": "real", "epochs": 1000, "batch_size": 20, "trace": "off"},
        "model": {"factory": "benchmarks.timeouts_real:network"},
        "data": {
            "name": "synthetic", "shape": [1, 8, 8], "classes": 10, "samples_per_device": 100,
            "validation": 0, "test": 0,
        },
        "plan": {"split_point": 3, "micro_batches": 2, "replan": False},
        "wire": {"encoding": "raw"},
        "server": {"cores": 1, "min_devices": 1, "checkpoint_every": 0},
        "devices": [{"name": "pi", "count": len(_NAMES), "link": {"up": rate, "down": rate, "latency": "10ms"}}],
    }  # fmt: skip


class _Log:
    """The events of a server, as they are logged."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self.seen: list[dict[str, Any]] = []
        self._ended = False
        self._news = threading.Condition()
        self._server = server
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._server.stderr is not None
        try:
            for line in self._server.stderr:
                said = json.loads(line)
                if "event" in said:
                    with self._news:
                        self.seen.append(said)
                        self._news.notify_all()
        finally:  # also if a line is no JSON: whatever waits for an event must not wait forever
            with self._news:
                self._ended = True
                self._news.notify_all()

    def until(self, event: str, epoch: int | None = None, device: str | None = None) -> Mapping[str, Any]:
        """Return the first event of this kind, of this epoch or device if given."""

        def found() -> dict[str, Any] | None:
            fits = (one for one in self.seen if one["event"] == event)
            fits = (one for one in fits if epoch is None or one["epoch"] == epoch)
            return next((one for one in fits if device is None or one["device"] == device), None)

        with self._news:
            self._news.wait_for(lambda: self._ended or found() is not None, _LONGEST_S)
            if (one := found()) is None:
                raise RuntimeError(f"the server never logged {event}: {self.seen[-5:]}")
            return one


def _time(event: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()


@contextmanager
def _programs() -> Iterator[Any]:
    """Yield a function that starts a command of pipar; all of them end with the block."""
    running: list[subprocess.Popen[str]] = []

    def start(*words: str, folder: Path) -> subprocess.Popen[str]:
        environment = os.environ | {"PIPAR_RUNS": str(folder / "runs")}
        command = [sys.executable, "-m", "pipar", *words, "--log-format", "json"]
        stderr = subprocess.PIPE if words[0] == "server" else subprocess.DEVNULL
        running.append(subprocess.Popen(command, env=environment, text=True, stderr=stderr))
        return running[-1]

    try:
        yield start
    finally:
        for process in running:
            process.kill()
            process.wait()

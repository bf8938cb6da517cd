"""One training of a real deployment in network namespaces, and what an epoch took.

    python -m benchmarks.deployment_cell --devices 2 --link 10/25 --epochs 7
    python -m benchmarks.deployment_cell --link 50/50 --method fl --epochs 3
    python -m benchmarks.deployment_cell --plan 1,8,raw --epochs 3 --set run.trace=full --keep /tmp/cell

prints one JSON document; the first line trains with everything "auto". It needs root, `ip` and `tc`. `--keep FOLDER`
keeps logs and the run's folder; without PIPAR_DATA, or with `--data synthetic`, images are synthetic.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.shaped_namespaces import SERVER_HOST, Namespaces, ShapedLink, inside, namespaces
from pipar.settings.config import device_names
from pipar.settings.config_file import config_from

_PORT = 50051
_SAMPLES, _BATCH = 500, 100
_LONGEST_S = 1800.0
_PIPAR = (str(Path(sys.executable).with_name("pipar")),)
_QUIET: dict[str, Any] = {"check": True, "stdout": subprocess.DEVNULL}


@dataclass(frozen=True)
class Choice:
    """What is trained: a method, and for pipar P, N and the encoding; None for P and N is "auto"."""

    method: str = "pipar"
    split_point: int | None = None
    micro_batches: int | None = None
    encoding: str = "auto"

    def __str__(self) -> str:
        if self.split_point is None:
            return "auto" if self.method == "pipar" else f"{self.method} {self.encoding}"
        return f"{self.method} P={self.split_point} N={self.micro_batches} {self.encoding}"


@dataclass(frozen=True)
class Cell:
    """One training: how many devices over which link train what, for how many epochs."""

    devices: int
    link: ShapedLink
    choice: Choice = Choice()
    epochs: int = 7
    data: str = "cifar10"
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The server's result.json, and the bytes that TCP carried for each device, up and down, from start to end."""

    result: dict[str, Any]
    tcp_bytes: dict[str, tuple[int, int]]

    @property
    def seconds(self) -> list[float]:
        return [float(epoch["seconds"]) for epoch in self.result["epochs"]]

    @property
    def changes(self) -> int:
        """How many times a plan was replaced."""
        return sum(change["epoch"] > 1 for change in self.result["replans"])

    def as_json(self) -> dict[str, Any]:
        epochs = self.result["epochs"]
        return {
            "seconds": self.seconds,
            "bytes_up": [epoch["bytes_up"] for epoch in epochs],
            "bytes_down": [epoch["bytes_down"] for epoch in epochs],
            "utilisation": [epoch["utilisation"] for epoch in epochs],
            "bound_s": [epoch["bound_s"] for epoch in epochs],
            "tcp_bytes": self.tcp_bytes,
            "plans": [_plan(plan) for plan in self.result["plans"]],
            "changes": [
                {
                    "epoch": change["epoch"],
                    "plans": [_plan(plan) for plan in change["plans"]],
                    "reason": change["reason"],
                }
                for change in self.result["replans"]
            ],
        }


def _plan(plan: dict[str, Any]) -> str:
    return f"P={plan['split_point']} N={plan['micro_batches']} {plan['up']}/{plan['down']}"


def config(cell: Cell) -> dict[str, Any]:
    """Return the configuration of server and devices."""
    choice = cell.choice
    plan = {"split_point": choice.split_point or "auto", "micro_batches": choice.micro_batches or "auto"}
    data: dict[str, Any] = {"name": cell.data, "samples_per_device": _SAMPLES, "validation": 100, "test": 100}
    if cell.data == "synthetic":
        data["shape"] = [3, 32, 32]
    return {
        "run": {"name": "cell", "method": choice.method, "epochs": cell.epochs, "batch_size": _BATCH},
        "model": {"name": "vgg5", "norm": "batch"},
        "data": data,
        "plan": plan,
        "wire": {"encoding": choice.encoding},
        "server": {"min_devices": cell.devices},
        "devices": [{"name": "pi", "count": cell.devices, "link": "unlimited", "speed": 1.0}],
    }


def names(cell: Cell) -> list[str]:
    """Return the names of the devices."""
    return device_names(config_from(config(cell)))


def make_certificates(folder: Path, devices: Sequence[str]) -> Path:
    """Create an authority and certificates of the server and these devices, with `pipar certs`."""
    certs = folder / "certs"
    subprocess.run([*_PIPAR, "certs", "init", "--folder", str(certs), "--host", SERVER_HOST], **_QUIET)
    subprocess.run([*_PIPAR, "certs", "issue", "--folder", str(certs), *devices], **_QUIET)
    return certs


def train(cell: Cell, folder: Path, certs: Path | None = None) -> Outcome:
    """Train in namespaces of its own, and return the outcome; processes and namespaces are gone afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    devices = names(cell)
    certs = certs or make_certificates(folder, devices)
    (folder / "cell.toml").write_text(tomli_w.dumps(config(cell)))
    with namespaces(devices, cell.link) as spaces, _programs(cell, spaces, folder, certs) as programs:
        _wait(programs, folder)
        tcp_bytes = {} if cell.link.up is None else spaces.tcp_bytes()
    result = json.loads((folder / "runs" / "cell" / "result.json").read_text("utf-8"))
    return Outcome(result, tcp_bytes)


@contextmanager
def _programs(cell: Cell, spaces: Namespaces, folder: Path, certs: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the server and the devices; end those that are left, whatever happens."""
    settings = [word for setting in cell.settings for word in ("--set", setting)]
    common = [str(folder / "cell.toml"), "--certs", str(certs), *settings]
    address = f"{SERVER_HOST}:{_PORT}"
    commands = {"server": (spaces.server, ["server", *common, "--listen", address])}
    for device, namespace in spaces.devices.items():
        commands[device] = (namespace, ["device", *common, "--server", address, "--name", device])
    started: list[subprocess.Popen[bytes]] = []
    try:
        for name, (namespace, words) in commands.items():
            started.append(_start(inside(namespace, [*_PIPAR, *words]), folder, name))
        yield started
    finally:
        for program in started:
            program.kill()
        for program in started:
            program.wait()


def _start(command: Sequence[str], folder: Path, name: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PIPAR_RUNS": str(folder / "runs")}
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def _wait(programs: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Return when all programs have ended well; raise with the logs if one has not, or takes too long."""
    until = time.monotonic() + _LONGEST_S
    while any(program.poll() is None for program in programs):
        if time.monotonic() > until or any(program.poll() for program in programs):
            break
        time.sleep(0.2)
    if any(program.poll() != 0 for program in programs):
        logs = [f"{path.name}:\n{path.read_text(errors='replace')[-1500:]}" for path in sorted(folder.glob("*.log"))]
        raise RuntimeError("a program of the deployment failed or took too long.\n" + "\n".join(logs))


def end_like_ctrl_c() -> None:
    """Let SIGTERM end this program as Ctrl-C does, so that it cleans up."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _parse(words: Sequence[str]) -> tuple[Cell, Path | None]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--link", type=ShapedLink.parse, default=ShapedLink(), help="Mbit/s up/down, or unlimited")
    parser.add_argument("--method", default="pipar")
    parser.add_argument("--plan", help="P,N,ENCODING, as in 1,8,raw; by default auto")
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--data", default="cifar10" if os.environ.get("PIPAR_DATA") else "synthetic")
    parser.add_argument("--set", action="append", default=[], help="SECTION.KEY=VALUE for server and devices")
    parser.add_argument("--keep", type=Path, help="keep logs and the run here")
    given = parser.parse_args(words)
    choice = Choice(given.method)
    if given.plan is not None:
        split_point, micro_batches, encoding = given.plan.split(",")
        choice = Choice(given.method, int(split_point), int(micro_batches), encoding)
    return Cell(given.devices, given.link, choice, given.epochs, given.data, tuple(given.set)), given.keep


def main(words: Sequence[str]) -> int:
    cell, keep = _parse(words)
    end_like_ctrl_c()
    with tempfile.TemporaryDirectory() as folder:
        if keep is not None:
            shutil.rmtree(keep, ignore_errors=True)
        print(json.dumps(train(cell, keep or Path(folder)).as_json(), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

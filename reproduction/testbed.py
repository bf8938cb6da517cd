"""The paper's testbed: 100 Raspberry Pi 3B, one i7-11850H, three links, six networks on four datasets.

The machines are the named ones of `profiling/machines.py`, each times one factor. The two factors were fitted once to
the paper's values for VGG-5, and hold for every other network, dataset, link and method; `fitted_speeds` finds them
again. docs/explanation/reproduction-testbed.md shows the fit, and where the paper contradicts its hardware.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from pipar.job.plans import make_plans
from pipar.job.prepare import unplanned_timing_only_job
from pipar.launch.rehearsal import rehearse
from pipar.planner.simulator import simulate
from pipar.planner.timing import steady_epoch_s
from pipar.settings.config_file import config_from
from reproduction.published import published

SMALL, LARGE = ("vgg5", "resnet18", "mobilenetv3_small"), ("vgg16", "resnet101", "mobilenetv3_large")
DATASETS = {**dict.fromkeys(SMALL, ("mnist", "cifar10")), **dict.fromkeys(LARGE, ("cifar100", "tiny_imagenet"))}
#: Of each of 100 devices. Tiny ImageNet's 100 classes have 50,000 images, unlike the paper's table of sizes says:
#: 1 MiB of activations per sample and 10 Mbit/s allow no epoch of 1,000 samples in the 456 s that it reports.
SAMPLES = {"mnist": 600, "cifar10": 500, "cifar100": 500, "tiny_imagenet": 500}
LINKS = ("4g", "4g+", "wifi")
DEVICES = 100
BATCH_SIZE = 100

BOARD, SERVER = "raspberry-pi-3b", "i7-11850h"
#: Speeds of the paper's machines, relative to the named ones.
BOARD_SPEED, SERVER_SPEED = 0.19, 1.8
#: The same as a note for tables.
CALIBRATION = (
    f"Boards have {BOARD_SPEED:g} of the speed of the named {BOARD}, the server {SERVER_SPEED:g} times that of the "
    f"named {SERVER}: fitted to the paper's rows of VGG-5, and the same for everything else. The server speeds that "
    "the paper's own rows imply differ by more than a factor of ten, see `testbed`: there are rows for 100, 10 and one "
    "device."
)


@dataclass(frozen=True)
class Trial:
    """One training on the testbed, by default as in the paper.

    `slow` is the speed of every second board, relative to the others.
    """

    model: str
    dataset: str
    link: str | Mapping[str, Any]
    method: str = "pipar"
    devices: int = DEVICES
    batch_size: int = BATCH_SIZE
    encoding: str = "raw"
    slow: float = 1.0
    board: str = BOARD
    board_speed: float = BOARD_SPEED
    server_speed: float = SERVER_SPEED
    samples: int | None = None  # of each device
    plan: tuple[int, int] | None = None  # P and N of every device; None: chosen
    privacy: Mapping[str, float] | None = None

    def tree(self) -> dict[str, Any]:
        """Return its configuration."""
        return {
            **({"privacy": dict(self.privacy)} if self.privacy else {}),
            "run": {"method": self.method, "epochs": 1, "batch_size": self.batch_size, "trace": "off"},
            "model": {"name": self.model, "norm": "batch"},
            "data": {"name": self.dataset, "samples_per_device": self._samples, "validation": 0, "test": 0},
            "plan": {"replan": False, **dict(zip(("split_point", "micro_batches"), self.plan or (), strict=False))},
            "wire": {"encoding": self.encoding},
            # The server of the paper computes one micro-batch of a device at a time.
            "server": {"profile": SERVER, "speed": self.server_speed, "threads": 1},
            "devices": self._groups(),
        }

    @property
    def _samples(self) -> int:
        return SAMPLES[self.dataset] if self.samples is None else self.samples

    def _groups(self) -> list[dict[str, Any]]:
        board = {"profile": self.board, "link": self.link}
        if self.slow == 1.0 or self.devices == 1:
            return [{"name": "board", "count": self.devices, "speed": self.board_speed, **board}]
        halves = {"fast": (self.devices - self.devices // 2, 1.0), "slow": (self.devices // 2, self.slow)}
        return [
            {"name": name, "count": count, "speed": self.board_speed * share, **board}
            for name, (count, share) in halves.items()
        ]


def trainings(models: tuple[str, ...], *, quick: bool = False) -> Iterator[tuple[str, str, str]]:
    """Yield (network, dataset, link) of the paper's figures; with `quick` only the colour images of 32 x 32."""
    for model in models:
        datasets = [name for name in DATASETS[model] if not quick or name.startswith("cifar")]
        for dataset, link in product(datasets, LINKS):
            yield model, dataset, link


# --- the fit


@dataclass(frozen=True)
class Printed:
    """An epoch that the paper prints, or that follows from what it prints; the trial has its plan."""

    trial: Trial
    seconds: float

    def predicted_s(self, board_speed: float, server_speed: float) -> float:
        """Return the seconds of the same epoch on machines of these speeds."""
        trial = replace(self.trial, board_speed=board_speed, server_speed=server_speed)
        job = unplanned_timing_only_job(config_from(trial.tree()))
        assert job is not None
        fleet = job.fleet()
        return steady_epoch_s(simulate, fleet, make_plans(job, rehearse))


def printed_epochs() -> list[Printed]:
    """Return what the paper prints for VGG-5: six epochs with the best plans, and two of federated learning.

    Those of fl follow from its range over pipar, 1.4 to 3.4: an epoch of MNIST took between 14.7 and 15.3 s, one of
    CIFAR-10 between 27.7 and 35 s. The geometric means are taken.
    """
    rows = [
        Printed(Trial("vgg5", of.dataset, of.link, plan=(of.best_split_point, of.best_micro_batches)), of.best_epoch_s)
        for of in published().selections
        if of.model == "vgg5"
    ]
    by_fl = {"mnist": math.sqrt(14.7 * 15.3), "cifar10": math.sqrt(27.7 * 35.0)}
    return [*rows, *(Printed(Trial("vgg5", data, "4g+", method="fl"), seconds) for data, seconds in by_fl.items())]


def is_fitted_to(models: Collection[str], devices: int) -> bool:
    """Return whether the speeds were fitted to the paper's values for these networks and this number of devices."""
    return set(models) == {"vgg5"} and devices == DEVICES


def error(rows: list[Printed], board_speed: float, server_speed: float) -> float:
    """Return the root mean square error of the predictions' logarithms: 0.1 is about 10 %."""
    off = [math.log(row.predicted_s(board_speed, server_speed) / row.seconds) for row in rows]
    return math.sqrt(sum(each**2 for each in off) / len(off))


def fitted_speeds(rows: list[Printed], steps: tuple[float, ...] = (1.6, 1.25, 1.1, 1.05)) -> tuple[float, float]:
    """Return the speeds of board and server with the smallest error, by a search with finer and finer steps."""
    known: dict[tuple[float, float], float] = {}

    def off(at: tuple[float, float]) -> float:
        if at not in known:
            known[at] = error(rows, *at)
        return known[at]

    best = (1.0, 1.0)
    for step in steps:
        while True:
            around = [(best[0] * step**i, best[1] * step**j) for i, j in product((-1, 0, 1), repeat=2)]
            nearest = min(around, key=off)
            if off(nearest) >= off(best):
                break
            best = nearest
    return best

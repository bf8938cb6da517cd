"""The cost of privacy: seconds per epoch without it, with classic differential privacy, and with PixelDP.

A fleet like the paper's (100 Raspberry Pi 3B, an i7-11850H, 500 images of CIFAR-10 per device, batches of 100) in
virtual time, timing-only, from named machines: fl, sfl and pipar on three networks and three links.

- As the paper trains: pipar with the {P, N} that the paper lists, sfl with the same P, everything raw.
- As pipar plans and sends: with the plan that each method chooses without privacy, tensors and models encoded where
  that is faster. Models with noise cannot be sent as changes.

Then two real devices on this machine, alternating; the fastest epoch of each turn counts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.privacy_picture import picture
from benchmarks.record import RESULTS, Claim, pipar
from pipar.launch import run

NETWORKS = {"vgg5": "VGG-5", "resnet18": "ResNet-18", "mobilenetv3_small": "MobileNetV3-Small"}
LINKS = ("4g", "4g+", "wifi")
METHODS = ("fl", "sfl", "pipar")
#: The settings of each mode. The scale of the noise does not change its time.
MODES: Mapping[str, list[str]] = {
    "without": [],
    "classic": ["privacy.noise_multiplier=1.0"],
    "pixel": ["privacy.pixel_epsilon=1.0"],
}
TESTBED = [
    "run.epochs=1", "run.batch_size=100", "run.trace=off", "data.name=cifar10", "data.samples_per_device=500",
    "devices.count=100", "devices.profile=raspberry-pi-3b", "server.profile=i7-11850h", "plan.replan=false",
]  # fmt: skip
#: {P, N} of pipar on CIFAR-10 from the paper's table of selected parameters.
PLANS = {
    "vgg5": {"4g": (1, 12), "4g+": (1, 6), "wifi": (1, 3)},
    "resnet18": {"4g": (1, 8), "4g+": (1, 6), "wifi": (1, 3)},
    "mobilenetv3_small": {"4g": (2, 8), "4g+": (1, 12), "wifi": (1, 9)},
}
#: The maximum overheads in seconds that the paper reports; for PixelDP one number for all methods.
PAPER = {"classic": {"fl": 11.7, "sfl": 0.16, "pipar": 0.15}, "pixel": {"fl": 0.3, "sfl": 0.3, "pipar": 0.3}}
#: Overheads of PixelDP should be equal for all methods: they add the same seconds in another order.
SAME_S = 1e-6

REAL = [
    "run.epochs=4", "run.batch_size=100", "run.trace=off", "model.name=vgg5", "data.name=synthetic",
    "data.shape=[3, 32, 32]", "data.samples_per_device=500", "devices.count=2", "devices.speed=0.2",
    "devices.link=wifi", "plan.replan=false", "wire.encoding=raw",
]  # fmt: skip
REAL_METHODS = ("fl", "pipar")
TURNS = 3
#: Two runs of one configuration on this machine differ by this much.
REAL_MOST = 1.1


@dataclass(frozen=True)
class Cell:
    """One method on one link: its plan, and the seconds per epoch by mode."""

    network: str
    link: str
    method: str
    plan: str
    seconds: Mapping[str, float]

    def overhead_s(self, mode: str) -> float:
        return self.seconds[mode] - self.seconds["without"]


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    os.environ["PIPAR_RUNS"] = str(folder)
    places = list(product(NETWORKS, LINKS, METHODS))
    papers = [papers_cell(*place) for place in places]
    planned = [planned_cell(*place) for place in places]
    real = {method: _turns(method, folder) for method in REAL_METHODS}
    (RESULTS / "privacy.svg").write_text(picture(planned, NETWORKS), "utf-8")
    details: dict[str, object] = {
        "settings": TESTBED,
        "modes": MODES,
        "paper: overhead at most": PAPER,
        "cells": [asdict(cell) for cell in papers],
        "cells, planned and encoded here": [asdict(cell) for cell in planned],
        "real settings": REAL,
        "real": real,
    }
    return [*claims(papers), *claims(planned, "planned and encoded here"), *real_claims(real)], details


# --- the testbed


def papers_cell(network: str, link: str, method: str) -> Cell:
    """Return one method as the paper trains it."""
    split_point, micro_batches = PLANS[network][link]
    plan = [f"plan.split_point={split_point}", f"plan.micro_batches={micro_batches if method == 'pipar' else 1}"]
    settings = [*_place(network, link, method), "wire.encoding=raw", *(plan if method != "fl" else [])]
    return _cell(network, link, method, {mode: _run([*settings, *more]) for mode, more in MODES.items()})


def planned_cell(network: str, link: str, method: str) -> Cell:
    """Return one method as pipar plans it without privacy, and with the same plan with it."""
    settings = [*_place(network, link, method), "run.epochs=2"]
    without = _run(settings)
    first = without["plans"][0]
    plan = [f"plan.{key}={first[key]}" for key in ("split_point", "micro_batches")] if method != "fl" else []
    private = {mode: _run([*settings, *plan, *more]) for mode, more in MODES.items() if mode != "without"}
    return _cell(network, link, method, {"without": without, **private})


def _place(network: str, link: str, method: str) -> list[str]:
    return [*TESTBED, f"run.method={method}", f"model.name={network}", f"devices.link={link}"]


def _run(settings: Sequence[str]) -> Mapping[str, Any]:
    return run(settings=settings, world="timing-only").content


def _cell(network: str, link: str, method: str, results: Mapping[str, Mapping[str, Any]]) -> Cell:
    first = results["without"]["plans"][0]
    plan = f"P={first['split_point']} N={first['micro_batches']}"
    cell = Cell(network, link, method, plan, {mode: last_s(result) for mode, result in results.items()})
    print(row(cell), flush=True)
    return cell


def last_s(result: Mapping[str, Any]) -> float:
    """Return the seconds of a run's last epoch; the first one always sends whole models."""
    return float(result["epochs"][-1]["seconds"])


def claims(cells: Sequence[Cell], how: str = "") -> list[Claim]:
    """Return the paper's claims about both mechanisms for these cells; `how` if they do not use the paper's plans."""
    classic, pixel = (f"{words}, {how}" if how else words for words in ("classic DP", "PixelDP"))
    more = "overhead of pipar - that of fl, the largest of 9 cells"
    return [
        Claim(f"{classic}: {more}", _more_than_fl_s(cells, "classic"), "s", most=0.0),
        Claim(f"{pixel}: {more}", _more_than_fl_s(cells, "pixel"), "s", most=SAME_S),
        *_largest(cells, "classic", classic, paper=not how),
        *_largest(cells, "pixel", pixel, paper=not how),
    ]


def _more_than_fl_s(cells: Sequence[Cell], mode: str) -> float:
    return max(cell.overhead_s(mode) - _fl(cells, cell).overhead_s(mode) for cell in _pipar(cells))


def _largest(cells: Sequence[Cell], mode: str, words: str, *, paper: bool) -> list[Claim]:
    found = {m: _most_s(cells, m, mode) for m in METHODS}
    beside = {m: f" (paper: {PAPER[mode][m]} s)" if paper else "" for m in METHODS}
    return [Claim(f"{words}: largest overhead on {m}{beside[m]}", found[m], "s") for m in METHODS]


def _most_s(cells: Sequence[Cell], method: str, mode: str) -> float:
    return max(cell.overhead_s(mode) for cell in cells if cell.method == method)


def _pipar(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.method == "pipar"]


def _fl(cells: Sequence[Cell], of: Cell) -> Cell:
    (found,) = (c for c in cells if (c.network, c.link, c.method) == (of.network, of.link, "fl"))
    return found


# --- this machine


def _turns(method: str, folder: Path) -> list[dict[str, list[float]]]:
    """Return the seconds of the epochs of each mode, alternating; the order alternates too."""
    names = list(MODES)
    turns = []
    for turn in range(TURNS):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        results = {mode: pipar(["run", "--method", method, *_set([*REAL, *MODES[mode]])], folder) for mode in order}
        turns.append({mode: [epoch["seconds"] for epoch in results[mode]["epochs"]] for mode in names})
        print(f"real, {method}, turn {turn + 1}: {turns[-1]}", flush=True)
    return turns


def real_claims(real: Mapping[str, Sequence[Mapping[str, Sequence[float]]]]) -> list[Claim]:
    """Return how much longer real epochs take: the median over the turns of each turn's fastest epoch."""
    found = []
    for method, turns in real.items():
        for mode, words in (("classic", "classic DP"), ("pixel", "PixelDP")):
            ratio = median(min(turn[mode]) / min(turn["without"]) for turn in turns)
            found.append(
                Claim(f"real epoch with {words} / without, vgg5 by {method} on wifi", ratio, "", most=REAL_MOST)
            )
    return found


def _set(settings: Sequence[str]) -> list[str]:
    return [f"--set={setting}" for setting in settings]


# --- tables


def row(cell: Cell) -> str:
    """Return a line of a table: seconds without privacy, and the overheads."""
    more = [_short(cell.overhead_s(mode)) for mode in ("classic", "pixel")]
    cells = [NETWORKS[cell.network], cell.link, cell.method, cell.plan, f"{cell.seconds['without']:.1f}", *more]
    return f"| {' | '.join(cells)} |"


def _short(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 0.1 else f"{max(0.0, seconds):.1g}"


def table(cells: Sequence[Cell]) -> str:
    """Return a row for each method on each link."""
    head = ["| network | link | method | plan | without, s | classic DP, s | PixelDP, s |"]
    return "\n".join([*head, "|---|---|---|---|---:|---:|---:|", *map(row, cells)])


def papers_cells(details: Mapping[str, Any]) -> list[Cell]:
    """Return the cells of a result for the paper's plans."""
    return [Cell(**cell) for cell in details["cells"]]


def planned_cells(details: Mapping[str, Any]) -> list[Cell]:
    """Return the cells of a result for pipar's plans."""
    return [Cell(**cell) for cell in details["cells, planned and encoded here"]]


def summary(details: Mapping[str, Any]) -> str:
    """Return the largest overhead of each method: with the paper's plans, the paper's own, and with pipar's plans."""
    lines = ["| overhead at most, s | fl | sfl | pipar |", "|---|---:|---:|---:|"]
    for mode, words in (("classic", "classic DP"), ("pixel", "PixelDP")):
        papers, planned = (
            [_short(_most_s(cells, method, mode)) for method in METHODS]
            for cells in (papers_cells(details), planned_cells(details))
        )
        said = [f"{PAPER[mode][method]:g}" for method in METHODS]
        for what, numbers in (
            (f"{words}, in the paper", said),
            (f"{words}, by its plans, raw", papers),
            (f"{words}, planned and encoded here", planned),
        ):
            lines.append(f"| {what} | {' | '.join(numbers)} |")
    return "\n".join(lines)

"""The planner in the real world: its prediction compared with the following epochs, its choice with a sweep.

Two device processes at a tenth of this machine's speed, a server with one core, three links, two networks, raw values
on the wire. A prediction uses a profile taken right before it and is not calibrated. The speed of a machine changes by
a quarter within minutes, so this is repeated several times, and the median of predicted over measured seconds counts.
Before each profile the machine rests: right after hard work it is faster than in a training whose devices mostly sleep.
For the choice, every plan of a small grid is trained for one epoch; the best of them and the planner's choice are then
trained again, alternating, several times: epochs of one plan differ by a tenth from minute to minute, so the median of
the ratio of both counts. The host of a virtual machine may take a fifth of its time for minutes: measurements during
that are repeated. Rows are kept in `results/prediction.rows.jsonl`: after an interruption the next start resumes there,
if pipar, this measurement and the machine are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeVar

from benchmarks.kept import Kept, sources_hash
from benchmarks.record import RESULTS, Claim, pipar
from pipar.profiling.cache import machine_fingerprint

LINKS = ("4g", "4g+", "wifi")
#: Split points of the sweep, and P = Q.
GRID = {"vgg5": ((1, 2, 3), 5), "mobilenetv3_small": ((1, 2, 4), 15)}
MICRO_BATCHES = (1, 6)
TURNS = 7
PAIRS = 5
_REST_S = 8.0
#: The host's maximum share of this machine's working time, and how often a measurement is repeated.
_TAKEN, _TRIES = 0.04, 5
_SETTINGS = [
    "data.name=synthetic", "data.shape=[3, 32, 32]", "data.samples_per_device=200", "data.validation=0", "data.test=0",
    "devices.count=2", "wire.encoding=raw",
]  # fmt: skip
#: The server uses one core and both devices together a fifth of the other: none of them waits for a core.
_MACHINES = ["server.cores=1", "devices.speed=0.1"]

KEPT = RESULTS / "prediction.rows.jsonl"
Plan = tuple[int, int, int]
T = TypeVar("T")


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    claims: list[Claim] = []
    details: dict[str, object] = {"settings": _SETTINGS, "machines": _MACHINES, "micro_batches": MICRO_BATCHES}
    kept = Kept(KEPT, depends())
    for model, (cuts, layers) in GRID.items():
        for link in LINKS:
            emulated = [*_MACHINES, f"devices.link={link}"]
            row = _Row([*_SETTINGS, f"model.name={model}"], emulated, folder)
            name = f"{model} on {link}"
            grid = [(p, n, 0) for p in cuts for n in MICRO_BATCHES] + [(layers, 1, 0)]
            if name not in kept.rows:
                kept.add(name, row.compare(grid))
            found = kept.rows[name]
            details[name] = found
            claims.append(Claim(f"predicted / measured epoch, {name}", found["ratio"], "", 0.9, 1.1))
            worse = Claim(f"chosen plan / best of the sweep, {name}", found["chosen_over_best"], "", most=1.05)
            claims.append(worse)
            print(claims[-2], claims[-1], sep="\n", flush=True)
    return claims, details


def depends() -> dict[str, object]:
    """Return what rows depend on: all of pipar, this file, and the machine."""
    return {"sources": sources_hash(["."], Path(__file__)), "machine": machine_fingerprint()}


class _Row:
    """One network on one link."""

    def __init__(self, settings: list[str], emulated: list[str], folder: Path) -> None:
        self._settings = [f"--set={setting}" for setting in settings]
        self._emulated = [f"--set={setting}" for setting in emulated]
        self._folder = folder
        self._profile = folder / "profile.json"
        self._disturbed = 0

    def compare(self, grid: list[Plan]) -> dict[str, Any]:
        """Return the predicted and the measured seconds per epoch."""
        chosen = self._undisturbed(self._choose)
        pairs = [self._undisturbed(lambda: self._predict_and_measure(chosen)) for _ in range(PAIRS)]
        sweep = {plan: self._undisturbed(partial(self._epoch_s, plan, 1)) for plan in grid if plan != chosen}
        best = min(sweep, key=lambda plan: sweep[plan])
        turns = [self._undisturbed(lambda: (self._epoch_s(chosen, 3), self._epoch_s(best, 3))) for _ in range(TURNS)]
        return {
            "chosen": chosen,
            "predicted_and_measured_s": pairs,
            "ratio": median(predicted / measured for predicted, measured in pairs),
            "best_of_sweep": best,
            "chosen_and_best_s": turns,
            "chosen_over_best": max(1.0, median(chosen_s / best_s for chosen_s, best_s in turns)),
            "measured_again": self._disturbed,
            "sweep": {f"P={p} N={n}": seconds for (p, n, _), seconds in sweep.items()},
        }

    def _choose(self) -> Plan:
        self._take_profile()
        first = self._pipar(["plan"])["plans"][0]
        return first["split_point"], first["micro_batches"], first["window"]

    def _undisturbed(self, measure: Callable[[], T]) -> T:
        """Return the first measurement that the host does not disturb, or else the least disturbed one."""
        tries: list[tuple[float, T]] = []
        while True:
            before = _clock_ticks()
            found = measure()
            tries.append((_taken(before, _clock_ticks()), found))
            if tries[-1][0] <= _TAKEN or len(tries) == _TRIES:
                return min(tries, key=lambda one: one[0])[1]
            self._disturbed += 1
            time.sleep(_REST_S)

    def _predict_and_measure(self, plan: Plan) -> tuple[float, float]:
        self._take_profile()
        return self._epoch_s(plan, 1, "--timing-only"), self._epoch_s(plan, 2)

    def _take_profile(self) -> None:
        time.sleep(_REST_S)
        pipar(["profile", "--budget=5", *self._settings, "--output", str(self._profile)], self._folder)

    def _epoch_s(self, plan: Plan, epochs: int, *world: str) -> float:
        p, n, window = plan
        settings = [f"--set=plan.split_point={p}", f"--set=plan.micro_batches={n}", f"--set=run.epochs={epochs}"]
        if window:
            settings += ["--set=plan.schedule=1f1b", f"--set=plan.window={window}"]
        result = self._pipar(["run", *settings, *world, "--set=plan.replan=false"])
        return mean(epoch["seconds"] for epoch in result["epochs"])

    def _pipar(self, arguments: list[str]) -> dict[str, Any]:
        profiles = [f"--set=server.profile={self._profile}", f"--set=devices.profile={self._profile}"]
        return pipar([*arguments, *self._settings, *profiles, *self._emulated], self._folder)


def _clock_ticks() -> tuple[int, int]:
    """Return the CPU ticks that this machine has used, and those that its host took; (0, 0) if they are not known."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0, 0
    user, nice, system, _, _, _, _, taken, *_ = map(int, stat.read_text("utf-8").split("\n", 1)[0].split()[1:])
    return user + nice + system, taken


def _taken(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Return the host's share of the time in which this machine had work to do."""
    computed, taken = (now - then for now, then in zip(after, before, strict=True))
    return taken / (taken + computed) if taken else 0.0

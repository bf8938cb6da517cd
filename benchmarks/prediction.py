"""The planner in the real world: its prediction against the epochs that follow, its choice against a sweep.

Two device processes at a tenth of this machine's speed, a server with one core, three links, two networks, raw values
on the wire. A prediction is made from a profile that was taken right before and is not re-fitted; machines change
their speed by a quarter within minutes, so this is done several times in turn, and the median of what was predicted
over what was measured counts. Before each profile the machine rests: it is quicker right behind hard
work than in a training whose devices sleep most of the time. For the choice, every plan of a small grid is trained for
one epoch; the best of them and the planner's choice are then trained again, one right behind the other, several times:
epochs of one plan differ by a tenth from minute to minute, so the median of what one took over what the other took
counts. The host of a virtual machine may take a fifth of it for minutes: what is measured meanwhile is measured again.
Rows are kept in `results/prediction.rows.jsonl`: after an interruption the next start takes up where this one was, as
long as pipar, this measurement and the machine are the same.
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
#: Of the time that this machine wanted to compute in, what its host may take; and how often it is waited for.
_TAKEN, _TRIES = 0.04, 5
_SETTINGS = [
    "data.name=synthetic", "data.shape=[3, 32, 32]", "data.samples_per_device=200", "data.validation=0", "data.test=0",
    "devices.count=2", "wire.encoding=raw",
]  # fmt: skip
#: The server computes on one core and both devices together on a fifth of the other: nobody waits for this machine.
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
    """Return what rows depend on: all of pipar, this file, and the machine that it all runs on."""
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
        """Return what the planner said and what was measured, in seconds an epoch."""
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
        """Return the first measurement that the host leaves alone, or of several the least disturbed."""
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
    """Return how much this machine has computed so far, and what its host took meanwhile; nothing if nobody tells."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0, 0
    user, nice, system, _, _, _, _, taken, *_ = map(int, stat.read_text("utf-8").split("\n", 1)[0].split()[1:])
    return user + nice + system, taken


def _taken(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Return the share that the host took of the time in which this machine had something to compute."""
    computed, taken = (now - then for now, then in zip(after, before, strict=True))
    return taken / (taken + computed) if taken else 0.0

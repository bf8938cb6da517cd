"""The planner in the real world: its prediction against the epoch that follows, its choice against a sweep.

Two device processes at a fifth of this machine's speed, three links, two networks. The profile is taken before and not
re-fitted. Every plan of a small grid is trained for one epoch; the best of them and the planner's choice are then
trained in turn, three epochs each time, so that the luck of a single epoch does not decide.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.record import Claim, pipar

LINKS = ("4g", "4g+", "wifi")
GRID = {"vgg5": ((1, 2, 3), 5), "mobilenetv3_small": ((1, 2, 4, 8), 15)}  # split points, and P = Q
MICRO_BATCHES = (1, 3, 6, 12)
TURNS = 2
_SETTINGS = [
    "data.name=synthetic", "data.shape=[3, 32, 32]", "data.samples_per_device=300", "data.validation=0", "data.test=0",
    "devices.count=2", "devices.speed=0.2",
]  # fmt: skip

Plan = tuple[int, int, int]


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    claims: list[Claim] = []
    details: dict[str, object] = {"settings": _SETTINGS, "micro_batches": MICRO_BATCHES}
    for model, (cuts, layers) in GRID.items():
        profile = folder / f"{model}.json"
        settings = [f"--set={setting}" for setting in [*_SETTINGS, f"model.name={model}"]]
        pipar(["profile", *settings, "--output", str(profile)], folder)
        settings += [f"--set=server.profile={profile}", f"--set=devices.profile={profile}", "--set=devices.speed=0.2"]
        for link in LINKS:
            row = _Row([*settings, f"--set=devices.link={link}"], folder)
            found = row.compare([(p, n, 0) for p in cuts for n in MICRO_BATCHES] + [(layers, 1, 0)])
            details[f"{model} on {link}"] = found
            name = f"{model} on {link}"
            claims.append(
                Claim(f"predicted / measured epoch, {name}", found["predicted_s"] / found["chosen_s"], "", 0.9, 1.1)
            )
            claims.append(
                Claim(f"chosen plan / best of the sweep, {name}", found["chosen_s"] / found["best_s"], "", most=1.05)
            )
            print(claims[-2], claims[-1], sep="\n", flush=True)
    return claims, details


class _Row:
    """One network on one link."""

    def __init__(self, settings: list[str], folder: Path) -> None:
        self._settings = settings
        self._folder = folder

    def compare(self, grid: list[Plan]) -> dict[str, Any]:
        """Return what the planner said and what was measured, in seconds an epoch."""
        planned = pipar(["plan", *self._settings], self._folder)
        first = planned["plans"][0]
        chosen = (first["split_point"], first["micro_batches"], first["window"])
        sweep = {plan: self._epoch_s(plan, 1) for plan in grid if plan != chosen}
        best = min(sweep, key=lambda plan: sweep[plan])
        turns = [(self._epoch_s(chosen, 3), self._epoch_s(best, 3)) for _ in range(TURNS)]
        chosen_s, best_s = mean(turn[0] for turn in turns), mean(turn[1] for turn in turns)
        return {
            "chosen": chosen,
            "predicted_s": planned["predicted_epoch_s"],
            "chosen_s": chosen_s,
            "best_of_sweep": best if best_s < chosen_s else chosen,
            "best_s": min(best_s, chosen_s),
            "sweep": {f"P={p} N={n}": seconds for (p, n, _), seconds in sweep.items()},
        }

    def _epoch_s(self, plan: Plan, epochs: int) -> float:
        p, n, window = plan
        settings = [f"--set=plan.split_point={p}", f"--set=plan.micro_batches={n}", f"--set=run.epochs={epochs}"]
        if window:
            settings += ["--set=plan.schedule=1f1b", f"--set=plan.window={window}"]
        result = pipar(["run", *self._settings, *settings, "--set=plan.replan=false"], self._folder)
        return mean(epoch["seconds"] for epoch in result["epochs"])

"""Cells and experiments that take no time, for tests of the code around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reproduction.efficiency import by_all_methods
from reproduction.experiment import Cell, Outcome
from reproduction.testbed import Trial

#: Two boards with two batches each: milliseconds to plan, to run and to search.
TINY = Trial("vgg5", "mnist", "wifi", devices=2, samples=40, batch_size=20)


def cells(*seeds: int) -> list[Cell]:
    """Return cells that differ in their seeds."""
    return [Cell("timing", {"run": {"seed": seed}}, labels={"seed": seed}) for seed in seeds]


def timing(
    seconds: float | None, *, server_idle_s: float = 1.0, plan: str = "P=1 N=4", is_whole: bool = False
) -> dict[str, Any]:
    """Return the result of a timing cell; without seconds, that it does not fit."""
    if seconds is None:
        return {"fits": False, "why": "too little memory"}
    idle = {"server_idle_s": server_idle_s, "device_idle_s": 1.0}
    busy = {"plan": plan, "is_whole": is_whole, "utilisation": {"server": 0.5}}
    return {"fits": True, "seconds": seconds, **busy, **idle}


def outcomes(trial: Trial, by_method: Mapping[str, dict[str, Any]], **labels: Any) -> list[Outcome]:
    """Return made-up results of a training with all methods."""
    return [Outcome(cell, by_method[cell.labels["method"]]) for cell in by_all_methods([trial], **labels)]

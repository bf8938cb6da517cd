"""The planner compared with exhaustive search in worlds with unknown costs; the paper's two tables of parameters.

100 Raspberry Pi 3B and an 8-core i7-11850H, six networks on the paper's datasets, three links; the same with devices 5
and 20 times as fast, and with half the devices at half the speed. The true costs are perturbed by up to 15 % per layer
and jittered by 5 % per stage, from seeds that the planner does not know. Each seed is one world; there are several,
because in a single world it is a matter of chance which of two similar plans is better.

All rows take about twenty minutes on two cores. The rows of a training are printed and kept in
`results/selection.rows.jsonl` after it was scored in all worlds: after an interruption the next start resumes there, if
the planner is the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import reproduction
from benchmarks.kept import Kept, sources_hash
from benchmarks.record import RESULTS, Claim
from pipar.job.job import Job
from pipar.job.prepare import unplanned_timing_only_job
from pipar.launch.worker_pool import map_in_workers
from pipar.planner.fleet import Fleet
from pipar.planner.search import search_plans
from pipar.planner.simulator import simulate, simulate_within
from pipar.settings.config_file import config_from
from pipar.settings.links import Link
from reproduction.plan_scores import PlanScores, PlansToScore, score_plans
from reproduction.testbed import DATASETS, LINKS, SAMPLES

FLEETS = {"Pi 3B": (1.0, 1.0), "5 x Pi 3B": (5.0, 5.0), "20 x Pi 3B": (20.0, 20.0), "half at half speed": (1.0, 0.5)}
#: With two kinds of devices, all pairs of their plans are searched: for each kind, every P with these N.
GRID = (1, 2, 3, 4, 8, 16)
#: One world each.
SEEDS = (20240612, 1, 2)
#: Epochs that the server learns from, each with the plans that the previous one led to. In a training, new plans take
#: effect two epochs after the epoch that they were learned from.
EPOCHS = 5
#: The rows so far, one per line, with a hash of their sources.
KEPT = RESULTS / "selection.rows.jsonl"
#: The sources of planner and scoring: if a line of them changes, kept rows are ignored.
SOURCES = (
    "planner", "profiling", "wire", "execution", "job", "methods.py", "config.py", "random_streams.py", "units.py",
)  # fmt: skip

SCORING_SOURCES = tuple(
    Path(reproduction.__file__).with_name(name) for name in ("perturbed_times.py", "plan_scores.py", "testbed.py")
)

#: (fleet, network, dataset, link, seed of the world) of one training.
Case = tuple[str, str, str, str, int]


@dataclass(frozen=True)
class Training:
    """The training of a row."""

    fleet: str
    model: str
    dataset: str
    link: str
    world: int  # its seed


@dataclass(frozen=True)
class Row(PlanScores, Training):
    """One training, planned and searched: its name, then how good the plan is."""


def rows(fleets: tuple[str, ...] = tuple(FLEETS)) -> list[Case]:
    """Return (fleet, network, dataset, link, world) of every training."""
    trainings = [(m, data, link) for m in DATASETS for data in DATASETS[m] for link in LINKS]
    return [(fleet, *training, seed) for fleet in fleets for training in trainings for seed in SEEDS]


def make_fleet(fleet: str, model: str, dataset: str, link: str, devices: int = 100) -> Fleet:
    """Return the fleet of a row, from named machines only."""
    job = unplanned_timing_only_job(config_from(_tree(fleet, model, dataset, link, devices)))
    assert isinstance(job, Job)
    return job.fleet()


def _tree(fleet: str, model: str, dataset: str, link: str, devices: int) -> dict[str, Any]:
    first, second = FLEETS[fleet]
    board = {"profile": "raspberry-pi-3b", "link": link}
    groups = [{"name": "board", "count": devices, "speed": first, **board}]
    if first != second:
        groups = [
            {"name": name, "count": devices // 2, "speed": speed, **board}
            for name, speed in (("fast", first), ("slow", second))
        ]
    return {
        "model": {"name": model, "norm": "batch"},
        "data": {"name": dataset, "samples_per_device": SAMPLES[dataset], "validation": 0, "test": 0},
        "server": {"profile": "i7-11850h"},
        "wire": {"encoding": "raw"},  # as in the paper
        "devices": groups,
    }


def score_training(training: tuple[str, str, str, str], worlds: Sequence[int], devices: int = 100) -> list[Row]:
    """Return how good the planner's choice for one training is in each of these worlds."""
    fleet = make_fleet(*training, devices=devices)
    grid = None if len(fleet.device_kinds()) == 1 else GRID
    before = PlansToScore.of(fleet, grid)
    return [Row(*training, seed, **asdict(score_plans(fleet, before, seed=seed, epochs=EPOCHS))) for seed in worlds]


# --- rows that survive an interruption


def score_all(cases: Iterable[Case], devices: int = 100) -> Iterator[Row]:
    """Yield the rows of these trainings as they are finished, from one process per core."""
    worlds: dict[tuple[str, str, str, str], list[int]] = {}
    for case in cases:
        worlds.setdefault(case[:4], []).append(case[4])
    score = partial(_score_in_worlds, devices=devices)
    for rows in map_in_workers(score, worlds.items(), os.cpu_count() or 1, preload=__name__):
        yield from rows


def _score_in_worlds(item: tuple[tuple[str, str, str, str], list[int]], devices: int) -> list[Row]:
    return score_training(*item, devices)


def resumed(
    cases: list[Case],
    kept: Path = KEPT,
    *,
    devices: int = 100,
    scorer: Callable[[Iterable[Case], int], Iterator[Row]] = score_all,
) -> list[Row]:
    """Return the rows of these trainings, in order; kept rows are not scored again."""
    depends = {"devices": devices, "sources": sources_hash(SOURCES, Path(__file__), *SCORING_SOURCES)}
    stored = Kept(kept, depends)
    found = {_case(row): row for row in (Row(**fields) for fields in stored.rows.values())}
    missing = [case for case in cases if case not in found]
    print(f"{len(cases) - len(missing)} of {len(cases)} rows are in {kept.name}", flush=True)
    if missing:
        for row in scorer(missing, devices):
            stored.add(", ".join(map(str, _case(row))), asdict(row))
            found[_case(row)] = row
            print(f"{sum(case in found for case in cases):4} of {len(cases)}  {_line(row)}", flush=True)
    return [found[case] for case in cases]


def _case(row: Row) -> Case:
    return (row.fleet, row.model, row.dataset, row.link, row.world)


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:  # noqa: ARG001
    found = resumed(rows())
    _write_table(found)
    claims = []
    for name in FLEETS:
        of_fleet = [row for row in found if row.fleet == name]
        for when, scores in (
            ("at the start", [row.score for row in of_fleet]),
            (f"learned from {EPOCHS} epochs", [row.learned_score for row in of_fleet]),
        ):
            good = sum(score >= 0.995 for score in scores) / len(scores)
            claims.append(Claim(f"{name}: lowest score of {len(scores)} rows, {when}", min(scores), "", least=0.98))
            claims.append(Claim(f"{name}: rows with a score of 0.995 or more, {when}", 100 * good, "%", least=90))
        known = [row.profiled_score for row in of_fleet]
        good = sum(score >= 0.995 for score in known) / len(known)
        claims.append(Claim(f"{name}: lowest score of the best plans by profiles", min(known), ""))
        claims.append(Claim(f"{name}: rows of these with a score of 0.995 or more", 100 * good, "%"))
    slowest = max(row.planning_s for row in found)
    claims.append(Claim("longest planning of 100 devices, CPU seconds of one core", slowest, "s", most=10))
    own_s = {model: planning_of_own_links_s(model) for model in DATASETS}
    of_own = "longest planning of 100 devices with different links, CPU seconds of one core"
    claims.append(Claim(of_own, max(own_s.values()), "s", most=10))
    return claims, {
        "rows": [asdict(row) for row in found],
        "grid_of_two_kinds": GRID,
        "worlds": SEEDS,
        "own_links_s": own_s,
    }


def planning_of_own_links_s(model: str, devices: int = 100) -> float:
    """Return the CPU seconds of planning for boards on links from 5 to 100 Mbit/s, all of them different."""
    fleet = make_fleet("Pi 3B", model, DATASETS[model][0], "wifi", devices)
    rates = [5e6 * 20 ** (number / devices) for number in range(devices)]
    links = [Link(up_bps=rate, down_bps=rate) for rate in rates]
    members = tuple(replace(member, link=link) for member, link in zip(fleet.members, links, strict=True))
    began = time.process_time()
    search_plans(replace(fleet, members=members), simulate, within=simulate_within)
    return time.process_time() - began


def _write_table(found: list[Row]) -> None:
    lines = [
        "# Plans against exhaustive search",
        "",
        "`python -m benchmarks selection`; `benchmarks/selection.py` says what is compared. Seconds are an epoch's",
        "in the perturbed world. Where there are two kinds of devices, the first plan is the fast ones'.",
        "",
        "| devices | network | data | link | world | chosen | s | best | s | score | later | score | "
        "best by profiles | score | by the paper | its score | planned in s |",
        f"|{'---|' * 17}",
    ]
    lines += [_line(row) for row in found]
    (RESULTS / "selection.md").write_text("\n".join(lines) + "\n")


def _line(r: Row) -> str:
    return (
        f"| {r.fleet} | {r.model} | {r.dataset} | {r.link} | {r.world} | {r.chosen} | {r.chosen_s:.2f} | {r.best} "
        f"| {r.best_s:.2f} | {r.score:.4f} | {r.learned} | {r.learned_score:.4f} "
        f"| {r.profiled} | {r.profiled_score:.4f} | {r.paper} | {r.paper_score:.4f} | {r.planning_s:.1f} |"
    )

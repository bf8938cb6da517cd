"""What would make a training faster: its bottleneck, and the planner's predictions for changed conditions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipar.errors import PlanError
from pipar.job.job import Job
from pipar.job.plans import plans_by_estimate
from pipar.methods import METHODS, Plan
from pipar.planner.encoding_choice import reencoded
from pipar.planner.fleet import Fleet
from pipar.planner.search import search_plans
from pipar.planner.search_settings import SearchSettings
from pipar.planner.simulator import simulate
from pipar.planner.timing import FEWEST_ITERATIONS, LANES, STEADY_ITERATIONS, Timing, steady_epoch_s
from pipar.settings.wording import plan_text, plans_text

Plans = Mapping[str, Plan]
#: A case to predict: the list for its result, its name, its fleet, and plans to start from.
_Case = tuple[str, str, Fleet, Plans | None]

#: After this many seconds of computing, optional cases are skipped: the user is waiting for the report.
_PATIENCE_S = 2.0
#: A case needs its approximate time, not the better one of two close plans.
_SETTINGS = SearchSettings(devices=16, micro_batch_budget=5_000, worlds=0, iterations=FEWEST_ITERATIONS)
#: The methods that others are compared with.
_BASES = ("fl", "sfl")
#: Split points to try on each side of the chosen one.
_NEIGHBOURS = 2


def what_if(job: Job, plans: Plans | None = None, fleet: Fleet | None = None) -> dict[str, Any]:
    """Return the planner's predictions for the job with its current `plans`, and for changed conditions.

    `fleet` has machines and links as measured in the training; without it, as configured. Every case is planned from
    scratch, even if the configuration sets P or N.
    """
    plans = job.plans if plans is None else plans
    if job.method.shares_server_model:
        words = f"{job.method.name} shares one server-side model, which the planner's simulator does not support"
        return {"note": f"{words}: there are no predictions of what would be faster."}
    fleet = fleet or job.fleet()
    few = fleet.sampled(_SETTINGS.devices)
    timing = simulate(few, plans, STEADY_ITERATIONS)
    document: dict[str, Any] = {
        "plan": _text(plans, fleet.layers),
        "epoch_s": steady_epoch_s(simulate, few, plans),
        "bottleneck": timing.bottleneck,
        "utilisation": {lane: min(1.0, timing.busy_s[lane] / timing.epoch_s) for lane in LANES},
        "changes": [],
        "split_points": [],
        "paper": _paper(job, fleet, few),
    }
    free = _free(fleet)
    document["methods"] = _by_other_methods(free)
    changes: list[_Case] = [("changes", words, changed, plans) for words, changed in _changes(free)]
    cuts: list[_Case] = [("split_points", f"P={p}", _cut_at(free, p), None) for p in _split_points(job, plans)]
    always = [*changes[:-1], *cuts[:1]]  # bandwidth, server, another P
    maybe = [changes[-1], *cuts[1:]]
    until, skipped = time.process_time() + _PATIENCE_S, 0
    for place, (kind, words, changed, start) in enumerate([*always, *maybe]):
        if place < len(always) or time.process_time() < until:
            document[kind] += _answer(words, changed, start)
        else:
            skipped += 1
    cases = len(always) + len(maybe)
    notes = [f"{skipped} of {cases} cases were skipped: planning took too long."] if skipped else []
    if fleet.real_links and not _has_rates(fleet):
        notes.append("Too little was sent to measure the links: there is no prediction for twice the bandwidth.")
    document["note"] = " ".join(notes)
    return document


def _by_other_methods(fleet: Fleet) -> dict[str, float]:
    """Return the epoch's seconds with the methods of comparison, each with its best plans."""
    names = [name for name in _BASES if name != fleet.method.name]
    answers = {name: _answer(name, replace(fleet, method=METHODS[name]), None) for name in names}
    return {name: answer[0]["epoch_s"] for name, answer in answers.items() if answer}


def _answer(words: str, fleet: Fleet, start: Plans | None) -> list[dict[str, Any]]:
    """Return the best plans for a changed fleet, maybe the current ones, and their seconds; [] if there are none."""
    try:
        found = [search_plans(fleet, _simulate_briefly, settings=_SETTINGS).plans]
    except PlanError:  # too little memory, for example
        return []
    found += [reencoded(fleet, start)] if start is not None else []
    few = fleet.sampled(_SETTINGS.devices)
    seconds, plans = min(((steady_epoch_s(simulate, few, plans), plans) for plans in found), key=lambda one: one[0])
    return [{"change": words, "plan": _text(plans, fleet.layers), "epoch_s": seconds}]


def _simulate_briefly(fleet: Fleet, plans: Plans, iterations: int | None) -> Timing:
    """Simulate, but never a whole epoch, which may have thousands of iterations."""
    return simulate(fleet, plans, STEADY_ITERATIONS if iterations is None else iterations)


def _text(plans: Plans, layers: int) -> str:
    return plans_text(plan_text(plan, layers) for plan in plans.values())


def _paper(job: Job, fleet: Fleet, few: Fleet) -> dict[str, Any]:
    """Return the plans that the paper's estimate would have chosen, and their seconds."""
    plans = plans_by_estimate(job, fleet)
    return {"plan": _text(plans, fleet.layers), "epoch_s": steady_epoch_s(simulate, few, plans)}


# --- changed conditions


def _changes(fleet: Fleet) -> list[tuple[str, Fleet]]:
    changes = [
        ("the server twice as fast", fleet.slower(server=0.5)),
        ("devices twice as fast", fleet.slower(devices=0.5)),
    ]
    if _has_rates(fleet):
        members = tuple(replace(member, link=member.link.times(2)) for member in fleet.members)
        changes.insert(0, ("twice the bandwidth", replace(fleet, members=members)))
    return changes


def _has_rates(fleet: Fleet) -> bool:
    return any(member.link.up_bps or member.link.down_bps for member in fleet.members)


def _free(fleet: Fleet) -> Fleet:
    """Return the fleet with every P and N to be chosen."""
    members = tuple(replace(member, split_point="auto", micro_batches="auto") for member in fleet.members)
    return replace(fleet, members=members)


def _cut_at(fleet: Fleet, split_point: int) -> Fleet:
    members = tuple(replace(member, split_point=split_point) for member in fleet.members)
    return replace(fleet, members=members)


def _split_points(job: Job, plans: Plans) -> list[int]:
    """Return the split points next to the most frequent one, nearest first; none if the method does not split."""
    if not job.method.splits:
        return []
    ((usual, _),) = Counter(plan.split_point for plan in plans.values()).most_common(1)
    others = [p for p in range(1, job.layers + 1) if 0 < abs(p - usual) <= _NEIGHBOURS]
    return sorted(others, key=lambda p: (abs(p - usual), p))

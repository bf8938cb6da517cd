"""The cost of choosing new plans in a training on links that change."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping

from pipar.events import Event, Replanned
from pipar.job.job import Job
from pipar.launch.virtual import train_timing_only
from pipar.methods import Plan
from pipar.planner.background_search import search_again
from pipar.planner.fleet import Fleet
from pipar.planner.search_settings import SearchSettings


def replanning_cost(job: Job) -> dict[str, float | int]:
    """Train a job timing-only; return its epochs and seconds, and the number and duration of searches.

    Durations of searches are CPU seconds: searches run in the background, and training does not wait for them.
    """
    searches: list[float] = []
    seconds: list[float] = []
    replans: list[Replanned] = []

    async def search(fleet: Fleet, start: Mapping[str, Plan], settings: SearchSettings) -> Mapping[str, Plan]:
        # In production a search has its own process, so it must not pay for garbage collection of the training's heap.
        gc.freeze()
        began = time.process_time()
        try:
            return search_again(fleet, start, settings)
        finally:
            searches.append(time.process_time() - began)
            gc.unfreeze()

    def observe(event: Event) -> None:
        if isinstance(event, Replanned):
            replans.append(event)

    train_timing_only(job, lambda result, _: seconds.append(result.seconds), observe, search=search)
    return {
        "epochs": len(seconds),
        "training_s": sum(seconds),
        "searches": len(searches),
        "planning_s": sum(searches),
        "replans": len(replans),
    }

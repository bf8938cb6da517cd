"""Many simulated worlds, one after another or in several processes, and what is told of those that fail."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any

from simulation.plan import draw_scenario

_LAST_EVENTS = 40


@dataclass(frozen=True)
class Report:
    """What is told of one seed; an Outcome without what only its own process can hold."""

    seed: int
    method: str
    digest: str
    seconds: float  # of virtual time
    faults: tuple[str, ...]
    restarts: int
    invariant: str | None = None  # that does not hold
    sentence: str = ""
    training: str = ""
    events: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return self.invariant is None

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def try_seed(seed: int, devices: int, rounds: int, *, verbose: bool = False) -> Report:
    """Simulate the world of a seed; all its events are told if `verbose`, the last ones if something is wrong."""
    from simulation.world import simulate

    outcome = simulate(draw_scenario(seed, devices, rounds))
    violation = outcome.violation
    events = outcome.events if verbose else outcome.events[-_LAST_EVENTS:] if violation is not None else ()
    return Report(
        seed,
        outcome.scenario.method,
        outcome.digest,
        outcome.seconds,
        tuple(map(str, outcome.scenario.faults)),
        outcome.restarts,
        None if violation is None else violation.invariant,
        "" if violation is None else violation.sentence,
        str(outcome.scenario),
        tuple(events),
    )


def try_seeds(seeds: Iterable[int], devices: int, rounds: int, processes: int) -> Iterator[Report]:
    """Yield the report of every seed, as they come in."""
    attempt = partial(try_seed, devices=devices, rounds=rounds)
    if processes == 1:
        _prepare()
        yield from map(attempt, seeds)
        return
    # torch does not survive a fork behind its threads.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn, initializer=_prepare) as pool:
        try:
            for done in as_completed([pool.submit(attempt, seed) for seed in seeds]):
                yield done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _prepare() -> None:
    """Look for garbage among a world's own objects only: torch's take a fifth of the time."""
    import simulation.world  # noqa: F401

    gc.collect()
    gc.freeze()

"""Simulating many worlds, one after another or in several processes, and reporting those that fail."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipar.launch.worker_pool import map_in_workers
from simulation.scenario import draw_scenario

_LAST_EVENTS = 40


@dataclass(frozen=True)
class Report:
    """The outcome of one seed, in a form that other processes can receive."""

    seed: int
    method: str
    digest: str
    seconds: float  # of virtual time
    faults: tuple[str, ...]
    restarts: int
    invariant: str | None = None  # that is violated
    sentence: str = ""
    training: str = ""
    events: tuple[str, ...] = ()
    samples: tuple[tuple[float, int, int], ...] = ()  # of a long world: round, resident bytes and open files

    @property
    def holds(self) -> bool:
        return self.invariant is None

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def try_seed(seed: int, devices: int, rounds: int, *, verbose: bool = False) -> Report:
    """Simulate the world of a seed; report all its events if `verbose`, the last ones if an invariant is violated."""
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
        tuple((one.at, one.rss_bytes, one.open_files) for one in outcome.samples),
    )


def try_seeds(seeds: Iterable[int], devices: int, rounds: int, processes: int) -> Iterator[Report]:
    """Yield the report of every seed as it finishes."""
    attempt = partial(try_seed, devices=devices, rounds=rounds)
    if processes > 1:
        yield from map_in_workers(attempt, seeds, processes, preload="simulation.world", prepare=_prepare)
        return
    _prepare()
    yield from map(attempt, seeds)


def _prepare() -> None:
    """Exclude torch's objects from garbage collection: they would take a fifth of the time."""
    import simulation.world  # noqa: F401

    gc.collect()
    gc.freeze()

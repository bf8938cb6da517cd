"""The paper's recursion over the stage graph, stage by stage: what programs and closed forms are compared with."""

from __future__ import annotations

from collections.abc import Callable

from pipar.execution.stages import Stage, all_stages, previous


def end_times(micro_batches: int, seconds: Callable[[Stage], float]) -> dict[Stage, float]:
    """Return T(r) = t(r) + max over previous T(r') for every stage, from one sweep; paper III-C, phase 2."""
    ends: dict[Stage, float] = {}
    for stage in all_stages(micro_batches):
        start = max((ends[before] for before in previous(stage, micro_batches)), default=0.0)
        ends[stage] = start + seconds(stage)
    return ends

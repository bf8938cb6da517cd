"""The paper's table of stages and its recursion, stage by stage: what programs and closed forms are compared with."""

from __future__ import annotations

from collections.abc import Callable

from pipar.execution.stage_graph import Stage
from pipar.methods import Plan
from pipar.planner.costs import Costs
from pipar.planner.paper_selection import StageTimes, full_batch_times
from pipar.profiling.profile import Profile
from pipar.settings.links import Link

#: The paper's six kinds, in the order in which a micro-batch passes them.
KINDS = ("fc", "u", "fs", "bs", "d", "bc")


def parse(text: str) -> Stage:
    """Return the stage that prints as this text."""
    kind = text.rstrip("0123456789")
    return Stage(kind, int(text.removeprefix(kind)))


def previous(stage: Stage, micro_batches: int) -> tuple[Stage, ...]:
    """Return the stages that have to end before this one starts, with N micro-batches in the iteration."""
    n = stage.micro_batch
    match stage.kind:
        case "fc":
            needed = [Stage("fc", n - 1)]
        case "u":
            needed = [Stage("u", n - 1), Stage("fc", n)]
        case "fs":
            needed = [Stage("u", n), Stage("bs", n - 1)]
        case "bs":
            needed = [Stage("fs", n)]
        case "d":
            needed = [Stage("d", n - 1), Stage("bs", n)]
        case "bc":
            # The first backward waits for the last forward: all forwards first.
            needed = [Stage("bc", n - 1) if n > 1 else Stage("fc", micro_batches), Stage("d", n)]
        case _:
            raise AssertionError(stage)
    return tuple(before for before in needed if before.micro_batch >= 1)


def all_stages(micro_batches: int) -> list[Stage]:
    """Return the 6N stages of an iteration, each after all the stages that it waits for."""
    order = [Stage("fc", n) for n in range(1, micro_batches + 1)]
    for n in range(1, micro_batches + 1):
        order += [Stage(kind, n) for kind in ("u", "fs", "bs", "d", "bc")]
    return order


def following(stage: Stage, micro_batches: int) -> tuple[Stage, ...]:
    """Return the stages that wait for this one: the table's third column, derived from its second."""
    return tuple(later for later in all_stages(micro_batches) if stage in previous(later, micro_batches))


def end_times(micro_batches: int, seconds: Callable[[Stage], float]) -> dict[Stage, float]:
    """Return T(r) = t(r) + max over previous T(r') for every stage, from one sweep; paper III-C, phase 2."""
    ends: dict[Stage, float] = {}
    for stage in all_stages(micro_batches):
        start = max((ends[before] for before in previous(stage, micro_batches)), default=0.0)
        ends[stage] = start + seconds(stage)
    return ends


def stage_times(
    device_profile: Profile,
    server_profile: Profile,
    plan: Plan,
    batch_size: int,
    link: Link,
    speeds: tuple[float, float] = (1.0, 1.0),
) -> StageTimes:
    """Return each stage's time for one of N equal micro-batches; `speeds` are the device's and the server's."""
    device, server = Costs(device_profile, speeds[0]), Costs(server_profile, speeds[1])
    return full_batch_times(device, server, plan.split_point, batch_size, link).divided_by(plan.micro_batches)


def recursion_s(times: StageTimes, micro_batches: int) -> float:
    """Return T(b_c N), the end of the iteration, by the table of stages."""
    ends = end_times(micro_batches, lambda stage: float(getattr(times, stage.kind)))
    assert ends[Stage("bc", micro_batches)] == max(ends.values())
    return ends[Stage("bc", micro_batches)]


def closed_form_s(times: StageTimes, micro_batches: int) -> float:
    """Return T(b_c N) by the closed form of the recursion, which docs/explanation/planning.md shows.

    A path through the graph either takes the edge from the last forward to the first backward, and is N (f_c + b_c)
    long, or steps lane by lane: each lane once and the slowest one N - 1 times more.
    """
    served = times.fs + times.bs
    once = times.fc + times.u + served + times.d + times.bc
    slowest = max(times.fc, times.u, served, times.d, times.bc)
    return max(micro_batches * (times.fc + times.bc), once + (micro_batches - 1) * slowest)

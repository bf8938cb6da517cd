"""All plans that one device may have, each with the least time that it can take."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from heapq import heapreplace
from itertools import chain, repeat

from pipar.errors import PlanError, TooLittleMemoryError
from pipar.execution.work import Work
from pipar.methods import METHODS, Method, Plan, check_plan
from pipar.planner.encoding_choice import with_encodings
from pipar.planner.fleet import Auto, Fleet, Member, PlansByKind
from pipar.profiling.memory import BASE_BYTES, fitting_window, replica_bytes, training_bytes

#: Whether a {P, N} is considered.
Allow = Callable[[int, int], bool]


@dataclass(frozen=True)
class Candidate:
    """A plan of one device, and the least seconds of an iteration with it."""

    plan: Plan
    alone_s: float  # if no other device used the server
    lane_s: float  # on the busiest of its own lanes
    server_s: float  # on the server's cores, which all devices share


def candidates(fleet: Fleet, member: Member, only: Allow | None = None) -> list[Candidate]:
    """Return every allowed plan with the least time that it can take; `only` restricts the {P, N}."""
    times = cache(partial(_piece_times, fleet, member))  # many N give micro-batches of one size
    least_s = partial(_least_s, fleet, member, times)
    return [Candidate(plan, *least_s(plan)) for plan in allowed_plans(fleet, member, only)]


def allowed_plans(fleet: Fleet, member: Member, only: Allow | None = None) -> list[Plan]:
    """Return every plan that the method, the configuration, the leakage limit and the device's memory allow.

    Each {P, N} comes once, with the best encodings for it; `only` restricts the {P, N}. Raises if there is none.
    """
    pairs = (pair for pair in _pairs(fleet, member) if only is None or only(*pair))
    in_memory = [plan for p, n in pairs for plan in _in_memory(fleet, member, p, n)]
    plans = [plan for plan in in_memory if _fits_server(fleet, plan)]
    if not plans:
        if problem := _too_leaky(fleet, member) or _too_few_layers(fleet, member):
            raise PlanError(problem)
        if in_memory:
            raise PlanError(_too_large_for_server(fleet, member, in_memory))
        raise TooLittleMemoryError(_too_little_memory(fleet, member))
    return with_encodings(fleet, member, plans)


def check_given(
    method: Method,
    split_point: int | Auto,
    micro_batches: int | Auto,
    *,
    layers: int,
    batch_size: int,
    model: str,
) -> None:
    """Raise PlanError if a configured P or N that the method uses does not fit the network or the batch."""
    p = split_point if method.splits and split_point != "auto" else layers
    n = micro_batches if method.pipelines and micro_batches != "auto" else 1
    check_plan(Plan(p, n), layers=layers, batch_size=batch_size, model=model)


def plans_in_common(fleet: Fleet) -> list[PlansByKind]:
    """Return the plans with each split point that all devices may have: a shared server-side model has one cut."""
    options = [{plan.split_point: plan for plan in allowed_plans(fleet, kind[0])} for kind in fleet.device_kinds()]
    common = set.intersection(*map(set, options))
    if not common:
        raise PlanError(
            f"{fleet.method.name} shares one server-side model, but no split point is allowed for all devices: "
            "give them the same one, or use sfl or pipar."
        )
    return [tuple(of[cut] for of in options) for cut in sorted(common)]


def _pairs(fleet: Fleet, member: Member) -> Iterator[tuple[int, int]]:
    """Yield every distinct {P, N}. P = Q has N = 1: there is nothing to overlap."""
    layers, measured = fleet.layers, len(member.costs.profile.layers)
    for p in _split_points(fleet, member):
        if p > measured:
            continue  # the paper's Q': the device could not be profiled with that many layers
        most = len(fleet.pieces(fleet.batch_size, fleet.batch_size))
        if p == layers or not fleet.method.pipelines:
            yield p, 1
        elif member.micro_batches != "auto":
            yield p, member.micro_batches
        else:
            yield from ((p, n) for n in range(1, most + 1))


def _split_points(fleet: Fleet, member: Member) -> list[int]:
    return [p for p in _with_leaky_ones(fleet, member) if p not in fleet.leaky_cuts]


def _with_leaky_ones(fleet: Fleet, member: Member) -> range:
    """Return the split points that the method and the configuration allow, before leakage is considered."""
    layers = fleet.layers
    if not fleet.method.splits:
        return range(layers, layers + 1)
    if member.split_point != "auto":
        return range(member.split_point, member.split_point + 1)
    # A method that always splits, or a configured number of micro-batches, excludes P = Q.
    cuts_only = not fleet.method.pipelines or member.micro_batches not in ("auto", 1)
    return range(1, layers) if cuts_only and layers > 1 else range(1, layers + 1)


def needed_bytes(fleet: Fleet, member: Member, plan: Plan) -> int:
    """Return the bytes of memory that a device's process needs to train with a plan."""
    return training_bytes(
        member.costs.profile,
        plan,
        fleet.batch_size,
        batch_statistics=fleet.batch_statistics,
        keeps_base=fleet.keeps_base(member),
    )


def _replica_bytes(fleet: Fleet, plan: Plan) -> int:
    return replica_bytes(fleet.server.profile, plan, fleet.batch_size, batch_statistics=fleet.batch_statistics)


def _fits_server(fleet: Fleet, plan: Plan) -> bool:
    """Return whether the memory of the server's accelerator suffices for the layers after the cut; the CPU's does."""
    return fleet.replica_memory_bytes is None or _replica_bytes(fleet, plan) <= fleet.replica_memory_bytes


def _too_large_for_server(fleet: Fleet, member: Member, plans: list[Plan]) -> str:
    """Return what the smallest plan needs on the server's accelerator, and what would help."""
    plan = min(plans, key=partial(_replica_bytes, fleet))
    given = (fleet.replica_memory_bytes or 0) // 2**20
    return (
        f"The server's accelerator has {given} MiB of memory for the layers of {member.name}, but its smallest allowed "
        f"plan there, {plan}, needs {_at_least_mib(_replica_bytes(fleet, plan))} MiB: use fewer devices or a smaller "
        "run.batch_size, or write server.torch_device = 'cpu'."
    )


def _in_memory(fleet: Fleet, member: Member, p: int, n: int) -> Iterator[Plan]:
    """Yield the plan with the window that fits into the device's memory; nothing if none fits."""
    given = member.window
    if member.memory_bytes is None:
        yield Plan(p, n, 0 if given == "auto" else given)
        return
    if given != "auto":
        plan = Plan(p, n, given)
        if needed_bytes(fleet, member, plan) <= member.memory_bytes:
            yield plan
        return
    window = fitting_window(
        member.costs.profile,
        p,
        n,
        fleet.batch_size,
        member.memory_bytes,
        batch_statistics=fleet.batch_statistics,
        keeps_base=fleet.keeps_base(member),
    )
    if window is not None:
        yield Plan(p, n, window)


@dataclass(frozen=True, slots=True)
class _PieceTimes:
    """The seconds of one micro-batch."""

    forward: float
    backward: float
    up: float = 0.0
    served: float = 0.0
    down: float = 0.0
    coded_by_device: float = 0.0
    coded_by_server: float = 0.0


def _least_s(
    fleet: Fleet, member: Member, times_of: Callable[[int, str, str, int], _PieceTimes], plan: Plan
) -> tuple[float, float, float]:
    """Return the shortest iteration of a device alone, the time of its busiest lane, and the server's for it."""
    p, pieces = plan.split_point, fleet.pieces(fleet.batch_size, plan.micro_batches)
    times = {m: times_of(p, plan.up, plan.down, m) for m in set(pieces)}
    each = [(times[m], count) for m, count in Counter(pieces).items()]  # of one or two sizes
    step = member.costs.seconds(Work("step", last_layer=p)) if fleet.trains(p) else 0.0
    computed = _sum((one.forward + one.backward, count) for one, count in each) + step
    if p == fleet.layers:
        return computed, computed, 0.0
    total = _sum((one.served + one.coded_by_server, count) for one, count in each)
    coded = _sum((one.coded_by_device, count) for one, count in each)
    lanes = (_sum((one.up, count) for one, count in each), _sum((one.down, count) for one, count in each))
    at_once = fleet.at_once(plan)
    lane = max(computed, total / at_once, coded, *lanes)
    if plan.window:  # which forward waits for which backward depends on when gradients arrive: only lanes are certain
        return lane, lane, total
    alone = _sweep([times[m] for m in pieces], 2 * member.link.latency_s, at_once) + step
    return max(alone, lane), lane, total


def _sum(seconds: Iterable[tuple[float, int]]) -> float:
    """Return the sum of numbers that occur several times each."""
    return math.fsum(chain.from_iterable(repeat(*each) for each in seconds))


def _piece_times(fleet: Fleet, member: Member, split_point: int, up: str, down: str, samples: int) -> _PieceTimes:
    """Return how long each stage of a micro-batch of this many samples takes, with these encodings."""
    p, trains, steady = split_point, fleet.trains(split_point), fleet.is_steady(split_point)
    fresh = 1.0 - fleet.recalled_share(member, Plan(p, 1, 0, up, down))
    work = Work("fc", last_layer=p, samples=samples, chunks=samples if steady else 1)
    forward = fresh * member.costs.seconds(work)
    backward = member.costs.seconds(Work("bc", last_layer=p, samples=samples)) if trains else 0.0
    if p == fleet.layers:
        return _PieceTimes(forward, backward)
    profile, server = member.costs.profile, fleet.server.profile
    sent, back = profile.output_bytes(p) * 8, server.gradient_bytes(p) * 8
    shares = (fresh * profile.share(p, "up", up), server.share(p, "down", down) if trains else 0.0)
    return _PieceTimes(
        forward,
        backward,
        _over(samples * sent * shares[0], member.link.up_bps),
        _served_s(fleet, p, samples),
        _over(samples * back * shares[1], member.link.down_bps),
        *_coded_s(fleet, member, Plan(p, 1, 0, up, down), samples),
    )


def _served_s(fleet: Fleet, p: int, samples: int) -> float:
    forward, backward = (
        Work(kind, first_layer=p + 1, last_layer=fleet.layers, samples=samples) for kind in ("fs", "bs")
    )
    return fleet.server.seconds(forward) + fleet.server.seconds(backward)


def _coded_s(fleet: Fleet, member: Member, plan: Plan, samples: int) -> tuple[float, float]:
    """Return how long the device and the server encode and decode one micro-batch's tensors at the cut."""
    profile, p = fleet.server.profile, plan.split_point
    size, back = samples * profile.output_bytes(p), samples * profile.gradient_bytes(p)
    up = len(profile.chunk_bytes(p, samples, plan.up, "up"))
    down = len(profile.chunk_bytes(p, samples, plan.down, "down"))
    device, server = member.costs, fleet.server
    if not fleet.trains(p):
        fresh = 1.0 - fleet.recalled_share(member, plan)
        return (
            fresh * device.coding_s("encode", plan.up, size, up),
            fresh * server.coding_s("decode", plan.up, size, up),
        )
    return (
        device.coding_s("encode", plan.up, size, up) + device.coding_s("decode", plan.down, back, down),
        server.coding_s("decode", plan.up, size, up) + server.coding_s("encode", plan.down, back, down),
    )


def _sweep(pieces: list[_PieceTimes], latency_s: float, at_once: int) -> float:
    """Return the end of the last backward: `paper_selection.iteration_s` with each micro-batch's own times.

    The server computes `at_once` micro-batches at the same time, and answers them in their order.
    """
    forwarded = uploaded = answered = downloaded = 0.0
    free_at = [0.0] * at_once  # a heap
    arrivals = []
    for piece in pieces:  # without max(), whose calls would take longer than the rest
        forwarded += piece.forward
        uploaded = (uploaded if uploaded > forwarded else forwarded) + piece.up
        begin = free_at[0]
        served = (begin if begin > uploaded else uploaded) + piece.served
        heapreplace(free_at, served)
        answered = answered if answered > served else served
        downloaded = (downloaded if downloaded > answered else answered) + piece.down
        arrivals.append(downloaded + latency_s)
    end = forwarded
    for piece, arrived in zip(pieces, arrivals, strict=True):
        end = (end if end > arrived else arrived) + piece.backward
    return end


def _over(bits: float, rate_bps: float | None) -> float:
    return 0.0 if rate_bps is None else bits / rate_bps


def _too_leaky(fleet: Fleet, member: Member) -> str | None:
    """Return the problem if every split point that the method and the configuration allow reveals too much."""
    if _split_points(fleet, member):
        return None
    cuts = ", ".join(map(str, _with_leaky_ones(fleet, member)))
    # P = Q sends no activations: a pipeline without restrictions may always use it.
    way = "leave split_point and micro_batches to 'auto'" if fleet.method.pipelines else "use the method fl"
    return (
        f"With {fleet.method.name}, {member.name} can only have P = {cuts}, which leaks more than privacy.max_leakage "
        f"allows: raise the limit, or {way}."
    )


def _too_few_layers(fleet: Fleet, member: Member) -> str | None:
    """Return the problem if the method or the configured P needs layers that the device was not profiled with."""
    measured, needed = len(member.costs.profile.layers), min(_split_points(fleet, member))
    if needed <= measured:
        return None
    here = (
        f"{member.name} was profiled with the first {measured} of {fleet.layers} layers, the most that it can "
        f"hold, but has to train {needed}"
    )
    if min(_with_leaky_ones(fleet, member)) <= measured:
        return f"{here}, because all earlier cuts leak more than privacy.max_leakage allows: raise the limit."
    return f"{here}: give a split point of at most {measured}, or a method that splits the network."


def _too_little_memory(fleet: Fleet, member: Member) -> str:
    """Return what the smallest plan needs, and what would help; MiB are rounded so that it needs more than there is."""
    assert member.memory_bytes is not None
    plan, needed = _smallest(fleet, member)
    ways = [f"give devices.memory at least {_at_least_mib(needed)}MiB", *_ways_to_fit(fleet, member)]
    return (
        f"{member.name} has {member.memory_bytes // 2**20} MiB of memory, but its smallest allowed plan, {plan}, needs "
        f"{_at_least_mib(needed)} MiB, {BASE_BYTES // 2**20} of them for Python and torch: "
        f"{', or '.join(ways)}."
    )


def _at_least_mib(size_bytes: int) -> int:
    return -(-size_bytes // 2**20)


def _smallest(fleet: Fleet, member: Member) -> tuple[Plan, int]:
    """Return the allowed plan that needs the least memory, and its bytes."""
    needed = partial(needed_bytes, fleet, member)

    def window(p: int, n: int) -> int:
        return (1 if n > 1 and p < fleet.layers else 0) if member.window == "auto" else member.window

    plans = [Plan(p, n, window(p, n)) for p, n in _pairs(fleet, member)]
    plan = min(plans, key=lambda plan: (needed(plan), plan))
    return plan, needed(plan)


def _ways_to_fit(fleet: Fleet, member: Member) -> list[str]:
    """Return what else would make a plan fit: a smaller batch, or 'auto' instead of a configured value."""

    def fits(fleet: Fleet, member: Member) -> bool:
        return _smallest(fleet, member)[1] <= (member.memory_bytes or 0)

    pieces = member.micro_batches if fleet.method.pipelines and member.micro_batches != "auto" else 1
    least = replace(fleet, batch_size=min(fleet.batch_size, pieces * (2 if fleet.batch_statistics else 1)))
    free = replace(member, split_point="auto", micro_batches="auto", window="auto")
    named = {"split_point": member.split_point, "micro_batches": member.micro_batches, "schedule": member.window}
    given = [name for name, value in named.items() if value != "auto"]
    ways = ["a smaller run.batch_size"] if fits(least, member) else []
    if given and fits(fleet, free):
        ways.append(f"leave {' and '.join(given)} to 'auto'")
    elif not fleet.method.pipelines and fits(replace(fleet, method=METHODS["pipar"]), free):
        ways.append("use the method pipar")
    return ways

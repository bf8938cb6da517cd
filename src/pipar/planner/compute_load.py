"""How long machines compute in an epoch, and each layer's share of it: measured times are compared with these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pipar.execution.work import Work
from pipar.methods import Plan
from pipar.planner.calibration import Shares
from pipar.planner.fleet import Fleet, Member
from pipar.planner.shared_host import Slowdown
from pipar.planner.simulator import simulate
from pipar.planner.stage_times import batch_times, decoding, protect_s, work_key
from pipar.planner.timing import steady_iterations


def compute_seconds(fleet: Fleet, plans: Mapping[str, Plan]) -> tuple[dict[str, float], float]:
    """Return how long each device's compute lane works in one epoch, and all cores of the server together."""
    devices, server_s = _alone_s(fleet, plans)
    slower = slowdown(fleet, plans)
    shares = {member.name: member.host_share for member in fleet.members}
    return {name: seconds * slower.of(shares[name]) for name, seconds in devices.items()}, server_s * slower.server


def slowdown(fleet: Fleet, plans: Mapping[str, Plan]) -> Slowdown:
    """Return how many times as long work takes next to all other work as alone: of the server, and of its machine."""
    if fleet.host is not None:
        timing = simulate(fleet.sampled(), plans, steady_iterations(fleet))
        return Slowdown(timing.hosted, timing.contention)
    if fleet.server.profile.crowded and fleet.cores > 1:
        return Slowdown(server=simulate(fleet.sampled(), plans, iterations=1).contention)
    return Slowdown()


@dataclass(frozen=True)
class ComputeLoad:
    """How long a compute lane, or all cores one after the other, work in one epoch, and the share of each layer."""

    seconds: float
    shares: Shares


def compute_loads(fleet: Fleet, plans: Mapping[str, Plan]) -> tuple[dict[str, ComputeLoad], ComputeLoad]:
    """Return the load of each device's compute lane, and that of the server's cores; equal devices share one."""
    devices_s, server_s = _alone_s(fleet, plans)
    alike: dict[tuple[object, ...], list[Member]] = {}
    for member in fleet.members:
        alike.setdefault(work_key(member, plans[member.name]), []).append(member)
    devices: dict[str, ComputeLoad] = {}
    on_server = [0.0] * fleet.layers
    for first, *others in alike.values():
        own, served = _layers_s(fleet, first, plans[first.name])
        of_one = _load(own, devices_s[first.name])
        devices.update({member.name: of_one for member in (first, *others)})
        on_server = [all_s + (1 + len(others)) * s for all_s, s in zip(on_server, served, strict=True)]
    return devices, _load(on_server, server_s)


def _layers_s(fleet: Fleet, member: Member, plan: Plan) -> tuple[list[float], list[float]]:
    """Return how long a device computes each layer in an epoch, and the server for it."""
    own, served = [0.0] * fleet.layers, [0.0] * fleet.layers
    for batch, count in fleet.batch_counts(member.samples).items():
        for samples, pieces in Counter(fleet.pieces(batch, plan.micro_batches)).items():
            for seconds, costs, layers in (
                (own, member.costs, range(plan.split_point)),
                (served, fleet.server, range(plan.split_point, fleet.layers)),
            ):
                each_s = costs.each_layer_s(samples)
                for layer in layers:
                    seconds[layer] += count * pieces * each_s[layer]
    return own, served


def _load(layers_s: list[float], all_s: float) -> ComputeLoad:
    parts = (max(0.0, all_s - sum(layers_s)), *layers_s)
    return ComputeLoad(all_s, tuple(seconds / all_s for seconds in parts) if all_s else (1.0, *[0.0] * len(layers_s)))


def _alone_s(fleet: Fleet, plans: Mapping[str, Plan]) -> tuple[dict[str, float], float]:
    known: dict[tuple[object, ...], tuple[float, float]] = {}
    devices, server_s = {}, 0.0
    for member in fleet.members:
        plan = plans[member.name]
        key = work_key(member, plan)
        if key not in known:
            known[key] = _computed_s(fleet, member, plan)
        devices[member.name] = known[key][0]
        server_s += known[key][1]
    return devices, server_s + sum(map(fleet.server.seconds, _exchanged(fleet, plans)))


def _exchanged(fleet: Fleet, plans: Mapping[str, Plan]) -> list[Work]:
    """Return the server's work on models after the iterations: decoding changes, aggregating, packing new parts."""
    profile = fleet.server.profile
    cuts = {member.name: plans[member.name].split_point for member in fleet.members}
    decoded = [cuts[m.name] for m in fleet.members if fleet.sends_changes(m, m.link.up_bps)]
    packed = {(cuts[m.name], fleet.sends_changes(m, m.link.down_bps)) for m in fleet.members}
    return [
        *(decoding(profile.changing_bytes(1, cut)) for cut in decoded),
        Work("aggregate", size_bytes=fleet.averaged_bytes),
        *(
            Work("pack", size_bytes=profile.changing_bytes(1, cut), encoding="changes" if changed else "raw")
            for cut, changed in sorted(packed)
        ),
    ]


def _computed_s(fleet: Fleet, member: Member, plan: Plan) -> tuple[float, float]:
    size = fleet.server.profile.changing_bytes(1, plan.split_point)
    ways = (("pack", member.link.up_bps), ("install", member.link.down_bps))
    forms = {kind: "changes" if fleet.sends_changes(member, rate) else "raw" for kind, rate in ways}
    device_s = sum(member.costs.seconds(Work(kind, size_bytes=size, encoding=forms[kind])) for kind in forms)
    device_s += protect_s(fleet, member, size)
    server_s = 0.0
    for batch, count in fleet.batch_counts(member.samples).items():
        times = batch_times(fleet, member, plan, batch)
        device_s += count * (sum(times.fc) + sum(times.bc) + times.step)
        server_s += count * (sum(times.served) + times.server_step)
    return device_s, server_s

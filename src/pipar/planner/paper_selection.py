"""The paper's selection of P and N, equation by equation; III-C, phases 2 and 3.

It models one device alone with the server, without latency, loading, encoding and optimiser step, and takes the time of
a micro-batch as 1/N of the full batch's. `planner.costs` and `planner.simulator` do without these simplifications. Of
each P it considers one N, `planner.search` all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from pipar.errors import PlanError, TooLittleMemoryError
from pipar.methods import Plan
from pipar.planner.candidates import allowed_plans
from pipar.planner.costs import Costs
from pipar.planner.encoding_choice import with_encodings
from pipar.planner.fleet import Fleet, Member
from pipar.profiling.profile import Profile
from pipar.settings.links import Link


@dataclass(frozen=True)
class StageTimes:
    """Seconds of each of the six stages, the same for every micro-batch of the iteration."""

    fc: float
    u: float
    fs: float
    bs: float
    d: float
    bc: float

    def divided_by(self, micro_batches: int) -> StageTimes:
        """Return the times of one of N equal pieces: t / N; paper III-C, phase 2."""
        n = micro_batches
        return StageTimes(self.fc / n, self.u / n, self.fs / n, self.bs / n, self.d / n, self.bc / n)


def full_batch_times(
    device: Costs,
    server: Costs,
    split_point: int,
    batch_size: int,
    link: Link,
    shares: tuple[float, float] = (1.0, 1.0),
) -> StageTimes:
    """Return the six times of a whole batch, before it is cut into micro-batches.

    t(f_c) = sum of layers 1..P, t(f_s) = sum of layers P+1..Q, backward likewise; t(u) = v_P / w_u, t(d) = v_P / w_d,
    where the gradient is as large as the activation. P = Q is federated learning: no communication, nothing on the
    server.

    `shares` are the shares of the bytes, up and down, that encodings leave; the paper has no encodings. Nothing comes
    back to a device with only frozen layers, which the paper does not have either.
    """
    layers = _layers_of_both(device.profile, server.profile)

    def on_device(kind: str) -> float:
        return device.layers_s(kind, 1, split_point, batch_size)

    if split_point == layers:
        return StageTimes(on_device("fc"), 0.0, 0.0, 0.0, 0.0, on_device("bc"))

    def on_server(kind: str) -> float:
        return server.layers_s(kind, split_point + 1, layers, batch_size)

    size_bytes = device.profile.output_bytes(split_point) * batch_size
    back_bytes = device.profile.gradient_bytes(split_point) * batch_size
    trains = split_point > server.profile.frozen_layers
    return StageTimes(
        fc=on_device("fc"),
        u=_transfer_s(size_bytes * shares[0], link.up_bps),
        fs=on_server("fs"),
        bs=on_server("bs"),
        d=_transfer_s(back_bytes * shares[1], link.down_bps) if trains else 0.0,
        bc=on_device("bc") if trains else 0.0,
    )


def iteration_s(times: StageTimes, micro_batches: int) -> float:
    """Return T(b_c N), the end of the iteration, by T(r) = t(r) + max over previous T(r'); paper III-C, phase 2.

    One sweep over the 6N stages. All forwards come first, so the first backward also waits for the last forward.
    """
    forwarded = uploaded = answered = downloaded = 0.0
    arrivals = []
    for _ in range(micro_batches):
        forwarded += times.fc
        uploaded = times.u + max(uploaded, forwarded)
        answered = times.bs + (times.fs + max(answered, uploaded))
        downloaded = times.d + max(downloaded, answered)
        arrivals.append(downloaded)
    end = forwarded
    for arrived in arrivals:
        end = times.bc + max(end, arrived)
    return end


def batches_to_fill_idle_time(times: StageTimes, most: int) -> int:
    """Return N = 1 + ceil((u + f_s + b_s + d) / min(f_c, b_c)), at most `most`; paper III-C, phase 3.

    f_s sums layers P+1..Q. The paper prints 1..P there, against its own definition. A device with only frozen layers,
    which the paper does not have, has no b_c to take the minimum with.
    """
    idle_s = times.u + times.fs + times.bs + times.d
    shortest_s = min((seconds for seconds in (times.fc, times.bc) if seconds > 0), default=0.0)
    if idle_s == 0:
        return 1
    if idle_s > (most - 2) * shortest_s:  # also where nothing on the device takes time
        return most
    return 1 + math.ceil(idle_s / shortest_s)


def estimate_plans(fleet: Fleet) -> dict[str, tuple[Plan, float]]:
    """Return each device's plan by the paper's selection, with the seconds of an iteration; paper III-C, phase 3."""
    chosen = {}
    for kind in fleet.device_kinds():
        best = _select(fleet, kind[0])
        chosen.update({member.name: best for member in kind})
    return chosen


def _select(fleet: Fleet, member: Member) -> tuple[Plan, float]:
    """Return the shortlisted plan with the shortest iteration; ties go to the smaller N, then the smaller P."""
    return min(
        ((plan, _estimated_s(fleet, member, plan)) for plan in _shortlist(fleet, member)),
        key=lambda item: (item[1], item[0].micro_batches, item[0].split_point),
    )


def _shortlist(fleet: Fleet, member: Member) -> list[Plan]:
    """Return one plan for each P that the device's memory allows, with the N that fills its idle time.

    All forwards come first, as in the paper, unless the configuration says otherwise. If none of these plans fits into
    the memory, which the paper does not consider, every allowed plan is on the list.
    """

    @cache
    def n_of(split_point: int) -> int:
        (whole,) = with_encodings(fleet, member, [Plan(split_point, 1)])
        return batches_to_fill_idle_time(_batch_times(fleet, member, whole), most)

    def is_listed(split_point: int, micro_batches: int) -> bool:
        return is_given or micro_batches == n_of(split_point)

    most = len(fleet.pieces(fleet.batch_size, fleet.batch_size))
    is_given = member.micro_batches != "auto" or not fleet.method.pipelines
    all_forward_first = replace(member, window=0) if member.window == "auto" else member
    try:
        return allowed_plans(fleet, all_forward_first, is_listed)
    except TooLittleMemoryError:
        return allowed_plans(fleet, member)


def _estimated_s(fleet: Fleet, member: Member, plan: Plan) -> float:
    n = plan.micro_batches
    return iteration_s(_batch_times(fleet, member, plan).divided_by(n), n)


def _batch_times(fleet: Fleet, member: Member, plan: Plan) -> StageTimes:
    """Return the times of a whole batch with the split point and the encodings of a plan."""
    p = plan.split_point
    shares = member.costs.profile.share(p, "up", plan.up), fleet.server.profile.share(p, "down", plan.down)
    return full_batch_times(member.costs, fleet.server, p, fleet.batch_size, member.link, shares)


def _transfer_s(size_bytes: float, bits_per_second: float | None) -> float:
    return 0.0 if bits_per_second is None else size_bytes * 8 / bits_per_second


def _layers_of_both(device: Profile, server: Profile) -> int:
    if device.network_layers != server.network_layers:
        raise PlanError(
            f"The device's profile is of {device.model} with {device.network_layers} layers, the server's of "
            f"{server.model} with {server.network_layers}; give two profiles of the same network."
        )
    return server.network_layers

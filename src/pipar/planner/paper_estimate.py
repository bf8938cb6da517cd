"""The paper's estimate of one iteration, equation by equation, and plans by it; III-C, phases 2 and 3.

It models one device alone with the server, without latency, loading, encoding and optimiser step, and takes the time of
a micro-batch as 1/N of the full batch's. `planner.costs` and `planner.simulator` do without these simplifications.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipar.errors import PlanError
from pipar.methods import Plan
from pipar.planner.candidates import allowed_plans
from pipar.planner.costs import Costs
from pipar.planner.fleet import Fleet, Member
from pipar.profiling.profile import Profile
from pipar.settings.links import Link

#: Estimates this close, relative to the best, are a tie, which goes to the smaller N. The estimate is no more exact.
#: Where the link or the server is the bottleneck, it never grows with N: without a tie, micro-batches of one sample
#: would win.
ESTIMATE_TIE = 0.01


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


def closed_form_s(times: StageTimes, micro_batches: int) -> float:
    """Return T(b_c N), the end of the iteration, by T(r) = t(r) + max over previous T(r'); paper III-C, phase 2.

    The recursion over the stage graph has a closed form. All forwards come first, so the first backward also waits for
    the last forward. A path through the graph either takes the edge from the last forward to the first backward, and is
    N (f_c + b_c) long, or steps lane by lane: each lane once and the slowest one N - 1 times more, so

        T = max( N (f_c + b_c),  sum of all six + (N - 1) max(f_c, u, f_s + b_s, d, b_c) ).
    """
    served = times.fs + times.bs
    once = times.fc + times.u + served + times.d + times.bc
    slowest = max(times.fc, times.u, served, times.d, times.bc)
    return max(micro_batches * (times.fc + times.bc), once + (micro_batches - 1) * slowest)


def estimate_plans(fleet: Fleet) -> dict[str, tuple[Plan, float]]:
    """Return each device's plan with the shortest iteration by the paper's estimate; ties go to the smaller N."""
    chosen = {}
    for kind in fleet.device_kinds():
        best = _best_plan_by_estimate(fleet, kind[0])
        chosen.update({member.name: best for member in kind})
    return chosen


def _best_plan_by_estimate(fleet: Fleet, member: Member) -> tuple[Plan, float]:
    times: dict[tuple[object, ...], StageTimes] = {}
    found = []
    for plan in allowed_plans(fleet, member):
        p, n = plan.split_point, plan.micro_batches
        key = (p, plan.up, plan.down)
        if key not in times:
            shares = member.costs.profile.share(p, "up", plan.up), fleet.server.profile.share(p, "down", plan.down)
            times[key] = full_batch_times(member.costs, fleet.server, p, fleet.batch_size, member.link, shares)
        found.append((plan, closed_form_s(times[key].divided_by(n), n)))
    within = min(seconds for _, seconds in found) * (1 + ESTIMATE_TIE)
    tied = [(plan, seconds) for plan, seconds in found if seconds <= within]
    return min(tied, key=lambda item: (item[0].micro_batches, item[0].split_point))


def _transfer_s(size_bytes: float, bits_per_second: float | None) -> float:
    return 0.0 if bits_per_second is None else size_bytes * 8 / bits_per_second


def _layers_of_both(device: Profile, server: Profile) -> int:
    if device.network_layers != server.network_layers:
        raise PlanError(
            f"The device's profile is of {device.model} with {device.network_layers} layers, the server's of "
            f"{server.model} with {server.network_layers}; give two profiles of the same network."
        )
    return server.network_layers

"""What a simulation of plans says: when iterations and the epoch ended, and how busy each lane was."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

from pipar.methods import Plan
from pipar.planner.fleet import Fleet, Member

LANES = ("device", "uplink", "server", "downlink")
#: Those that each device has for itself.
OWN_LANES = ("device", "uplink", "downlink")


@dataclass(frozen=True)
class Timing:
    """One epoch of a fleet, or its first iterations and the exchange of models behind them; seconds from its start.

    `busy_s` counts the iterations' stages and the models: of the busiest device's lanes, and the mean of the cores.
    """

    epoch_s: float
    ends: Mapping[str, tuple[float, ...]]  # when each device had ended each of its iterations
    busy_s: Mapping[str, float]
    contention: float = 1.0  # how many times as long the server's work took as it would have on one core alone
    own_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # of OWN_LANES, device by device
    rest_s: Mapping[str, float] = field(default_factory=dict)  # how much later each ends if that was foretold

    @property
    def device_s(self) -> dict[str, float]:
        """When each device had ended its last iteration."""
        return {name: ends[-1] + self.rest_s.get(name, 0.0) for name, ends in self.ends.items()}

    @property
    def bottleneck(self) -> str:
        """The busiest lane."""
        return max(LANES, key=lambda lane: self.busy_s[lane])

    def extrapolated_epoch_s(self, fleet: Fleet) -> float:
        """Return the seconds of the whole epoch, iterations that were not simulated being like those that were.

        A short last one counts by its share. Each kind of device goes on in its own steps: a slow one with little data
        does not lengthen the others' epoch.
        """
        if fleet.method.one_device_at_a_time:
            return self.epoch_s + sum(self._rest_s(fleet, (member,)) for member in fleet.members)
        last = self.device_s
        end = max(max(last[m.name] for m in kind) + self._rest_s(fleet, kind) for kind in fleet.device_kinds())
        return self.epoch_s + end - max(last.values())

    def extended(self, fleet: Fleet, before: Timing) -> Timing:
        """Return the timing of the whole epoch; `before` is that of one iteration less."""
        left = {m.name: fleet.iterations(m.samples) - len(self.ends[m.name]) for m in fleet.members}
        own = {
            name: tuple(now + (now - then) * left[name] for now, then in zip(lanes, before.own_s[name], strict=True))
            for name, lanes in self.own_s.items()
        }
        rest = {member.name: self._rest_s(fleet, kind) for kind in fleet.device_kinds() for member in kind}
        if fleet.method.one_device_at_a_time:
            rest = dict(zip(self.ends, accumulate(rest[name] for name in self.ends), strict=True))
        busiest = zip(OWN_LANES, (max(of) for of in zip(*own.values(), strict=True)), strict=True)
        return replace(
            self,
            epoch_s=self.steady_epoch_s(fleet),
            busy_s={**dict(busiest), "server": self._server_s(fleet)},
            own_s=own,
            rest_s=rest,
        )

    def steady_epoch_s(self, fleet: Fleet) -> float:
        """Return the seconds of the whole epoch, and no less than the server's cores need for it.

        Iterations that just begin to crowd the server promise more than its cores can do in a whole epoch.
        """
        return max(self.extrapolated_epoch_s(fleet), self._server_s(fleet))

    def _server_s(self, fleet: Fleet) -> float:
        """Return how long each core will have worked, on average, when all samples are through."""
        here = sum(sum(fleet.batches(m.samples, len(self.ends[m.name]))) for m in fleet.members)
        return self.busy_s["server"] * sum(m.samples for m in fleet.members) / here

    def _rest_s(self, fleet: Fleet, kind: tuple[Member, ...]) -> float:
        """Return how long the iterations of a kind of device take that were not simulated."""
        ends = _last([self.ends[member.name] for member in kind])
        return max(0.0, max(member.samples for member in kind) / fleet.batch_size - len(ends)) * _steady_s(ends)


def _last(ends: Collection[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(max(of[n] for of in ends if n < len(of)) for n in range(max(map(len, ends))))


def _steady_s(ends: tuple[float, ...]) -> float:
    """Return how long an iteration takes on average behind the first, which fills the pipeline; or the only one."""
    return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else ends[0]


#: Runs a fleet's plans in some world, for so many iterations (None: the whole epoch), and says how long they took.
Simulate = Callable[[Fleet, Mapping[str, Plan], int | None], Timing]

#: The same as long as the plans may have a steady epoch of less than so many seconds: None as soon as they cannot.
SimulateWithin = Callable[[Fleet, Mapping[str, Plan], int | None, float], Timing | None]

#: Iterations that show all. The first fills the pipeline, and devices that have begun it together need some more until
#: they come to a full server in the order that they keep: the second alone was seen to be off by 15 % of an epoch.
STEADY_ITERATIONS = 6
#: The fewest that show a steady one at all.
FEWEST_ITERATIONS = 2

#: More micro-batches than this take longer to simulate than anybody waits for.
_QUICK = 20_000


def steady_epoch_s(
    simulate: Simulate, fleet: Fleet, plans: Mapping[str, Plan], iterations: int = STEADY_ITERATIONS
) -> float:
    """Return the seconds of an epoch from a simulation of so many of its iterations, or of all if it has fewer."""
    return simulate(fleet, plans, steady_iterations(fleet, iterations)).steady_epoch_s(fleet)


def steady_epoch_within_s(
    simulate: SimulateWithin,
    fleet: Fleet,
    plans: Mapping[str, Plan],
    within_s: float,
    iterations: int = STEADY_ITERATIONS,
) -> float:
    """Return the same if it is less than this, else any number that is not."""
    timing = simulate(fleet, plans, steady_iterations(fleet, iterations), within_s)
    return math.inf if timing is None else timing.steady_epoch_s(fleet)


def epoch_timing(simulate: Simulate, fleet: Fleet, plans: Mapping[str, Plan]) -> Timing:
    """Return the timing of an epoch: all of it simulated, or of a long one the first iterations, which repeat."""
    pieces = sum(plans[member.name].micro_batches * fleet.iterations(member.samples) for member in fleet.members)
    if pieces <= _QUICK:
        return simulate(fleet, plans, None)
    steady = steady_iterations(fleet)
    if steady == 1:  # there is nothing that repeats
        return simulate(fleet, plans, 1)
    return simulate(fleet, plans, steady).extended(fleet, simulate(fleet, plans, steady - 1))


def steady_iterations(fleet: Fleet, iterations: int = STEADY_ITERATIONS) -> int:
    """Return how many iterations of an epoch are simulated: so many, or all."""
    return min(iterations, max(fleet.iterations(member.samples) for member in fleet.members))

"""The result of a simulation: when iterations and the epoch ended, and how busy each lane was."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

from pipar.methods import Plan
from pipar.planner.fleet import Fleet, Member

LANES = ("device", "uplink", "server", "downlink")
#: The lanes that each device has.
OWN_LANES = ("device", "uplink", "downlink")


@dataclass(frozen=True)
class Timing:
    """One epoch of a fleet, or its first iterations and the exchange of models after them; seconds from its start.

    `busy_s` counts the iterations' stages and the models: the lanes of the busiest device, and the mean of the cores.
    """

    epoch_s: float
    ends: Mapping[str, tuple[float, ...]]  # of each device's iterations
    busy_s: Mapping[str, float]
    contention: float = 1.0  # how many times as long the server's work took as on one core alone
    own_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # of OWN_LANES, device by device
    rest_s: Mapping[str, float] = field(default_factory=dict)  # of each device: iterations that were extrapolated
    hosted: float = (
        1.0  # how many times as long work with a whole core took on the machine that server and devices share
    )

    @property
    def device_s(self) -> dict[str, float]:
        """The end of each device's last iteration."""
        return {name: ends[-1] + self.rest_s.get(name, 0.0) for name, ends in self.ends.items()}

    @property
    def bottleneck(self) -> str:
        """The busiest lane."""
        return max(LANES, key=lambda lane: self.busy_s[lane])

    def extrapolated_epoch_s(self, fleet: Fleet) -> float:
        """Return the seconds of the whole epoch if the other iterations are like those that were simulated.

        A short last one counts by its share. Each kind of device continues at its own pace: a slow kind with little
        data does not lengthen the epoch of the others.
        """
        if fleet.method.one_device_at_a_time:
            return self.epoch_s + sum(self._rest_s(fleet, (member,)) for member in fleet.members)
        last = self.device_s
        end = max(max(last[m.name] for m in kind) + self._rest_s(fleet, kind) for kind in fleet.device_kinds())
        return self.epoch_s + end - max(last.values())

    def extrapolated(self, fleet: Fleet, before: Timing) -> Timing:
        """Return the timing of the whole epoch; `before` is the timing of one iteration less."""
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

        The first iterations may seem shorter than those of a whole epoch, while work still piles up at the server.
        """
        return max(self.extrapolated_epoch_s(fleet), self._server_s(fleet))

    def _server_s(self, fleet: Fleet) -> float:
        """Return how long each core will have worked, on average, when all samples have been served."""
        here = sum(m.stands_for * sum(fleet.batches(m.samples, len(self.ends[m.name]))) for m in fleet.members)
        return self.busy_s["server"] * fleet.served(fleet.members) / here

    def _rest_s(self, fleet: Fleet, kind: tuple[Member, ...]) -> float:
        """Return how long the iterations of a kind that were not simulated take."""
        ends = _last([self.ends[member.name] for member in kind])
        return fleet.repeats(kind, len(ends)) * _steady_s(ends)


def _last(ends: Collection[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(max(of[n] for of in ends if n < len(of)) for n in range(max(map(len, ends))))


def _steady_s(ends: tuple[float, ...]) -> float:
    """Return the mean duration of the iterations after the first, which fills the pipeline; or that of the only one."""
    return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else ends[0]


#: Simulates a fleet's plans for a number of iterations (None: the whole epoch), and returns their timing.
Simulate = Callable[[Fleet, Mapping[str, Plan], int | None], Timing]

#: The same, but returns None as soon as the steady epoch cannot be shorter than the given seconds.
SimulateWithin = Callable[[Fleet, Mapping[str, Plan], int | None, float], Timing | None]

#: Iterations that represent all. The first fills the pipeline. Devices that start together need some more until they
#: reach a full server in a stable order: the second iteration alone was off by up to 15 % of an epoch.
STEADY_ITERATIONS = 6
#: The fewest that include one with a full pipeline.
FEWEST_ITERATIONS = 2

#: Epochs of more micro-batches are extrapolated: simulating all of them would take too long.
_MOST_MICRO_BATCHES = 20_000


def steady_epoch_s(
    simulate: Simulate, fleet: Fleet, plans: Mapping[str, Plan], iterations: int = STEADY_ITERATIONS
) -> float:
    """Return the seconds of an epoch from a simulation of its first iterations, or of all if it has fewer."""
    return simulate(fleet, plans, steady_iterations(fleet, iterations)).steady_epoch_s(fleet)


def steady_epoch_within_s(
    simulate: SimulateWithin,
    fleet: Fleet,
    plans: Mapping[str, Plan],
    within_s: float,
    iterations: int = STEADY_ITERATIONS,
) -> float:
    """Return the same if it is less than `within_s`, else a number that is not."""
    timing = simulate(fleet, plans, steady_iterations(fleet, iterations), within_s)
    return math.inf if timing is None else timing.steady_epoch_s(fleet)


def epoch_timing(simulate: Simulate, fleet: Fleet, plans: Mapping[str, Plan]) -> Timing:
    """Return the timing of an epoch: all of it simulated, or extrapolated from its first iterations if it is long."""
    pieces = sum(plans[member.name].micro_batches * fleet.iterations(member.samples) for member in fleet.members)
    if pieces <= _MOST_MICRO_BATCHES:
        return simulate(fleet, plans, None)
    steady = steady_iterations(fleet)
    if steady == 1:  # nothing repeats
        return simulate(fleet, plans, 1)
    return simulate(fleet, plans, steady).extrapolated(fleet, simulate(fleet, plans, steady - 1))


def steady_iterations(fleet: Fleet, iterations: int = STEADY_ITERATIONS) -> int:
    """Return how many iterations of an epoch are simulated: these, or all if there are fewer."""
    return min(iterations, max(fleet.iterations(member.samples) for member in fleet.members))

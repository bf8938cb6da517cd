"""What a simulation of plans says: when iterations and the epoch ended, and how busy each lane was."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from pipar.methods import Plan
from pipar.planner.fleet import Fleet, Member

LANES = ("device", "uplink", "server", "downlink")


@dataclass(frozen=True)
class Timing:
    """One epoch of a fleet, or its first iterations and the exchange of models behind them; seconds from its start.

    `busy_s` counts the iterations' stages and the models: of the busiest device's lanes, and the mean of the cores.
    """

    epoch_s: float
    ends: Mapping[str, tuple[float, ...]]  # when each device had ended each of its iterations
    busy_s: Mapping[str, float]
    crowding: float = 1.0  # how many times as long the server's work took as it would have on one core alone

    @property
    def device_s(self) -> dict[str, float]:
        """When each device had ended its last iteration."""
        return {name: ends[-1] for name, ends in self.ends.items()}

    @property
    def iteration_ends(self) -> tuple[float, ...]:
        """When the last of the devices that have such an iteration had ended it."""
        return _last(self.ends.values())

    @property
    def iteration_s(self) -> float:
        """A steady iteration: the last one simulated, or the only one."""
        ends = self.iteration_ends
        return ends[-1] - ends[-2] if len(ends) > 1 else ends[0]

    @property
    def bottleneck(self) -> str:
        """The busiest lane."""
        return max(LANES, key=lambda lane: self.busy_s[lane])

    def of_whole_epoch(self, fleet: Fleet) -> float:
        """Return the seconds of the whole epoch, iterations that were not simulated being like the last that was.

        A short last one counts by its share. Each kind of device goes on in its own steps: a slow one with little data
        does not lengthen the others' epoch.
        """
        if fleet.method.one_device_at_a_time:
            return self.epoch_s + sum(self._rest_s(fleet, (member,)) for member in fleet.members)
        last = self.device_s
        end = max(max(last[m.name] for m in kind) + self._rest_s(fleet, kind) for kind in fleet.kinds())
        return self.epoch_s + end - max(last.values())

    def _rest_s(self, fleet: Fleet, kind: tuple[Member, ...]) -> float:
        """Return how long the iterations of a kind of device take that were not simulated."""
        ends = _last([self.ends[member.name] for member in kind])
        steady = ends[-1] - ends[-2] if len(ends) > 1 else ends[0]
        return max(0.0, max(member.samples for member in kind) / fleet.batch_size - len(ends)) * steady


def _last(ends: Collection[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(max(of[n] for of in ends if n < len(of)) for n in range(max(map(len, ends))))


#: Runs a fleet's plans in some world, for so many iterations (None: the whole epoch), and says how long they took.
Simulate = Callable[[Fleet, Mapping[str, Plan], int | None], Timing]

#: Iterations that show all: the first fills the pipeline, the second is like all others.
STEADY = 2


def steady_epoch_s(simulate: Simulate, fleet: Fleet, plans: Mapping[str, Plan]) -> float:
    """Return the seconds of an epoch from a simulation of its first iterations."""
    batches = [fleet.batches(member.samples) for member in fleet.members]
    simulated = min(STEADY, max(map(len, batches)))
    timing = simulate(fleet, plans, simulated)
    # Iterations that just begin to crowd the server promise more than its cores can do in a whole epoch.
    here, total = (sum(sum(of[:count]) for of in batches) for count in (simulated, None))
    return max(timing.of_whole_epoch(fleet), timing.busy_s["server"] * total / here)

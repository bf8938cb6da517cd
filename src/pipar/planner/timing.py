"""What a simulation of plans says: when iterations and the epoch ended, and how busy each lane was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipar.methods import Plan
from pipar.planner.fleet import Fleet

LANES = ("device", "uplink", "server", "downlink")


@dataclass(frozen=True)
class Timing:
    """One epoch of a fleet, or its first iterations and the exchange of models behind them; seconds from its start.

    `device_s` is when each device had ended its last iteration. `busy_s` counts the busiest device's lanes
    and the mean of the server's cores.
    """

    epoch_s: float
    iteration_ends: tuple[float, ...]  # when the last device had ended each
    device_s: Mapping[str, float]
    busy_s: Mapping[str, float]

    @property
    def iteration_s(self) -> float:
        """A steady iteration: the last one simulated, or the only one."""
        ends = self.iteration_ends
        return ends[-1] - ends[-2] if len(ends) > 1 else ends[0]

    @property
    def bottleneck(self) -> str:
        """The busiest lane."""
        return max(LANES, key=lambda lane: self.busy_s[lane])

    def of_iterations(self, iterations: int) -> float:
        """Return the seconds of an epoch of so many iterations, those not simulated being like the last that was."""
        return self.epoch_s + (iterations - len(self.iteration_ends)) * self.iteration_s


#: Runs a fleet's plans in some world, for so many iterations (None: the whole epoch), and says how long they took.
Simulate = Callable[[Fleet, Mapping[str, Plan], int | None], Timing]

"""What the programs of a simulated world share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipar.execution.lanes import VirtualLanes
from pipar.planner.costs import Costs
from pipar.settings.links import Link
from simulation.checks import Checks
from simulation.draws import Draws
from simulation.ledgers import Ledgers
from simulation.memory_bounds import MemoryBounds
from simulation.network import Network
from simulation.processes import Process, Processes
from simulation.scenario import Scenario
from simulation.tiny_training import Training


@dataclass(frozen=True)
class Environment:
    """The training, the network and the processes of a world, and what checks them."""

    scenario: Scenario
    folder: Path  # of the server's run
    training: Training
    network: Network
    processes: Processes
    checks: Checks
    memory: MemoryBounds
    ledgers: Ledgers
    draws: Draws

    def process(self, owner: str, machine: str, restart_after_s: float = 1.0) -> Process:
        """Return a process on a machine, which reads that machine's clock."""
        return Process(owner, machine, self.scenario.skews_s.get(machine, 0.0), restart_after_s)

    @property
    def link(self) -> Link:
        rate = self.scenario.rate_bps
        return Link(up_bps=rate, down_bps=rate, latency_s=self.scenario.latency_s)

    def lanes(self, speed: float = 1.0) -> Callable[..., Any]:
        """Return what makes the lanes of a machine of this speed."""
        costs = Costs(self.training.profile, speed)
        return lambda lanes, recorder: VirtualLanes(lanes, recorder, costs.seconds)

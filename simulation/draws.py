"""Which devices are drawn for which round, as an outsider can count them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pipar.events import Drawn
from simulation.checks import Checks
from simulation.invariants import (
    draws_are_remembered,
    enough_are_drawn,
    only_drawn_devices_count,
    seldom_drawn_come_first,
)
from simulation.scenario import Scenario


class Draws:
    """Counts how often each device was drawn, and checks that none is preferred, also after restarts of the server."""

    def __init__(self, scenario: Scenario, checks: Checks) -> None:
        self._scenario = scenario
        self._checks = checks
        self._rounds: dict[int, tuple[str, ...]] = {}  # the last draw of each round; one that starts over has several
        self._counts: dict[str, int] = {}
        self._present: set[str] = set()  # at the last draw

    def drawn(self, event: Drawn, present: Collection[str]) -> None:
        """The devices of a round are drawn from those that are present."""
        self._checks.check(enough_are_drawn, self._scenario.devices_per_round, event.devices, present)
        self._let_catch_up(set(present))
        self._checks.check(
            seldom_drawn_come_first, event.epoch, event.devices, {name: self._counts[name] for name in present}
        )
        self._rounds[event.epoch] = event.devices
        for name in event.devices:
            self._counts[name] = self._counts.get(name, 0) + 1

    def _let_catch_up(self, present: set[str]) -> None:
        """Let devices that have come begin with the lowest count of those that have stayed, unless theirs is higher."""
        level = min((self._counts[name] for name in present & self._present), default=0)
        for name in present - self._present:
            self._counts[name] = max(level, self._counts.get(name, 0))
        self._present = present

    def round_is_over(self, epoch: int, trained: Collection[str]) -> None:
        """These devices have trained the model of a round."""
        if self._scenario.draws:
            self._checks.check(only_drawn_devices_count, epoch, trained, self._rounds[epoch])

    def of_round(self, epoch: int) -> Collection[str]:
        """Return the devices that were drawn for a round."""
        return self._rounds[epoch]

    def resume_after(self, done: int, remembered: Mapping[str, int]) -> None:
        """A server resumes after this round, with these counts of its checkpoint; later draws are forgotten."""
        self._rounds = {epoch: drawn for epoch, drawn in self._rounds.items() if epoch <= done}
        for name in self._counts:
            counted = sum(name in drawn for drawn in self._rounds.values())
            self._checks.check(draws_are_remembered, name, counted, remembered.get(name, 0))
        self._counts, self._present = dict(remembered), set(remembered)

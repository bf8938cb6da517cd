"""New plans between two rounds, when links or machines are no longer those that the plans were made for.

Links are measured by the traffic of the training itself. A choice is made beside the training and taken at the first
round boundary behind its end: planning delays no round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from pipar.events import Observer, ReplanFailed, ignore
from pipar.links import Link
from pipar.methods import Plan
from pipar.transport.shaping import Traffic
from pipar.units import format_mbits

#: A rate is another one when it differs by more than this from the one planned for. Plans are chosen by estimates that
#: are no better, and a real link wavers by about as much from round to round without having changed.
NOTICED = 0.2

#: Of more changes than this it is said how many there are.
_MOST_REASONS = 3

#: Returns every device's plan for these links.
Replan = Callable[[Mapping[str, Link]], Awaitable[Mapping[str, Plan]]]


@dataclass(frozen=True)
class MeasuredLink:
    """The traffic of one device in one round, in each direction."""

    up: Traffic
    down: Traffic

    def over(self, link: Link) -> Link:
        """Return the link with the rates that were measured; a direction with too little traffic keeps its own."""
        up_bps = self.up.rate_bps if self.up.is_enough else link.up_bps
        down_bps = self.down.rate_bps if self.down.is_enough else link.down_bps
        return Link(up_bps=up_bps, down_bps=down_bps, latency_s=link.latency_s)


class Replanner:
    """Decides when to plan again, and holds the new plans until a round boundary takes them."""

    def __init__(
        self,
        links: Mapping[str, Link],
        replan: Replan,
        observe: Observer = ignore,
        *,
        learned: Callable[[], bool] = lambda: False,
    ) -> None:
        self._planned_for = {name: _steady(link) for name, link in links.items()}
        self._measured = self._planned_for
        self._replan = replan
        self._observe = observe
        self._learned = learned
        self._choosing: asyncio.Task[None] | None = None
        self._chosen: tuple[Mapping[str, Plan], str] | None = None  # and why there was a choice
        self.why = ""  # the plans that were taken last were chosen

    def begin(self, links: Mapping[str, Link]) -> None:
        """These devices begin, by plans that were made for them."""
        self._planned_for = self._measured = {name: _steady(link) for name, link in links.items()}

    def observe_round(self, measured: Mapping[str, MeasuredLink]) -> None:
        """Take what a round's traffic says of the links; if they have changed, a choice starts beside the training."""
        self._measured = {
            name: measured[name].over(link) if name in measured else link for name, link in self._measured.items()
        }
        self._start()

    def join(self, device: str, link: Link) -> None:
        """A device has come, or come back, that the others were not planned with: all plans are to be chosen anew."""
        self._measured = {**self._measured, device: _steady(link)}
        self._start()

    def leave(self, device: str) -> None:
        """A device is gone: from the next round's measurements on, plans are chosen for those who are there."""
        self._measured = {name: link for name, link in self._measured.items() if name != device}

    def take(self) -> Mapping[str, Plan] | None:
        """Return new plans if a choice has ended since the last call, and keep why; never waits for one."""
        chosen, self._chosen = self._chosen, None
        if chosen is None:
            return None
        plans, self.why = chosen
        return plans

    def close(self) -> None:
        """Choose no more."""
        if self._choosing is not None:
            self._choosing.cancel()

    def _start(self) -> None:
        """Start a choice if the links have changed, or machines are other than they were planned for.

        If one is under way, its end starts the next.
        """
        why = "machines are faster or slower than profiled" if self._learned() else ""
        why = what_changed(self._planned_for, self._measured) or why
        if self._choosing is None and why and self._measured:
            self._planned_for = self._measured
            self._choosing = asyncio.get_running_loop().create_task(self._run(self._planned_for, why))

    async def _run(self, links: Mapping[str, Link], why: str) -> None:
        try:
            self._chosen = await self._replan(links), why
        except Exception as error:  # noqa: BLE001 - the task ends here, and the training goes on by the plans it has
            self._observe(ReplanFailed(f"New plans could not be chosen: {error}"))
        self._choosing = None
        if links is not self._measured:
            self._start()


def _steady(link: Link) -> Link:
    return Link(up_bps=link.up_bps, down_bps=link.down_bps, latency_s=link.latency_s)


def what_changed(before: Mapping[str, Link], now: Mapping[str, Link]) -> str:
    """Return in a few words who has come or gone, and whose link is another one; nothing if all is as it was."""
    words = [f"{name} joined" for name in sorted(now.keys() - before.keys())]
    words += [f"{name} left" for name in sorted(before.keys() - now.keys())]
    for name in sorted(now.keys() & before.keys()):
        words += _changes(name, before[name], now[name])
    more = len(words) - _MOST_REASONS
    return ", ".join([*words[:_MOST_REASONS], *([f"and {more} more"] if more > 0 else [])])


def _changes(name: str, before: Link, now: Link) -> list[str]:
    directions = (("up", before.up_bps, now.up_bps), ("down", before.down_bps, now.down_bps))
    return [
        f"{name} {way} from {format_mbits(old, 3)} to {format_mbits(new, 3)} Mbit/s"
        for way, old, new in directions
        if _rates_differ(new, old)
    ]


def differs(one: Link, other: Link) -> bool:
    """Return whether a link has changed: in a direction, by more than it wavers from round to round."""
    return _rates_differ(one.up_bps, other.up_bps) or _rates_differ(one.down_bps, other.down_bps)


def _rates_differ(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is not other
    return abs(one - other) > NOTICED * other

"""New plans between two rounds, when links or machines differ from those that the plans were made for.

Links are measured by the traffic of the training itself. New plans are searched for during the training and take
effect at the first round boundary after the search: planning delays no round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from pipar.events import Observer, ReplanFailed, ignore
from pipar.methods import Plan
from pipar.settings.links import Link
from pipar.transport.shaping import Traffic
from pipar.units import format_mbits

#: A rate has changed if it differs by more than this share from the one planned for. Estimates are no more exact, and a
#: real link varies by about as much from round to round.
NOTICED = 0.2

#: Of more reasons than this, only the number is given.
_MOST_REASONS = 3

#: Returns every device's plan for these links.
Replan = Callable[[Mapping[str, Link]], Awaitable[Mapping[str, Plan]]]


@dataclass(frozen=True)
class MeasuredLink:
    """The traffic of one device in one round, in each direction."""

    up: Traffic
    down: Traffic

    def over(self, link: Link) -> Link:
        """Return the link with the measured rates; a direction with too little traffic keeps its own."""
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
        learned: Callable[[], str] = lambda: "",
    ) -> None:
        self._planned_for = {name: _steady(link) for name, link in links.items()}
        self._measured = self._planned_for
        self._replan = replan
        self._observe = observe
        self._learned = learned
        self._search: asyncio.Task[None] | None = None
        self._found: tuple[Mapping[str, Plan], str] | None = None  # new plans, and the reason for them
        self.why = ""  # the reason for the plans that were taken last

    def begin(self, links: Mapping[str, Link]) -> None:
        """Start with these devices, whose plans were made for these links."""
        self._planned_for = self._measured = {name: _steady(link) for name, link in links.items()}

    def observe_round(self, measured: Mapping[str, MeasuredLink]) -> None:
        """Take the links that a round's traffic shows; if they have changed, start a search in the background."""
        self._measured = {
            name: measured[name].over(link) if name in measured else link for name, link in self._measured.items()
        }
        self._start()

    def join(self, device: str, link: Link) -> None:
        """Plan again for all devices: this one has joined, or rejoined, and the plans were made without it."""
        self._measured = {**self._measured, device: _steady(link)}
        self._start()

    def leave(self, device: str) -> None:
        """Note that a device has left: after the next round's measurements, plans are made for the other devices."""
        self._measured = {name: link for name, link in self._measured.items() if name != device}

    def take(self) -> Mapping[str, Plan] | None:
        """Return new plans if a search has ended since the last call, and set `why`; never waits for one."""
        found, self._found = self._found, None
        if found is None:
            return None
        plans, self.why = found
        return plans

    @property
    def is_searching(self) -> bool:
        """Whether a search for plans is running."""
        return self._search is not None

    def close(self) -> None:
        """Stop planning."""
        if self._search is not None:
            self._search.cancel()

    def _start(self) -> None:
        """Start a search if links have changed, or machines differ from those that plans were made for.

        If one is running, the next one starts when it ends.
        """
        why = what_changed(self._planned_for, self._measured) or self._learned()
        if self._search is None and why and self._measured:
            self._planned_for = self._measured
            self._search = asyncio.get_running_loop().create_task(self._run(self._planned_for, why))

    async def _run(self, links: Mapping[str, Link], why: str) -> None:
        try:
            plans = await self._replan(links)
            change = getattr(self._replan, "change", "")
            self._found = plans, f"{why}: {change}" if change else why
        except Exception as error:  # noqa: BLE001 - the task ends here, and the training keeps its plans
            self._observe(ReplanFailed(f"Planning again failed: {error}"))
        self._search = None
        if links is not self._measured:
            self._start()


def _steady(link: Link) -> Link:
    return Link(up_bps=link.up_bps, down_bps=link.down_bps, latency_s=link.latency_s)


def what_changed(before: Mapping[str, Link], now: Mapping[str, Link]) -> str:
    """Return in a few words which devices joined or left and whose links changed; empty if nothing did."""
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
    """Return whether a link has changed in a direction by more than its usual variation from round to round."""
    return _rates_differ(one.up_bps, other.up_bps) or _rates_differ(one.down_bps, other.down_bps)


def _rates_differ(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is not other
    return abs(one - other) > NOTICED * other

"""Choosing plans beside a training: in a process of its own at the lowest priority, so that no round waits for it.

In the process of the server a search would hold the interpreter, and every message would wait. The process is started
when it is first needed and stays; it gets a fleet and says plans.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import struct
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain

from pipar.errors import PlanError
from pipar.links import Link
from pipar.methods import Plan
from pipar.planner.calibration import situation_key
from pipar.planner.encoding import reencoded
from pipar.planner.fleet import Fleet, plans_from_sample
from pipar.planner.paper_estimate import estimate_plans
from pipar.planner.predictor import Predictor
from pipar.planner.replanner import differs
from pipar.planner.search import SearchResult, search_plans
from pipar.planner.search_settings import QUICK, UNHURRIED, SearchSettings
from pipar.planner.simulator import simulate, simulate_within
from pipar.planner.stage_times import move_s
from pipar.planner.timing import steady_epoch_s

#: Returns the best plans of a fleet, given those in force, with so much effort.
PlanSearch = Callable[[Fleet, Mapping[str, Plan], SearchSettings], Awaitable[Mapping[str, Plan]]]

#: Situations whose plans are remembered; links that drift come into a new one again and again.
_MOST_KNOWN = 32
#: Devices that had so many split points, for whatever reason, are given no new one for a trial.
_MOST_HAD = 4
#: For a trial, layers may be moved there and back in this part of an epoch.
_TRIAL_MOVES = 0.1
#: Nothing is tried on links that are expected to change within so many rounds.
_TRIAL_ROUNDS = 20
#: Some ten bytes for each of a million devices.
_LONGEST_ANSWER = 1 << 25
#: A question of `SearchProcess` begins with its number of bytes.
LENGTH = struct.Struct("!Q")


def search_again(fleet: Fleet, start: Mapping[str, Plan], settings: SearchSettings = QUICK) -> Mapping[str, Plan]:
    """Return the best plans of a fleet; if others are hardly better those in force, encoded as is right now.

    Nor are others taken if links change so often that what they gain is less than what it takes to move layers, there
    and back: of the rounds that links stay so, one is over when they come into force, and behind the last they are
    wrong for one. In place of those in force, plans with new split points are tried that promise to be hardly worse:
    what is believed of them may be off by more.
    """
    choice = search_plans(fleet, simulate, within=simulate_within, start=start, settings=settings)
    as_it_is = reencoded(fleet, start)  # another encoding moves no layers
    # A small sample finds plans, but two that are close it may confuse: whether to change is asked of a larger one.
    epoch_s = partial(steady_epoch_s, simulate, fleet.sampled())
    new_s, as_it_is_s = epoch_s(choice.plans), epoch_s(as_it_is)
    gained_s = as_it_is_s - new_s
    pays = gained_s * (fleet.stable_rounds - 2) >= 2 * move_s(fleet, as_it_is, choice.plans)
    if gained_s >= as_it_is_s * settings.least_gain:
        return choice.plans if pays else as_it_is
    if settings.trial_cost <= 0 or fleet.stable_rounds < _TRIAL_ROUNDS:
        return as_it_is
    for plans in _with_new_cuts(fleet, choice, settings):
        is_quick_to_move = 2 * move_s(fleet, as_it_is, plans) <= as_it_is_s * _TRIAL_MOVES
        if is_quick_to_move and epoch_s(plans) <= as_it_is_s * (1 + settings.trial_cost):
            return plans
    return as_it_is


def _with_new_cuts(fleet: Fleet, choice: SearchResult, settings: SearchSettings) -> Iterator[Mapping[str, Plan]]:
    """Yield the plans of a choice, then the next best ones, that give devices new split points."""
    sample, had = fleet.sampled(settings.devices), _tried_by_kind(fleet)
    next_best = (plans_from_sample(fleet, sample, by_kind) for by_kind, _ in choice.runners_up)
    for plans in chain([choice.plans], next_best):
        if _are_new(had, plans):
            yield plans


def _tried_by_kind(fleet: Fleet) -> dict[str, frozenset[int]]:
    """Return the split points that devices of each kind had, by the first one's name."""
    return {
        kind[0].name: frozenset[int]().union(*(fleet.tried_split_points.get(member.name, ()) for member in kind))
        for kind in fleet.device_kinds()
    }


def _are_new(had: Mapping[str, frozenset[int]], plans: Mapping[str, Plan]) -> bool:
    """Return whether some kind of devices never had its split point, and every such kind has not had many others."""
    new_to = [cuts for name, cuts in had.items() if plans[name].split_point not in cuts]
    return bool(new_to) and all(0 < len(cuts) < _MOST_HAD for cuts in new_to)


class ReplanBySearch:
    """New plans for changed links, from what was learned of the machines; a known situation is not searched again."""

    def __init__(self, predictor: Predictor, search: PlanSearch) -> None:
        self._predictor = predictor
        self._search = search
        self._known: dict[tuple[object, ...], Mapping[str, Plan]] = {}
        self._links: Mapping[str, Link] = {member.name: member.link for member in predictor.fleet.members}

    async def __call__(self, links: Mapping[str, Link]) -> Mapping[str, Plan]:
        """Return the plans of the devices that have these links: who is gone takes up no core of the server."""
        is_learned = self._predictor.has_learned_of_machines()
        fleet = self._predictor.latest(links).of(links)
        plans = {member.name: self._predictor.plans[member.name] for member in fleet.members}
        are_new = any(differs(link, self._links.get(name, link)) for name, link in links.items())
        self._links = links
        # Other links may change again soon; what was learned of machines is new each time, and worth a longer look.
        if is_learned and not are_new:
            self._known.clear()
            return await self._search(fleet, plans, UNHURRIED)
        situation = (situation_key(fleet), tuple(plans.values()))
        if situation not in self._known:
            if len(self._known) == _MOST_KNOWN:
                self._known.pop(next(iter(self._known)))
            self._known[situation] = await self._search(fleet, plans, QUICK)
        return self._known[situation]


class ReplanEncodings:
    """New encodings for changed links where P and N stay: they are given, or one server-side model has one cut.

    Nothing is simulated, so this takes no time worth mentioning.
    """

    def __init__(self, fleet: Fleet, plans: Mapping[str, Plan]) -> None:
        self.fleet = fleet
        self.plans = plans

    async def __call__(self, links: Mapping[str, Link]) -> Mapping[str, Plan]:
        """Return every device's plan for these links."""
        members = tuple(replace(member, link=links.get(member.name, member.link)) for member in self.fleet.members)
        return reencoded(replace(self.fleet, members=members), self.plans)


async def search_inline(fleet: Fleet, start: Mapping[str, Plan], settings: SearchSettings) -> Mapping[str, Plan]:
    """Search here and now; in virtual time that takes none."""
    return search_again(fleet, start, settings)


async def search_by_estimate(fleet: Fleet, *_: object) -> Mapping[str, Plan]:
    """Choose by the paper's estimate, which takes milliseconds."""
    return {name: plan for name, (plan, _) in estimate_plans(fleet).items()}


class SearchProcess:
    """Searches in a process of its own (`search_worker`); `cpu_s` is the CPU time of its searches so far."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self._process: asyncio.subprocess.Process | None = None

    async def __call__(
        self, fleet: Fleet, start: Mapping[str, Plan], settings: SearchSettings = QUICK
    ) -> dict[str, Plan]:
        """Return the best plans of a fleet."""
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "pipar.planner.search_worker"),  # -P: not the user's folder's modules
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LONGEST_ANSWER,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Between two processes of ours: nothing of a peer is ever unpickled.
        question = pickle.dumps((fleet, dict(start), settings))
        self._process.stdin.write(LENGTH.pack(len(question)) + question)
        line = await self._process.stdout.readline()
        if not line:
            raise PlanError("the process that chooses plans has ended.")
        answer = json.loads(line)
        self.cpu_s += answer["cpu_s"]
        if answer["problem"]:
            raise PlanError(answer["problem"])
        return {name: Plan(*values) for name, values in answer["plans"].items()}

    async def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

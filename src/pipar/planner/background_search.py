"""Searching for plans during a training, in a separate process of the lowest priority, so that no round waits for it.

In the server's own process, a search would block the interpreter, and every message would wait. The search process is
started when it is first needed, and stays; it gets a fleet and returns plans.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain

from pipar.errors import PlanError
from pipar.methods import Plan
from pipar.planner.calibration import situation_key
from pipar.planner.encoding_choice import reencoded
from pipar.planner.fleet import Fleet, plans_from_sample
from pipar.planner.learned_costs import Predictor
from pipar.planner.measured_epochs import PlansKey, plans_key
from pipar.planner.paper_selection import estimate_plans
from pipar.planner.replanner import differs
from pipar.planner.search import SearchResult, search_plans
from pipar.planner.search_settings import QUICK, UNHURRIED, SearchSettings
from pipar.planner.simulator import simulate, simulate_within
from pipar.planner.stage_times import move_s
from pipar.planner.timing import steady_epoch_s
from pipar.planner.uncut_plans import whole_plans
from pipar.settings.links import Link

#: Returns the best plans of a fleet, given the current ones.
PlanSearch = Callable[[Fleet, Mapping[str, Plan], SearchSettings], Awaitable[Mapping[str, Plan]]]

#: Of more changes than this, only the number is given.
_MOST_CHANGES = 2
#: Situations whose plans are remembered: a limit, because links that drift produce new ones all the time.
_MOST_KNOWN = 32
#: Devices that have tried this many split points get no new one for a trial.
_MOST_TRIED = 4
#: Moving layers for a trial, and back, may take this share of an epoch.
_TRIAL_MOVES = 0.1
#: There are no trials on links that are expected to change within this many rounds.
_TRIAL_ROUNDS = 20
#: Enough for some ten bytes for each of a million devices.
_LONGEST_ANSWER = 1 << 25
#: Its imports have the lowest priority, too: devices on the same machine would wait for them.
_WORKER = "import os; os.nice(19); from pipar.planner.search_worker import main; main()"
#: A question of `SearchProcess` begins with its number of bytes.
LENGTH = struct.Struct("!Q")


class NewPlans(dict[str, Plan]):
    """Plans by device, the share of an epoch that they gain, and whether that was measured or is predicted."""

    def __init__(self, plans: Mapping[str, Plan], gain: float = 0.0, *, is_measured: bool = False) -> None:
        super().__init__(plans)
        self.gain = gain
        self.is_measured = is_measured


def search_again(fleet: Fleet, start: Mapping[str, Plan], settings: SearchSettings = QUICK) -> NewPlans:
    """Return the best plans of a fleet, or the current ones with the best encodings if the gain is too small.

    Plans that were measured count by their epochs, others by predictions. The gain is also too small if links change
    so often that moving layers, there and back, takes longer than the new plans save. One round passes before they take
    effect, and for one round after the links change they are wrong. Instead of the current plans, plans with untried
    split points may be returned that seem hardly worse: predictions of them may be off by more than that.
    """
    found = search_plans(fleet, simulate, within=simulate_within, start=start, settings=settings)
    current = reencoded(fleet, start)  # another encoding moves no layers
    # A small sample suffices to find plans, but not to compare two that are close: a larger one decides.
    epoch_s = partial(steady_epoch_s, simulate, fleet.sampled())
    measured, known = fleet.measured, cache_of(epoch_s)
    current_s = measured.expected_s(current, known)
    whole = whole_plans(fleet) if measured.seconds else None  # a pipeline may turn out slower than it seemed
    candidates = [found.plans, *measured.plans_of(current), *([] if whole is None else [whole])]
    best = min(candidates, key=lambda plans: measured.expected_s(plans, known))
    gained_s = current_s - measured.expected_s(best, known)
    pays = gained_s * (fleet.stable_rounds - 2) >= 2 * move_s(fleet, current, best)
    if current_s and gained_s >= current_s * measured.least_gain(current, best, settings.least_gain):
        is_measured = None not in (measured.measured_s(best), measured.measured_s(current))
        return NewPlans(best, gained_s / current_s, is_measured=is_measured) if pays else NewPlans(current)
    # A trial that costs less than epochs scatter shows nothing.
    if settings.trial_cost <= measured.scatter or fleet.stable_rounds < _TRIAL_ROUNDS:
        return NewPlans(current)
    current_s = known(current)
    for plans in _with_new_cuts(fleet, found, settings):
        is_quick_to_move = 2 * move_s(fleet, current, plans) <= current_s * _TRIAL_MOVES
        if is_quick_to_move and known(plans) <= current_s * (1 + settings.trial_cost):
            return NewPlans(plans)
    return NewPlans(current)


def cache_of(epoch_s: Callable[[Mapping[str, Plan]], float]) -> Callable[[Mapping[str, Plan]], float]:
    """Return a function that simulates each set of plans once."""
    known: dict[PlansKey, float] = {}

    def predict(plans: Mapping[str, Plan]) -> float:
        key = plans_key(plans)
        if key not in known:
            known[key] = epoch_s(plans)
        return known[key]

    return predict


def _with_new_cuts(fleet: Fleet, found: SearchResult, settings: SearchSettings) -> Iterator[Mapping[str, Plan]]:
    """Yield the plans of a search, best first, that give devices new split points."""
    sample, tried = fleet.sampled(settings.devices), _tried_by_kind(fleet)
    next_best = (plans_from_sample(fleet, sample, by_kind) for by_kind, _ in found.runners_up)
    for plans in chain([found.plans], next_best):
        if _are_new(tried, plans):
            yield plans


def _tried_by_kind(fleet: Fleet) -> dict[str, frozenset[int]]:
    """Return the split points that devices of each kind have tried, by the name of the kind's first device."""
    return {
        kind[0].name: frozenset[int]().union(*(fleet.tried_split_points.get(member.name, ()) for member in kind))
        for kind in fleet.device_kinds()
    }


def _are_new(tried: Mapping[str, frozenset[int]], plans: Mapping[str, Plan]) -> bool:
    """Return whether some kinds of devices get a new split point, and each of these kinds has tried few others."""
    new_to = [cuts for name, cuts in tried.items() if plans[name].split_point not in cuts]
    return bool(new_to) and all(0 < len(cuts) < _MOST_TRIED for cuts in new_to)


class ReplanBySearch:
    """New plans for changed links, searched with what was learned about the machines; known situations are cached."""

    def __init__(self, predictor: Predictor, search: PlanSearch) -> None:
        self._predictor = predictor
        self._search = search
        self._known: dict[tuple[object, ...], Mapping[str, Plan]] = {}
        self.change = ""  # of plans in the last choice, and what it gains
        self._links: Mapping[str, Link] = {member.name: member.link for member in predictor.fleet.members}

    async def __call__(self, links: Mapping[str, Link]) -> Mapping[str, Plan]:
        """Return the plans of the devices that have these links; devices that have left are not planned with."""
        is_learned = self._predictor.has_learned_of_machines()
        fleet = self._predictor.latest(links).of(links)
        plans = {member.name: self._predictor.plans[member.name] for member in fleet.members}
        are_new = any(differs(link, self._links.get(name, link)) for name, link in links.items())
        self._links = links
        # Changed links may change again soon. What was learned about machines stays true, and is worth a longer search.
        if is_learned and not are_new:
            self._known.clear()
            return self._told(plans, await self._search(fleet, plans, UNHURRIED))
        situation = (situation_key(fleet), tuple(plans.values()))
        # If epochs have shown since then what both plans take, they decide, and not what was predicted.
        known, measured = self._known.get(situation), fleet.measured
        if known is None or (known != plans and None not in (measured.measured_s(known), measured.measured_s(plans))):
            if len(self._known) == _MOST_KNOWN:
                self._known.pop(next(iter(self._known)))
            self._known[situation] = await self._search(fleet, plans, QUICK)
        return self._told(plans, self._known[situation])

    def _told(self, before: Mapping[str, Plan], after: Mapping[str, Plan]) -> Mapping[str, Plan]:
        """Keep in words how the plans change; return the new ones."""
        self.change = change_text(before, after)
        return after


def change_text(before: Mapping[str, Plan], after: Mapping[str, Plan]) -> str:
    """Return in a few words how plans change, and what that gains; empty if they do not."""
    counts = Counter(
        f"{_short(before[name])} -> {_short(plan)}" for name, plan in sorted(after.items()) if before[name] != plan
    )
    words = [text for text, _ in counts.most_common(_MOST_CHANGES)]
    if len(counts) > _MOST_CHANGES:
        words.append(f"{len(counts) - _MOST_CHANGES} other changes")
    if isinstance(after, NewPlans) and after.gain and counts:
        words.append(f"{100 * after.gain:.2g} % less {'measured' if after.is_measured else 'predicted'}")
    return ", ".join(words)


def _short(plan: Plan) -> str:
    return f"P={plan.split_point} N={plan.micro_batches}"


class ReplanEncodings:
    """New encodings for changed links where P and N stay: they are configured, or the server-side model is shared.

    Nothing is simulated, so this takes almost no time.
    """

    def __init__(self, fleet: Fleet, plans: Mapping[str, Plan]) -> None:
        self.fleet = fleet
        self.plans = plans

    async def __call__(self, links: Mapping[str, Link]) -> Mapping[str, Plan]:
        """Return every device's plan for these links."""
        members = tuple(replace(member, link=links.get(member.name, member.link)) for member in self.fleet.members)
        return reencoded(replace(self.fleet, members=members), self.plans)


async def search_inline(fleet: Fleet, start: Mapping[str, Plan], settings: SearchSettings) -> Mapping[str, Plan]:
    """Search in this process; in virtual time that takes no time."""
    return search_again(fleet, start, settings)


async def search_by_estimate(fleet: Fleet, *_: object) -> Mapping[str, Plan]:
    """Return the plans by the paper's selection, which takes milliseconds."""
    return {name: plan for name, (plan, _) in estimate_plans(fleet).items()}


class SearchProcess:
    """Searches in a separate process (`search_worker`); `cpu_s` is the CPU time of its searches so far."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self._process: asyncio.subprocess.Process | None = None

    async def __call__(self, fleet: Fleet, start: Mapping[str, Plan], settings: SearchSettings = QUICK) -> NewPlans:
        """Return the best plans of a fleet."""
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", _WORKER),  # -P: no modules of the user's folder
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LONGEST_ANSWER,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Between two of our own processes: data of a peer is never unpickled.
        question = pickle.dumps((fleet, dict(start), settings))
        self._process.stdin.write(LENGTH.pack(len(question)) + question)
        line = await self._process.stdout.readline()
        if not line:
            raise PlanError("the process that searches for plans has ended.")
        answer = json.loads(line)
        self.cpu_s += answer["cpu_s"]
        if answer["problem"]:
            raise PlanError(answer["problem"])
        plans = {name: Plan(*values) for name, values in answer["plans"].items()}
        return NewPlans(plans, answer["gain"], is_measured=answer["is_measured"])

    async def close(self) -> None:
        """End the process, even in the middle of a search."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

"""Plans in worlds that differ from what is known of them: how much time all epochs take, over the best fixed choice.

The planner's own classes choose plans round by round, as in a training, in virtual time. The worlds are simulated with
other machines and links than those that the planner was told of, and their epochs scatter.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
from support.fleets import fleet, measured

from pipar.execution.clock import run_virtually
from pipar.methods import Plan
from pipar.planner.background_search import ReplanBySearch, search_inline
from pipar.planner.compute_load import compute_seconds
from pipar.planner.encoding_choice import reencoded
from pipar.planner.fleet import Fleet, SharedHost
from pipar.planner.learned_costs import Predictor
from pipar.planner.replanner import Replanner
from pipar.planner.search import search_plans
from pipar.planner.simulator import simulate, simulate_within
from pipar.planner.uncut_plans import surest
from pipar.settings.links import Link

Q = 4  # layers of the fleets' network
GRID = [*(Plan(p, n) for p in (1, 2, 3) for n in (1, 2, 4, 8, 16, 32, 50)), Plan(Q, 1)]
SCATTER = 0.03  # that a deployment assumes


@dataclass(frozen=True)
class World:
    """What the planner is told, and what is true."""

    told: Fleet
    truth: Fleet
    split_s: float = 1.0  # how many times as long as simulated an epoch takes if the network is split
    jitter: float = 0.02  # the standard deviation of epochs
    link_jitter: float = 0.02  # and of measured rates
    first_s: float = 1.0  # how many times as long the first epoch takes after each change of plans
    changes: Mapping[int, Callable[[Fleet], Fleet]] = field(default_factory=dict)  # of the truth, from an epoch on

    def at(self, epoch: int) -> Fleet:
        truth = self.truth
        for first, change in self.changes.items():
            truth = change(truth) if epoch >= first else truth
        return truth

    def mean_s(self, plans: Mapping[str, Plan], epoch: int) -> float:
        """Return how long an epoch takes in the mean."""
        splits = any(plan.split_point < Q for plan in plans.values())
        return simulate(self.at(epoch), plans).epoch_s * (self.split_s if splits else 1.0)


@dataclass(frozen=True)
class Outcome:
    """Each epoch's mean seconds over those of the best fixed choice at that time, and the reasons of changes."""

    ratios: list[float]
    reasons: list[str]

    def regret(self, first: int = 1) -> float:
        counted = self.ratios[first - 1 :]
        return sum(counted) / len(counted)


def train(world: World, epochs: int, *, seed: int = 0) -> Outcome:
    """Train with plans that change as in a deployment: what an epoch teaches is known at the end of the next one."""
    return run_virtually(_train(world, epochs, seed))


async def _train(world: World, epochs: int, seed: int) -> Outcome:
    draw = random.Random(seed)
    names = [member.name for member in world.told.members]
    plans = surest(world.told, search_plans(world.told, simulate, within=simulate_within).plans)
    predictor = Predictor(world.told, plans, scatter=SCATTER)
    links = {member.name: member.link for member in world.told.members}
    replanner = Replanner(links, ReplanBySearch(predictor, search_inline), learned=predictor.reason)
    ratios, reasons = [], []
    took: tuple[dict[str, float], float, float] | None = None  # the last epoch: devices, server, all of it
    is_first = True
    best = cache(lambda epoch: min(world.mean_s(fixed(world.at(epoch), plan), epoch) for plan in GRID))
    for epoch in range(1, epochs + 1):
        mean_s = world.mean_s(plans, epoch)
        ratios.append(mean_s / best(max((first for first in world.changes if first <= epoch), default=1)))
        if took is not None:
            predictor.learn(epoch - 1, *took[:2])
            predictor.learn_seconds(epoch - 1, took[2], names)
        now = world.at(epoch)
        scatter = [draw.gauss(1.0, world.jitter) for _ in (*names, "server", "epoch")]
        devices_s, server_s = compute_seconds(now, plans)
        busy = {name: s * off for (name, s), off in zip(devices_s.items(), scatter, strict=False)}
        first_s, is_first = world.first_s if is_first else 1.0, False
        took = busy, server_s * scatter[-2], mean_s * first_s * max(0.8, scatter[-1])
        seen = {
            member.name: measured((member.link.up_bps or 3e9) * off, (member.link.down_bps or 3e9) * off)
            for member, off in ((one, max(0.5, draw.gauss(1.0, world.link_jitter))) for one in now.members)
        }
        predictor.measure_links(epoch, seen)
        replanner.observe_round(seen)
        await asyncio.sleep(1.0)
        found = replanner.take()
        if found is not None and dict(found) != dict(plans):
            plans, is_first = dict(found), True
            predictor.replan(epoch + 1, plans)
            reasons.append(f"epoch {epoch + 1}: {replanner.why}")
    replanner.close()
    return Outcome(ratios, reasons)


def fixed(of: Fleet, plan: Plan) -> dict[str, Plan]:
    return reencoded(of, {member.name: plan for member in of.members})


# --- worlds


def linked(of: Fleet, up: float | None, down: float | None) -> Fleet:
    """Return the fleet with links of these Mbit/s."""
    link = Link(up_bps=up and up * 1e6, down_bps=down and down * 1e6)
    return replace(of, members=tuple(replace(member, link=link) for member in of.members))


def hosted(of: Fleet, cores: float = 2) -> Fleet:
    """Return the fleet whose devices share the server's cores, and are as fast as one of them."""
    members = tuple(replace(member, host_share=1.0, costs=of.server) for member in of.members)
    return replace(of, members=members, host=SharedHost(cores))


def _off(name: str) -> Callable[[], float]:
    drawn = random.Random(f"off {name}")
    return lambda: drawn.uniform(0.85, 1.15)


FLEET = fleet(2)
HERE = hosted(FLEET)
REAL = replace(FLEET, real_links=True)
WORLDS = {
    "shared cores, unlimited": World(linked(HERE, None, None), linked(HERE, None, None)),
    "shared cores, 50/50": World(linked(HERE, 50, 50), linked(HERE, 50, 50)),
    "shared cores, 10/25, a pipeline is slower than simulated": World(
        linked(HERE, 10, 25), linked(HERE, 10, 25), split_s=1.3
    ),
    "four devices on two cores": World(linked(hosted(fleet(4)), 10, 25), linked(hosted(fleet(4)), 10, 25)),
    "slow devices": World(FLEET, FLEET),
    "slow devices, a pipeline is slower than simulated": World(FLEET, FLEET, split_s=1.3),
    "a pipeline that seems 14 % faster than whole networks is 12 % slower": World(
        linked(FLEET, 5, 5), linked(FLEET, 5, 5), split_s=1.3
    ),
    "devices are 1.4x slower": World(FLEET, FLEET.slower(devices=1.4)),
    "devices are twice as fast": World(FLEET, FLEET.slower(devices=0.5)),
    "the server is busy": World(FLEET, FLEET.slower(server=3.0)),
    "epochs scatter by 8 %": World(FLEET, FLEET.slower(devices=1.2), jitter=0.08),
    "the machine that server and devices share is busy": World(
        linked(HERE, None, None), linked(HERE, None, None).slower(devices=2.5, server=2.5)
    ),
    "first epochs take longer": World(REAL, REAL.slower(devices=1.2), first_s=1.3),
    "rates are measured badly": World(REAL, REAL, link_jitter=0.15),
    "each layer is off by up to 15 %": World(FLEET, FLEET.varied(_off)),
}
#: Where the first plan cannot be right.
MISLED = {
    "a link that could not be measured": World(linked(FLEET, None, None), linked(FLEET, 2, 5)),
    "a link that was measured wrongly": World(linked(FLEET, 50, 50), linked(FLEET, 2, 5)),
    "the server is ten times slower": World(FLEET, FLEET.slower(server=10.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_all_epochs_are_nearly_as_short_as_with_the_best_fixed_choice(name: str) -> None:
    outcome = train(WORLDS[name], 7)
    assert outcome.regret() <= 1.15, outcome
    assert outcome.regret(first=3) <= 1.05, outcome


@pytest.mark.slow
@pytest.mark.parametrize("name", MISLED)
def test_after_some_epochs_plans_are_as_good_as_the_best_fixed_choice_if_the_first_could_not_be(name: str) -> None:
    assert train(MISLED[name], 10).regret(first=5) <= 1.05


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS | MISLED)
@pytest.mark.parametrize("seed", [1, 2])
def test_plans_change_at_most_twice_in_30_rounds_if_nothing_else_changes(name: str, seed: int) -> None:
    outcome = train((WORLDS | MISLED)[name], 30, seed=seed)
    assert len(outcome.reasons) <= 2, outcome
    assert outcome.regret(first=5) <= 1.05, outcome

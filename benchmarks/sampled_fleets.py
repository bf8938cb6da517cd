"""Epochs of large fleets: simulated whole, and by the sample that planning uses.

    python -m benchmarks sampled_fleets       three families of fleets drawn at random, in about three minutes

Fleets have 130 to 2,000 devices of one to eighty kinds on 1 to 64 cores that slow each other down by up to 1.5, and
plans of every sort. In some, models are sent as changes, or server and devices share a machine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.record import Claim
from pipar.methods import METHODS, Plan
from pipar.planner.costs import Costs
from pipar.planner.fleet import Fleet, Member, SharedHost
from pipar.planner.simulator import simulate
from pipar.profiling.profile import CodingTimes, LayerProfile, Profile
from pipar.settings.links import Link

#: Fleets of each family.
_FLEETS = 300
#: How much longer or shorter an epoch may be by a sample.
MOST_OFF = 0.02

_LAYERS = tuple(
    LayerProfile(f"layer{place}", (0.001 * work, 0.05 * work), (0.002 * work, 0.1 * work), output, parameters)
    for place, (work, output, parameters) in enumerate([(1, 40_000, 10_000), (2, 20_000, 40_000), (0.3, 400, 400_000)])
)
_LINKS = (
    Link(up_bps=10e6, down_bps=25e6, latency_s=0.02),
    Link(up_bps=50e6, down_bps=50e6),
    Link(up_bps=2e6, down_bps=5e6, latency_s=0.05),
    Link(),
)
_PLANS = (Plan(1, 4), Plan(1, 10), Plan(2, 1), Plan(2, 5), Plan(1, 1), Plan(3, 1))
_AROUND = {
    "pack_s": 0.01,
    "install_s": 0.02,
    "aggregate_s": 0.01,
    "decode_s": 5e-4,
    "load_s": 1e-4,
    "encode_s": 1e-3,
    "step_s": 1e-3,
    "aggregate_s_per_byte": 2e-10,
    "step_s_per_byte": 1e-9,
}
_CHANGES = CodingTimes(1e-3, 3e-9, 1e-3, 3e-9)


@dataclass(frozen=True)
class Family:
    """Fleets that have something in common."""

    kinds: Sequence[int]
    evenness: float = 1.0  # of the numbers of devices in the kinds: with less, some kinds have most of the devices
    hosted: bool = False


FAMILIES = {
    "few kinds": Family((1, 2, 3, 6, 12)),
    "many kinds of unequal size": Family((20, 40, 80), evenness=0.7),
    "devices on the server's machine": Family((1, 3, 12, 40), hosted=True),
}


def drawn_fleet(family: Family, seed: int) -> tuple[Fleet, dict[str, Plan]]:
    """Return a random fleet, and a plan for each of its devices."""
    draw = random.Random(seed)
    profile = _profile(draw)
    kinds = draw.choice(family.kinds)
    counts = [1] * kinds
    shares = [draw.paretovariate(family.evenness) for _ in counts]
    for kind in draw.choices(range(kinds), shares, k=draw.choice([130, 200, 300, 600, 1000, 2000]) - kinds):
        counts[kind] += 1
    members: list[Member] = []
    plans: dict[str, Plan] = {}
    samples = draw.choice([50, 100, 120, 200])
    names = iter(draw.sample(range(10_000), sum(counts)))
    for count in counts:
        speed, link, plan = draw.choice([0.02, 0.05, 0.2, 1.0]), draw.choice(_LINKS), draw.choice(_PLANS)
        first = Member("", Costs(profile, speed), link, samples, host_share=speed if family.hosted else 0.0)
        alike = [replace(first, name=f"d{next(names):04}") for _ in range(count)]
        members += alike
        plans.update({member.name: plan for member in alike})
    server, cores = Costs(profile, draw.choice([0.5, 2.0, 10.0])), draw.choice([1, 2, 3, 4, 6, 8, 16, 32, 64])
    in_order = tuple(sorted(members, key=lambda member: member.name))
    fleet = Fleet(METHODS["pipar"], in_order, server, cores, 50)
    return replace(fleet, host=SharedHost(cores * draw.choice([1, 4, 16])) if family.hosted else None), plans


def _profile(draw: random.Random) -> Profile:
    contention, crowd = draw.choice([1.0, 1.1, 1.2, 1.5]), draw.choice([1, 3, 7])
    crowded = {"crowded": (contention, contention), "crowd": crowd} if contention > 1 else {}
    around = draw.choice([{}, _AROUND])
    coding = draw.choice([{}, {"changes": _CHANGES}])
    return Profile("any", "float32", (1, 50), _LAYERS, coding=coding, **crowded, **around)  # type: ignore[arg-type]


def off(fleet: Fleet, plans: dict[str, Plan]) -> float:
    """Return by which share an epoch of a sample is longer than one of the whole fleet; negative if it is shorter."""
    return simulate(fleet.sampled(), plans).epoch_s / simulate(fleet, plans).epoch_s - 1


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    del folder
    claims: list[Claim] = []
    details: dict[str, object] = {}
    for name, family in FAMILIES.items():
        shares = [off(*drawn_fleet(family, seed)) for seed in range(_FLEETS)]
        within = sum(abs(share) <= MOST_OFF for share in shares) / len(shares)
        claims.append(Claim(f"{name}: fleets of {len(shares)} within 2 %", 100 * within, "%", least=99.0))
        worst = sorted(range(len(shares)), key=lambda seed: -abs(shares[seed]))[:5]
        details[name] = {"worst": {str(seed): round(shares[seed], 4) for seed in worst}}
    return claims, details

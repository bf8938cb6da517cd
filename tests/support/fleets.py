"""Small fleets with hand-written profiles, for tests of planning and prediction."""

from __future__ import annotations

import random

from pipar.methods import METHODS, Plan
from pipar.planner.costs import Costs
from pipar.planner.fleet import Fleet, Member
from pipar.planner.replanner import MeasuredLink
from pipar.profiling.profile import LayerProfile, Profile
from pipar.settings.links import Link
from pipar.transport.shaping import Traffic

LAYERS = tuple(LayerProfile(name, (0.001, 0.04), (0.002, 0.08), 25_000, 4_000) for name in "abcd")
PROFILE = Profile("any", "float32", (1, 50), LAYERS)
LINK = Link(up_bps=10e6, down_bps=20e6)
PLAN = Plan(2, 5)


def fleet(devices: int = 4, speed: float = 0.2) -> Fleet:
    costs = Costs(PROFILE, speed)
    members = tuple(Member(f"d{number:02}", costs, LINK, 200) for number in range(devices))
    return Fleet(METHODS["pipar"], members, Costs(PROFILE, 0.5), 2, 50)


def fleet_of_two_kinds(seed: int) -> Fleet:
    """Return up to six devices with other speeds, links and sizes, on one core or two; batches are of 12 samples.

    In every fourth fleet, messages are in flight for longer than a batch is computed.
    """
    latency_s = 1.0 if seed % 4 == 2 else 0.01
    rng = random.Random(seed)
    layers = []
    for name in "abc":
        forward = tuple(rng.uniform(0, 0.02) + rng.uniform(0.001, 0.02) * samples for samples in (1, 12))
        sizes = rng.randrange(500, 20_000), rng.choice([1000, 1_000_000])
        layers.append(LayerProfile(name, forward, tuple(2 * f for f in forward), *sizes))
    around = {"pack_s": 0.01, "install_s": 0.02, "aggregate_s": 0.03, "decode_s": 1e-3, "load_s": 1e-4}
    profile = Profile("any", "float32", (1, 12), tuple(layers), encode_s=1e-3, step_s=1e-3, **around)  # type: ignore[arg-type]
    members: list[Member] = []
    for _ in range(2):
        link = Link(up_bps=10 ** rng.uniform(5.5, 8), down_bps=10 ** rng.uniform(5.5, 8), latency_s=latency_s)
        costs, samples = Costs(profile, 10 ** rng.uniform(-1.3, 0.3)), rng.choice([5, 12, 30, 60])
        members += [Member(f"d{len(members) + n}", costs, link, samples) for n in range(rng.randint(1, 3))]
    return Fleet(METHODS["pipar"], tuple(members), Costs(profile, 10 ** rng.uniform(-0.5, 1)), rng.randint(1, 2), 12)


def plans(of: Fleet, plan: Plan = PLAN) -> dict[str, Plan]:
    return {member.name: plan for member in of.members}


def measured(up_bps: float, down_bps: float) -> MeasuredLink:
    return MeasuredLink(Traffic(1_000_000, 8e6 / up_bps), Traffic(1_000_000, 8e6 / down_bps))

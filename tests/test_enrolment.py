"""Who comes to an open training gets orders for the configuration of now, or is refused alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from pipar.config import DeviceSpec, Link, config_from
from pipar.enrolment import Open
from pipar.errors import ProtocolError
from pipar.job import Job
from pipar.methods import Plan
from pipar.planner.profile import CodingTimes, LayerProfile, Profile
from pipar.protocol.orders import Orders
from pipar.session import Introduction

TIMES = CodingTimes(1e-5, 1e-9, 1e-5, 1e-9)
LAYERS = tuple(
    LayerProfile(name, (0.01,), (0.02,), 40_000, 4_000, rectified=True, shares={"sparse-planes": (0.4, 0.4)})
    for name in "abc"
)
WHOLE = Profile("any", "float32", (10,), LAYERS, coding={"sparse-planes": TIMES, "changes": TIMES}, changes_share=0.5)
PREFIX = replace(WHOLE, layers=LAYERS[:1], total_layers=3)
SLOW = Link(up_bps=4e6, down_bps=4e6)
IN_HALVES = Plan(2, 1, 0, "fp16", "fp16")


def opened(link: Link = SLOW, *, kept: dict[str, Plan] | None = None, **tree: Any) -> Open:
    """Return an open training with a server that has the whole network; devices have this link and no other limit."""
    job = Job(
        config=config_from({"run": {"method": "sfl2", "batch_size": 10}, **tree}),
        specs=(), sizes={}, server_profile=WHOLE, device_profiles={}, batch_statistics=False, dropout=False, plans={},
        dataset="own", model="any",
    )  # fmt: skip
    enrolment = Open(job, {}, lambda name: DeviceSpec(name, link, 1.0, None, "auto", "auto"))
    enrolment.keep_plans(kept or {})
    return enrolment


def begun(enrolment: Open, *names: str, profile: Profile = WHOLE) -> dict[str, Orders]:
    everybody = [Introduction(name, 100, profile) for name in names]
    for who in everybody:
        enrolment.check(who)
    return dict(asyncio.run(enrolment.begin(everybody)))


@pytest.mark.parametrize("encoding", ["auto", "raw"])
def test_who_holds_fewer_layers_than_the_one_model_is_cut_behind_is_refused_alone(encoding: str) -> None:
    enrolment = opened(kept={"a": Plan(2, 1)}, wire={"encoding": encoding})
    small = Introduction("small", 100, PREFIX)
    with pytest.raises(ProtocolError, match="small"):  # also before anybody else is there
        enrolment.check(small)
    begun(enrolment, "a")
    with pytest.raises(ProtocolError, match="small"):
        enrolment.check(small)
    assert enrolment.join(Introduction("b", 100, WHOLE)).plan.split_point == 2
    begun(opened(), "small", profile=PREFIX)  # the cut of a new training is one that it has


def test_a_device_that_comes_back_with_fewer_layers_than_its_plan_has_gets_another_plan() -> None:
    enrolment = opened(kept={"a": Plan(2, 1), "b": Plan(2, 1)}, run={"method": "sfl", "batch_size": 10})
    assert begun(enrolment, "a", profile=PREFIX)["a"].plan.split_point == 1
    assert enrolment.join(Introduction("b", 100, PREFIX)).plan.split_point == 1


@pytest.mark.parametrize("method", ["sfl", "sfl2"])
def test_a_training_goes_on_with_the_encodings_that_are_configured_now(method: str) -> None:
    run = {"run": {"method": method, "batch_size": 10}}
    for wire, expected in (("auto", "sparse-planes"), ("raw", "raw"), ("int8", "int8")):
        enrolment = opened(kept=dict.fromkeys("abc", IN_HALVES), wire={"encoding": wire}, **run)
        plans = {name: orders.plan for name, orders in begun(enrolment, "a", "b").items()}
        joined = enrolment.join(Introduction("c", 100, WHOLE)).plan
        assert {*plans.values(), joined} == {Plan(2, 1, 0, expected, expected)}


def test_links_between_machines_may_turn_out_slow_so_everybody_keeps_what_changes_are_told_from() -> None:
    unknown = begun(opened(Link()), "a")["a"]
    assert unknown.keeps_base
    assert not unknown.sends_changes(None)
    assert unknown.sends_changes(0.0)
    assert not begun(opened(Link(), wire={"encoding": "raw"}), "a")["a"].keeps_base
    assert not begun(opened(Link(), run={"method": "sl", "batch_size": 10}), "a")["a"].keeps_base

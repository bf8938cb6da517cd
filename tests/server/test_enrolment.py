"""A device that joins an open training gets orders by the current configuration, or is refused alone."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipar.device.program import _fault
from pipar.errors import (
    InputError,
    NetworkRefusedError,
    OtherNetworkError,
    PlanError,
    ProtocolError,
    TrainingError,
    TryAgainError,
    UnusableProfileError,
)
from pipar.execution.clock import clock_machine
from pipar.job.job import Job
from pipar.job.plans import make_plans
from pipar.launch.rehearsal import rehearse
from pipar.methods import Plan
from pipar.profiling.profile import CodingTimes, LayerProfile, Profile
from pipar.server.device_messages import Expected, Introduction, read_hello, read_profile
from pipar.server.enrolment import OpenEnrolment
from pipar.server.session import fault
from pipar.settings.config import DeviceSpec
from pipar.settings.config_file import config_from
from pipar.settings.links import Link
from pipar.storage.checkpoint import Checkpoint
from pipar.wire.messages import EMPTY, Kind, Message, TargetSize, json_body
from pipar.wire.orders import Orders

TIMES = CodingTimes(1e-5, 1e-9, 1e-5, 1e-9)
LAYERS = tuple(
    LayerProfile(name, (0.01,), (0.02,), 40_000, 4_000, rectified=True, shares={"sparse-planes": (0.4, 0.4)})
    for name in "abc"
)
WHOLE = Profile("any", "float32", (10,), LAYERS, coding={"sparse-planes": TIMES, "changes": TIMES}, changes_share=0.5)
PREFIX = replace(WHOLE, layers=LAYERS[:1], total_layers=3)
SLOW = Link(up_bps=4e6, down_bps=4e6)
MakePlans = Callable[[Job], Mapping[str, Plan]]
MAKE_PLANS = partial(make_plans, rehearse=rehearse)
IN_HALVES = Plan(2, 1, 0, "fp16", "fp16")


def opened(
    link: Link = SLOW, *, kept: dict[str, Plan] | None = None, plans: MakePlans = MAKE_PLANS, **tree: Any
) -> OpenEnrolment:
    """Return an open training with a server that has the whole network; devices have this link and no other limit."""
    job = Job(
        config=config_from({"run": {"method": "sfl2", "batch_size": 10}, **tree}),
        specs=(), sizes={}, server_profile=WHOLE, device_profiles={}, batch_statistics=False, dropout=False, plans={},
        dataset="own", model="any",
    )  # fmt: skip
    enrolment = OpenEnrolment(job, {}, lambda name: DeviceSpec(name, link, 1.0, None, "auto", "auto"), plans)
    enrolment.keep_plans(kept or {})
    return enrolment


def begun(enrolment: OpenEnrolment, *names: str, profile: Profile = WHOLE) -> dict[str, Orders]:
    introductions = [Introduction(name, 100, profile) for name in names]
    for introduction in introductions:
        enrolment.check(introduction)
    return dict(asyncio.run(enrolment.begin(introductions)))


@pytest.mark.parametrize("encoding", ["auto", "raw"])
def test_a_device_with_fewer_layers_than_the_cut_of_the_shared_model_is_refused_alone(encoding: str) -> None:
    enrolment = opened(kept={"a": Plan(2, 1)}, wire={"encoding": encoding})
    small = Introduction("small", 100, PREFIX)
    with pytest.raises(ProtocolError, match="small"):  # also before any other device is present
        enrolment.check(small)
    begun(enrolment, "a")
    with pytest.raises(ProtocolError, match="small"):
        enrolment.check(small)
    assert enrolment.join(Introduction("b", 100, WHOLE)).plan.split_point == 2
    begun(opened(), "small", profile=PREFIX)  # the cut of a new training is one that it has


def test_a_device_with_another_number_of_threads_than_configured_is_refused() -> None:
    enrolment = opened()
    spec = DeviceSpec("a", Link(), 1.0, None, "auto", "auto", threads=4)
    enrolment._specs = {"a": spec}
    with pytest.raises(ProtocolError, match=r"'a' computes with 1 threads, but devices\.threads = 4"):
        enrolment.check(Introduction("a", 100, WHOLE))
    enrolment.check(Introduction("a", 100, replace(WHOLE, threads=4)))
    enrolment.check(Introduction("b", 100, replace(WHOLE, threads=2)))


def test_a_device_that_rejoins_with_fewer_layers_than_its_plan_gets_another_plan() -> None:
    enrolment = opened(kept={"a": Plan(2, 1), "b": Plan(2, 1)}, run={"method": "sfl", "batch_size": 10})
    assert begun(enrolment, "a", profile=PREFIX)["a"].plan.split_point == 1
    assert enrolment.join(Introduction("b", 100, PREFIX)).plan.split_point == 1


@pytest.mark.parametrize("estimate", ["simulation", "paper"])
def test_a_device_that_joins_alone_gets_a_plan_by_the_configured_estimate(estimate: str) -> None:
    run = {"run": {"method": "pipar", "batch_size": 10}, "plan": {"estimate": estimate}}
    enrolment = opened(Link(up_bps=4e8, down_bps=4e8, latency_s=9.0), **run)
    begun(enrolment, "a", profile=PREFIX)  # another kind of device
    # Seconds of latency make every cut slower than the whole network, but the paper's estimate has no latency.
    plan = enrolment.join(Introduction("b", 100, WHOLE)).plan
    assert (plan.split_point == 3) == (estimate == "simulation")


@pytest.mark.parametrize("method", ["sfl", "sfl2"])
def test_a_resumed_training_uses_the_encodings_that_are_configured_now(method: str) -> None:
    run = {"run": {"method": method, "batch_size": 10}}
    for wire, expected in (("auto", "sparse-planes"), ("raw", "raw"), ("int8", "int8")):
        enrolment = opened(kept=dict.fromkeys("abc", IN_HALVES), wire={"encoding": wire}, **run)
        plans = {name: orders.plan for name, orders in begun(enrolment, "a", "b").items()}
        joined = enrolment.join(Introduction("c", 100, WHOLE)).plan
        assert {*plans.values(), joined} == {Plan(2, 1, 0, expected, expected)}


@pytest.mark.slow
def test_devices_on_real_links_keep_the_base_of_changes_because_a_link_may_turn_out_slow() -> None:
    unknown = begun(opened(Link()), "a")["a"]
    assert unknown.keeps_base
    assert not unknown.sends_changes(None)
    assert unknown.sends_changes(0.0)
    assert not begun(opened(Link(), wire={"encoding": "raw"}), "a")["a"].keeps_base
    assert not begun(opened(Link(), run={"method": "sl", "batch_size": 10}), "a")["a"].keeps_base


# --- wild profiles

#: Numbers at the limits of a profile, and beyond them.
AMOUNTS = (0, 5e-324, 1e-300, 1e-9, 1.0, 1e6, 1e6, 1e7, 1e308, math.inf, math.nan, -1.0, 10**400)
COUNTS = (0, 1, 10**15, 10**15, 10**16, 10**400, -1)
SIZES = ((1,), (10,), (10**6,), (1, 10**6), (1, 10**7), (1, 10**400), (2, 1))
_PLACES = {
    "forward_s": AMOUNTS, "backward_s": AMOUNTS, "least_s": AMOUNTS, "shares": AMOUNTS, "saved_bytes": COUNTS,
    "batch_sizes": SIZES, "crowd": COUNTS, "crowded": AMOUNTS, "load_s": AMOUNTS, "encode_s_per_byte": AMOUNTS,
    "noise_s_per_byte": AMOUNTS, "step_s": AMOUNTS, "changes_share": AMOUNTS, "coding": AMOUNTS,
}  # fmt: skip
changes = st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in _PLACES.items()})


def wild(change: dict[str, Any]) -> dict[str, Any]:
    """Return an introduction of a device: a profile of the right network with numbers of any size."""
    said = json.loads(WHOLE.to_json())
    sizes = said["batch_sizes"] = list(change.get("batch_sizes", WHOLE.batch_sizes))
    for layer in said["layers"]:
        layer |= {key: [change.get(key, 0.01)] * len(sizes) for key in ("forward_s", "backward_s", "least_s")}
        layer["saved_bytes"] = change.get("saved_bytes", 0)
        layer["shares"] = {"sparse-planes": [0.4, change.get("shares", 0.4)]}
    said["crowded"] = [change.get("crowded", 1.0)] * len(sizes)
    said["coding"]["changes"] = dict.fromkeys(said["coding"]["changes"], change.get("coding", 1e-9))
    plain = ("crowd", "load_s", "encode_s_per_byte", "noise_s_per_byte", "step_s", "changes_share")
    return {**said, **{key: change[key] for key in plain if key in change}}


@pytest.mark.slow
@settings(max_examples=60)
@given(change=changes)
def test_a_wild_profile_is_refused_or_planned_with_and_ends_no_other_devices_training(change: dict[str, Any]) -> None:
    run = {"run": {"method": "sfl", "batch_size": 10}}
    enrolment = opened(kept={"a": Plan(1, 1)}, **run)
    begun(enrolment, "a")
    try:
        profile = read_profile(wild(change), WHOLE)
        enrolment.check(Introduction("wild", 100, profile))
    except ProtocolError:
        return
    assert enrolment.join(Introduction("wild", 100, profile)).plan.split_point <= 3
    assert enrolment.join(Introduction("b", 100, WHOLE)).plan.split_point <= 3
    assert math.isfinite(enrolment.job.bounds().device_s["wild"])
    assert profile is not None
    assert set(begun(opened(**run), "wild", profile=profile)) == {"wild"}


@pytest.mark.parametrize(
    "change",
    [
        {"batch_sizes": (1, 10**400)},
        {"batch_sizes": (1, 10**6 + 1)},
        {"forward_s": 1e308},
        {"backward_s": 1.1e6},
        {"saved_bytes": 10**16},
        {"crowd": 10**400},
        {"load_s": math.inf},
        {"coding": 1e9},
    ],
)
def test_a_profile_with_numbers_that_no_machine_has_is_refused_in_one_sentence(change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="not usable") as refused:
        read_profile(wild(change), WHOLE)
    assert len(str(refused.value)) < 300


def test_the_one_device_that_planning_fails_for_is_named() -> None:
    def fails(job: Job) -> dict[str, Plan]:
        if "wild" in job.sizes:
            raise OverflowError("too large")
        return dict.fromkeys(job.sizes, Plan(1, 1))

    introductions = [Introduction(name, 100, WHOLE) for name in ("a", "wild")]
    with pytest.raises(UnusableProfileError, match="too large") as refused:
        asyncio.run(opened(plans=fails).begin(introductions))
    assert refused.value.device == "wild"
    assert set(asyncio.run(opened(plans=fails).begin(introductions[:1]))) == {"a"}


def test_a_failure_that_no_device_causes_alone_names_no_device() -> None:
    def fails_together(job: Job) -> dict[str, Plan]:
        if len(job.sizes) > 1:
            raise ValueError("of both")
        return {}

    with pytest.raises(ValueError, match="of both"):
        asyncio.run(opened(plans=fails_together).begin([Introduction(name, 100, WHOLE) for name in "ab"]))


def test_a_kept_plan_is_chosen_again_if_its_cut_leaks_too_much_now() -> None:
    kept, tree = {"a": Plan(1, 1), "b": Plan(1, 1)}, {"run": {"method": "sfl", "batch_size": 10}}
    as_before, limited = opened(kept=kept, **tree), opened(kept=kept, **tree)
    limited.job = replace(limited.job, leaky_cuts={1: 0.9})
    assert [orders.plan.split_point for orders in begun(as_before, "a", "b").values()] == [1, 1]
    assert [orders.plan.split_point for orders in begun(limited, "a", "b").values()] == [2, 2]
    assert limited.join(Introduction("c", 100, WHOLE)).plan.split_point == 2


def test_a_saved_training_whose_only_cut_leaks_too_much_now_is_not_resumed() -> None:
    from pipar.launch.deployed_server import _check_cut  # brings torch and grpc

    job = replace(opened(privacy={"max_leakage": 0.5, "leakage": "x"}).job, leaky_cuts={1: 0.9})
    saved = Checkpoint(1, EMPTY, {}, {"a": Plan(1, 1)}, {"a": 100})
    with pytest.raises(PlanError, match=r"with sfl2 is cut at split point 1, which leaks 0\.900, more than"):
        _check_cut(job, saved)
    _check_cut(job, replace(saved, plans={"a": Plan(2, 1)}))
    _check_cut(job, None)


# --- server.allow


def test_only_the_named_devices_may_take_part() -> None:
    enrolment = opened(server={"allow": ["a", "b"]})
    begun(enrolment, "a", "b")
    with pytest.raises(ProtocolError, match="'c' has a credential, but may not take part in this training"):
        enrolment.check(Introduction("c", 100, WHOLE))


def test_a_file_of_names_is_read_again_for_every_device_that_joins(tmp_path: Path) -> None:
    names = tmp_path / "devices.txt"
    names.write_text("# of the first ward\na\n\n  b  \n")
    enrolment = opened(server={"allow": str(names)})
    begun(enrolment, "a", "b")
    late = Introduction("c", 100, WHOLE)
    with pytest.raises(ProtocolError, match=r"server\.allow"):
        enrolment.check(late)
    names.write_text("a\nc\n")
    enrolment.check(late)
    with pytest.raises(ProtocolError, match="'b' has a credential"):  # if it joins again
        enrolment.check(Introduction("b", 100, WHOLE))


def test_a_change_of_the_file_of_names_is_described_once(tmp_path: Path) -> None:
    names = tmp_path / "devices.txt"
    names.write_text("a\nb\n")
    enrolment = opened(server={"allow": str(names)})
    assert enrolment.take_change() is None
    names.write_text("a\nc\n")
    assert enrolment.take_change() == f"{names} was read again: added c; removed b."
    assert enrolment.take_change() is None
    with pytest.raises(ProtocolError, match="'b' has a credential"):
        enrolment.check_allowed("b")
    names.unlink()
    assert enrolment.take_change() is None  # devices that join are told
    assert opened(server={"allow": ["a"]}).take_change() is None
    assert opened().take_change() is None


@pytest.mark.parametrize(("content", "sentence"), [(None, "no such file or directory"), (b"\xff\xfe", "is not text")])
def test_while_the_file_cannot_be_read_no_device_is_admitted(
    tmp_path: Path, content: bytes | None, sentence: str
) -> None:
    names = tmp_path / "devices.txt"
    names.write_text("a\n")
    enrolment = opened(server={"allow": str(names)})
    names.unlink()
    if content is not None:
        names.write_bytes(content)
    with pytest.raises(TryAgainError, match=f"admits no device until its list of devices can be read.*{sentence}"):
        enrolment.check(Introduction("a", 100, WHOLE))


def test_a_server_does_not_start_with_a_file_of_names_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Cannot read the names of the devices that may take part .*missing\.txt"):
        opened(server={"allow": str(tmp_path / "missing.txt")})


def test_a_device_with_more_samples_than_allowed_is_refused_with_the_key_to_change() -> None:
    enrolment = opened()
    enrolment.job = replace(enrolment.job, most_samples=50_000)
    enrolment.check(Introduction("a", 50_000, WHOLE))
    with pytest.raises(ProtocolError, match=r"'a' reports 50001 samples; .* at most 50000 .* server.max_samples"):
        enrolment.check(Introduction("a", 50_001, WHOLE))


def test_a_device_with_another_network_learns_that_its_configuration_is_wrong_and_not_its_profile() -> None:
    other = replace(WHOLE, model="other:Wide", layers=WHOLE.layers[:2])
    with pytest.raises(OtherNetworkError) as refused:
        read_profile(json.loads(other.to_json()), WHOLE)
    assert str(refused.value) == (
        f"The network of the device is other:Wide with 2 layers, but {WHOLE.model} has {len(WHOLE.layers)}: give "
        "[model] and [data] of its configuration the same network and samples as in that of the server."
    )
    told = fault(refused.value)
    assert isinstance(_fault(told, "refused this device"), NetworkRefusedError)
    assert isinstance(_fault(fault("no"), "refused this device"), TrainingError)


@pytest.mark.parametrize(
    ("device", "server", "names"),
    [("pipar", "fl", True), ("fl", "pipar", True), ("sfl", "pipar", False), (7, "fl", False), (None, "fl", False)],
)
def test_a_device_whose_method_divides_the_network_otherwise_learns_the_method(
    device: Any, server: str, names: bool
) -> None:
    whole = replace(WHOLE, layers=WHOLE.layers[:1])
    content = {"name": "a", "samples": 9, "profile": json.loads(WHOLE.to_json()), "method": device}
    with pytest.raises(OtherNetworkError, match="with 3 layers, but any has 1") as refused:
        read_hello(Message(Kind.HELLO, body=json_body(content)), Expected(whole, method=server), None)
    assert (f"give its configuration run.method = '{server}' as the server has" in str(refused.value)) is names
    same = read_hello(Message(Kind.HELLO, body=json_body(content)), Expected(WHOLE, method=server), None)
    assert same.profile == WHOLE


def test_a_device_with_targets_of_another_size_learns_that_its_task_may_differ() -> None:
    content = {"name": "a", "samples": 9, "target_bytes": 4}
    with pytest.raises(OtherNetworkError, match=r"4 bytes of targets .* expects 8: give both .* the same \[task\]"):
        read_hello(Message(Kind.HELLO, body=json_body(content)), Expected(targets=TargetSize(8)), None)


def test_a_device_on_the_servers_machine_is_planned_for_with_its_cores() -> None:
    enrolment = opened()
    here, elsewhere = (
        Introduction(name, 100, WHOLE, machine=machine) for name, machine in (("a", clock_machine()), ("b", "another"))
    )
    asyncio.run(enrolment.begin([here, elsewhere]))
    assert [member.host_share for member in enrolment.job.fleet().members] == [1.0, 0.0]
    alone = opened()
    asyncio.run(alone.begin([elsewhere]))
    assert alone.job.fleet().host is None


def test_first_plans_are_made_for_links_as_they_were_measured() -> None:
    planned: list[Link] = []

    def plan(job: Job) -> Mapping[str, Plan]:
        planned.extend(member.link for member in job.fleet().members)
        return MAKE_PLANS(job)

    enrolment, found = opened(Link(), plans=plan), Link(up_bps=3e6, down_bps=5e6, latency_s=0.01)
    enrolment.measured({"a": found})
    asyncio.run(enrolment.begin([Introduction("a", 100, WHOLE)]))
    assert planned == [found]
    assert (enrolment.link_to_plan("a"), enrolment.link_to_plan("b")) == (found, Link())
    assert enrolment.link("a") == Link()  # it is not emulated

"""The server's predictions improve with every epoch, and use nothing that was not measured yet."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fleets import LAYERS, fleet, fleet_of_two_kinds, measured, plans

from pipar.events import EpochResult, ignore
from pipar.job.prepare import prepare_timing_only
from pipar.launch.rehearsal import rehearse
from pipar.launch.virtual import train_timing_only
from pipar.methods import METHODS, Plan
from pipar.planner.background_search import search_again
from pipar.planner.calibration import Calibration, MachineHistory, Shares, calibrated, pooled, situation_key
from pipar.planner.compute_load import compute_loads, compute_seconds
from pipar.planner.costs import Costs
from pipar.planner.fleet import Fleet, SharedHost
from pipar.planner.learned_costs import Predictor, forecast_rounds, predict_s
from pipar.profiling.profile import LayerProfile, Profile
from pipar.settings.config_file import config_from
from pipar.settings.links import Link
from reproduction.perturbed_times import perturbed


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "server"), [(1.4, 1.0), (0.7, 1.0), (1.0, 2.5), (1.3, 1.6)])
def test_predictions_come_nearer_to_the_truth_with_every_epoch(devices: float, server: float) -> None:
    here = fleet()
    truth = here.slower(devices=devices, server=server)
    predictor, takes_s = Predictor(here, plans(here)), predict_s(truth, plans(here))
    for epoch in range(1, 9):
        predictor.learn(epoch, *compute_seconds(truth, plans(here)))
    errors = [abs(predictor.predicted_s(epoch, plans(here)) / takes_s - 1) for epoch in range(1, 10)]
    assert errors[0] == errors[1] > 0.02  # an epoch's trace arrives during the next epoch
    assert all(later < earlier + 1e-3 for earlier, later in pairwise(errors[1:]))
    assert errors[-1] < 0.01


def test_contention_on_the_server_is_not_taken_for_a_slow_machine() -> None:
    crowded = Profile("any", "float32", (1, 50), LAYERS, crowded=(1.8, 1.3), crowd=1)
    here = fleet(8)
    here = Fleet(here.method, here.members, Costs(crowded), 2, 50)
    predictor = Predictor(here, plans(here))
    before = predictor.predicted_s(1, plans(here))
    predictor.learn(1, *compute_seconds(here, plans(here)))
    assert predictor.predicted_s(3, plans(here)) == pytest.approx(before, rel=1e-9)
    assert not predictor.has_learned()


def test_a_device_that_is_a_little_slower_does_not_seem_slower_every_epoch() -> None:
    here = fleet()
    predictor, before = Predictor(here, plans(here)), compute_seconds(here, plans(here))
    slower = {name: seconds * (1.03 if name == "d01" else 1.0) for name, seconds in before[0].items()}
    for epoch in range(1, 12):
        predictor.learn(epoch, slower, before[1])
        (kind,) = predictor.fleet_for(epoch + 2).device_kinds()
        assert len(kind) == 4
    assert predictor.predicted_s(13, plans(here)) == pytest.approx(predictor.predicted_s(1, plans(here)), rel=1e-6)


def test_measured_links_take_effect_in_the_next_epoch() -> None:
    here = fleet()
    predictor = Predictor(here, plans(here))
    predictor.measure_links(1, {member.name: measured(20e6, 40e6) for member in here.members})
    assert predictor.predicted_s(1, plans(here)) == predict_s(here, plans(here))
    assert predictor.predicted_s(2, plans(here)) < 0.9 * predictor.predicted_s(1, plans(here))


@pytest.mark.slow
def test_forgetting_past_epochs_does_not_change_predictions() -> None:
    here = fleet()
    everything, pruned = Predictor(here, plans(here)), Predictor(here, plans(here))
    for epoch in range(1, 30):
        for one in (everything, pruned):
            if epoch % 7 == 0:
                one.replan(epoch + 1, plans(here))
            one.measure_links(epoch, {member.name: measured(1e6 * (5 + epoch), 40e6) for member in here.members})
            one.learn(epoch, *compute_seconds(here.slower(devices=1 + epoch / 100), plans(here)))
        pruned.forget(epoch)
        for later in (epoch + 1, epoch + 2, epoch + 3):
            assert pruned.predicted_s(later, plans(here)) == everything.predicted_s(later, plans(here))
        assert max(len(pruned._plans), len(pruned._links), len(pruned._fits)) <= 3


def test_links_are_expected_to_stay_stable_as_long_as_so_far_and_a_search_is_due_when_they_stay_longer() -> None:
    here = fleet()
    predictor = Predictor(here, plans(here))
    epochs = iter(range(1, 100))

    def rounds(count: int, up_bps: float) -> None:
        for _ in range(count):
            predictor.measure_links(next(epochs), {m.name: measured(up_bps, 20e6) for m in here.members})

    rounds(4, 10.5e6)
    rounds(3, 20e6)
    assert predictor.latest({}).stable_rounds == math.inf  # one change does not predict the next
    assert not predictor.has_learned()
    rounds(1, 5e6)
    assert predictor.latest({}).stable_rounds == 8 / 2
    rounds(7, 5e6)
    assert not predictor.has_learned()
    rounds(1, 5.2e6)
    assert predictor.has_learned()
    assert predictor.latest({}).stable_rounds == 8.0
    assert not predictor.has_learned()
    predictor.measure_links(next(epochs), {"d01": measured(50e6, 50e6)})  # one of four is not the fleet's links
    assert predictor.latest({}).stable_rounds == 9.0


def test_a_search_knows_which_split_points_each_device_has_tried() -> None:
    here = fleet()
    predictor = Predictor(here, plans(here, Plan(2, 5)))
    predictor.replan(3, {"d00": Plan(1, 4)})
    predictor.replan(5, {"d00": Plan(2, 1), "d01": Plan(3, 1)})
    predictor.forget(6)
    assert predictor.latest({}).tried_split_points == {"d00": {1, 2}, "d01": {2, 3}, "d02": {2}, "d03": {2}}


def devices_take_longer(of: Fleet, share: float, first: int = 0) -> Fleet:
    """Return the fleet whose devices, from one of them on, need this share longer for the third layer."""
    slower = of.members[0].costs.slower(1.0, [1.0, 1.0, 1 + share, 1.0])
    members = (replace(m, costs=slower) if number >= first else m for number, m in enumerate(of.members))
    return replace(of, members=tuple(members))


@pytest.mark.parametrize(("share", "is_noticed"), [(0.001, False), (0.004, False), (0.01, True)])
def test_small_differences_are_noticed_for_a_new_cut(share: float, is_noticed: bool) -> None:
    """The third of three equal layers is a third of their work."""
    here = fleet()
    predictor = Predictor(here, plans(here, Plan(3, 1)))
    predictor.learn(1, *compute_seconds(devices_take_longer(here, share), plans(here, Plan(3, 1))))
    assert predictor.has_learned() is is_noticed


def test_few_devices_with_a_new_cut_are_noticed_among_many_without() -> None:
    here = fleet(12)
    truth, begun = devices_take_longer(here, 0.3, first=10), plans(here, Plan(2, 1))
    predictor = Predictor(here, begun)
    predictor.learn(1, *compute_seconds(truth, begun))
    predictor.latest({})
    assert not predictor.has_learned()
    tried = {**begun, "d10": Plan(3, 1), "d11": Plan(3, 1)}
    predictor.replan(2, tried)
    predictor.learn(2, *compute_seconds(truth, tried))
    assert predictor.has_learned()


def seen(times: float) -> MachineHistory:
    """Return the history of a machine that was slower than profiled by this factor, with all of its layers."""
    return MachineHistory().learned((0.0, *[1 / len(LAYERS)] * len(LAYERS)), times)


def test_equal_devices_with_measurements_that_scatter_stay_of_one_kind() -> None:
    here = fleet(20)
    rates = {m.name: Link(up_bps=10e6 * (0.95 + 0.005 * n), down_bps=20e6) for n, m in enumerate(here.members)}
    slower = {m.name: seen(1.0 + 0.004 * n) for n, m in enumerate(here.members)}
    (kind,) = calibrated(here, Calibration(devices=slower, links=rates)).device_kinds()
    assert len(kind) == 20
    assert kind[0].link.up_bps == pytest.approx(10e6 * 0.9975)


def test_a_device_that_is_much_slower_is_of_another_kind() -> None:
    here = fleet(20)
    kinds = calibrated(
        here, Calibration(devices={**{m.name: seen(1.0) for m in here.members}, "d03": seen(2.0)})
    ).device_kinds()
    assert sorted(map(len, kinds)) == [1, 19]


def test_devices_that_are_within_a_fifth_of_each_other_are_of_one_kind() -> None:
    here = fleet(20)
    rates = {m.name: Link(up_bps=11.1e6 if n < 9 else 12.5e6, down_bps=20e6) for n, m in enumerate(here.members)}
    assert len(calibrated(here, Calibration(links=rates)).device_kinds()) == 1
    rates["d00"] = Link(up_bps=9e6, down_bps=20e6)
    assert len(calibrated(here, Calibration(links=rates)).device_kinds()) == 2


def test_situations_in_which_two_devices_have_swapped_their_links_are_not_the_same() -> None:
    here = fleet(6)
    fast, slow = Link(up_bps=50e6, down_bps=50e6), Link(up_bps=5e6, down_bps=5e6)
    first, second = (
        {m.name: link for m, link in zip(here.members, links, strict=True)}
        for links in ((fast, fast, slow, slow, fast, slow), (fast, fast, slow, slow, slow, fast))
    )
    assert situation_key(calibrated(here, Calibration(links=first))) != situation_key(
        calibrated(here, Calibration(links=second))
    )


def test_situations_are_the_same_if_nothing_differs_by_much() -> None:
    here = fleet()
    assert situation_key(here) == situation_key(here.slower(devices=1.01))
    assert situation_key(here) != situation_key(here.slower(devices=1.3))
    assert situation_key(here) != situation_key(here.slower(server=1.3))


def test_machines_that_differ_from_their_profiles_are_noticed() -> None:
    here = fleet()
    predictor = Predictor(here, plans(here))
    predictor.learn(1, *compute_seconds(here, plans(here)))
    assert not predictor.has_learned()
    predictor.learn(2, *compute_seconds(perturbed(here, 3).slower(devices=1.2), plans(here)))
    assert predictor.has_learned()
    predictor.latest({})  # planned for
    assert not predictor.has_learned()


# --- layer by layer


def off_by_layer(times: Sequence[float]) -> Fleet:
    """Return a fleet whose devices take these factors as long as profiled for each layer."""
    here = fleet()
    costs = here.members[0].costs.slower(1.0, times)
    return replace(here, members=tuple(replace(member, costs=costs) for member in here.members))


def learned(predictor: Predictor, epoch: int, truth: Fleet, plan: Plan) -> None:
    predictor.replan(epoch, plans(truth, plan))
    predictor.learn(epoch, *compute_seconds(truth, plans(truth, plan)))


@pytest.mark.parametrize("seed", range(5))
def test_a_machine_is_expected_to_take_as_long_for_its_work_as_it_did(seed: int) -> None:
    here = fleet_of_two_kinds(seed)
    truth, tried = perturbed(here, seed).slower(devices=1.7, server=0.6), (Plan(1, 3), Plan(3, 1), Plan(2, 2))
    predictor = Predictor(here, plans(here, tried[0]))
    for epoch, plan in enumerate(tried, start=1):
        learned(predictor, epoch, truth, plan)
        for before in tried[:epoch]:
            (devices, server), (real, real_server) = (
                compute_seconds(one, plans(here, before)) for one in (predictor.now(), truth)
            )
            assert devices == pytest.approx(real, rel=0.02)  # as far as epochs scatter
            if real_server > 0.04:  # less shows nothing
                assert server == pytest.approx(real_server, rel=0.02)


def test_two_cuts_show_the_layers_between_them_and_returning_shows_nothing_new() -> None:
    here, truth = fleet(), off_by_layer((1.0, 1.0, 1.3, 1.0))
    predictor = Predictor(here, plans(here, Plan(2, 5)))
    learned(predictor, 1, truth, Plan(2, 5))
    assert not predictor.has_learned()
    learned(predictor, 3, truth, Plan(3, 5))
    assert predictor.has_learned()
    predictor.latest({})
    each = predictor.now().members[0].costs.each_layer_s(10)
    as_profiled = here.members[0].costs.each_layer_s(10)
    assert [one / other for one, other in zip(each, as_profiled, strict=True)] == pytest.approx([1, 1, 1.3, 1], abs=0.1)
    learned(predictor, 5, truth, Plan(2, 5))
    assert not predictor.has_learned()  # one factor for all layers would have to be another one now


FIRST, SECOND = (0.0, 0.5, 0.5, 0.0), (0.0, 0.4, 0.4, 0.2)


def after(*epochs: tuple[Shares, float]) -> MachineHistory:
    machine = MachineHistory()
    for shares, times in epochs:
        machine = machine.learned(shares, times)
    return machine


def test_factors_hardly_depend_on_the_order_of_observations() -> None:
    one, other = after((FIRST, 1.0), (SECOND, 1.05)), after((SECOND, 1.05), (FIRST, 1.0))
    assert one.factors(4) == pytest.approx(other.factors(4), rel=0.01)
    assert one.times(FIRST) < 1.02 < 1.03 < one.times(SECOND)


def test_a_machine_that_gets_slower_is_slower_with_all_that_it_has_done() -> None:
    machine = after((FIRST, 1.0), (SECOND, 1.0), *[(SECOND, 2.0)] * 20)
    assert machine.times(SECOND) == pytest.approx(2.0, rel=0.01)
    assert machine.times(FIRST) == pytest.approx(2.0, rel=0.03)


@pytest.mark.parametrize("times", [1.03, 1.1, 2.0])
def test_a_disturbed_first_epoch_of_a_cut_is_forgotten_and_does_not_affect_other_cuts(times: float) -> None:
    machine = after(*[(FIRST, 1.0)] * 3, (SECOND, times))
    assert machine.times(FIRST) <= machine.times(SECOND) <= times
    machine = after(*[(FIRST, 1.0)] * 3, (SECOND, times), *[(SECOND, 1.0)] * 10)
    assert machine.times(SECOND) == pytest.approx(1.0, rel=0.01)
    assert machine.times(FIRST) == pytest.approx(1.0, rel=0.01)


def test_one_disturbed_epoch_counts_in_part_and_is_soon_forgotten() -> None:
    machine = after(*[(FIRST, 1.0)] * 3, (FIRST, 4.0))
    assert 1.4 < machine.latest < 1.7
    machine = after(*[(FIRST, 1.0)] * 3, (FIRST, 4.0), *[(FIRST, 1.0)] * 10)
    assert machine.latest == pytest.approx(1.0, rel=0.03)


def test_epochs_that_scatter_make_a_cut_look_better_than_another_by_less_than_they_scatter() -> None:
    draw = random.Random(1)
    off = []
    for _ in range(200):
        seen = [(work, draw.gauss(1.0, 0.03)) for work in (FIRST, SECOND) for _ in range(5)]
        machine = after(*seen)
        off.append(machine.times(FIRST) / machine.times(SECOND) - 1)
    assert math.sqrt(sum(one**2 for one in off) / len(off)) < 0.015


def test_slower_exchanges_of_models_do_not_affect_the_layers() -> None:
    only_models = (1.0, 0.0, 0.0, 0.0)
    machine = after((FIRST, 1.0), (only_models, 2.5))
    assert machine.times(only_models) == pytest.approx(2.5, rel=0.01)
    assert machine.times(SECOND) == pytest.approx(1.0, rel=0.01)


def test_a_machine_remembers_its_latest_cuts() -> None:
    works = [(0.0, *[1 / cut] * cut, *[0.0] * (20 - cut)) for cut in range(1, 21)]
    machine = after(*[(work, 1 + cut / 100) for cut, work in enumerate(works, start=1)])
    assert [seen.shares for seen in machine.seen.values()] == works[-6:]
    assert machine.latest == pytest.approx(1.2, rel=0.02)


def test_equal_machines_are_pooled_by_the_median_of_each_kind_of_work() -> None:
    together = pooled([after((FIRST, times), (SECOND, 2 * times)) for times in (0.9, 1.0, 5.0)] + [MachineHistory()])
    assert [math.exp(seen.log_times) for seen in together.seen.values()] == pytest.approx([1.0, 2.0])


def test_a_device_without_measurements_is_as_fast_as_others_of_its_kind() -> None:
    here = fleet(3)
    (kind,) = calibrated(here, Calibration(devices={"d00": seen(1.5), "d01": seen(1.5)})).device_kinds()
    assert len(kind) == 3


def test_a_slower_server_with_contention_is_expected_to_take_as_long_as_it_did() -> None:
    crowded = Profile("any", "float32", (1, 50), LAYERS, crowded=(1.5, 1.5), crowd=1)
    here = replace(fleet(8), server=Costs(crowded))
    truth, predictor = here.slower(server=2.0), Predictor(here, plans(here))
    for epoch in range(1, 9):
        predictor.learn(epoch, *compute_seconds(truth, plans(here)))
    assert compute_seconds(predictor.now(), plans(here))[1] == pytest.approx(
        compute_seconds(truth, plans(here))[1], rel=0.01
    )


@pytest.mark.slow
@given(seed=st.integers(0, 10_000), p=st.integers(1, 3), n=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_shares_sum_to_all_of_the_work(seed: int, p: int, n: int) -> None:
    here = fleet_of_two_kinds(seed)
    devices, server = compute_loads(here, plans(here, Plan(p, n)))
    factors = [random.Random(seed + place).uniform(0.5, 2.0) for place in range(4)]
    members = tuple(replace(m, costs=m.costs.slower(factors[0], factors[1:])) for m in here.members)
    other = replace(here, members=members, server=here.server.slower(factors[0], factors[1:]))
    others, other_server = compute_seconds(other, plans(here, Plan(p, n)))
    for busy, seconds in (*((devices[name], others[name]) for name in devices), (server, other_server)):
        assert sum(busy.shares) == pytest.approx(1.0)
        assert seconds == pytest.approx(busy.seconds * sum(map(mul, busy.shares, factors)))


@pytest.mark.slow
def test_a_training_in_virtual_time_is_predicted_exactly_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[int] = []
    monkeypatch.setattr(Predictor, "forget", lambda _, epoch: forgotten.append(epoch))
    config = config_from(
        {
            "run": {"epochs": 3, "trace": "off"},
            "data": {"name": "cifar10", "samples_per_device": 230},
            "server": {"profile": "i7-11850h"},
            "devices": [{"count": 5, "profile": "raspberry-pi-5", "link": "wifi"}],
        }
    )
    job = prepare_timing_only(config, rehearse)
    assert job is not None
    results: list[EpochResult] = []
    train_timing_only(job, lambda result, _: results.append(result), ignore)
    assert [result.predicted_s for result in results] == [pytest.approx(r.seconds, rel=2e-3) for r in results]
    assert forgotten == [1, 2, 3]


@pytest.mark.parametrize("method", ["fl", "sl", "sfl", "sfl2", "pipar"])
def test_what_a_device_claims_about_itself_does_not_lengthen_the_forecasts_of_others(method: str) -> None:
    here = replace(fleet(3), method=METHODS[method])
    plan = Plan(4, 1) if method == "fl" else Plan(2, 5 if method == "pipar" else 1)
    before = forecast_rounds(here, plans(here, plan), 1e5)
    first, *others = here.members
    liar = replace(first, costs=Costs(first.costs.profile, 1e-6))
    claimed = forecast_rounds(replace(here, members=(liar, *others)), plans(here, plan), 1e5)
    for member in others:
        assert claimed[member.name] <= before[member.name]
    assert claimed[liar.name] <= (25 * before[liar.name][0], 25 * sum(before[liar.name]))


@pytest.mark.parametrize("method", ["sl", "sfl2", "pipar"])
def test_devices_that_differ_twentyfold_are_all_forecast(method: str) -> None:
    here = replace(fleet(3), method=METHODS[method])
    first, *others = here.members
    slow = replace(first, costs=Costs(first.costs.profile, 0.2 / 20))
    here = replace(here, members=(slow, *others))
    alone_s = predict_s(replace(here, members=(slow,), method=METHODS["sfl"]), plans(here, Plan(2, 1)))
    assert forecast_rounds(here, plans(here, Plan(2, 1)), 1e5)[slow.name][0] >= 0.9 * alone_s


def test_the_reason_for_planning_again_names_the_machine_that_differs_most() -> None:
    here = fleet(3)
    predictor = Predictor(here, plans(here))
    devices, server = compute_seconds(here, plans(here))
    predictor.learn(1, {name: 1.4 * s if name == "d01" else s for name, s in devices.items()}, server)
    assert predictor.reason() == "d01 is 1.4x slower than its profile"
    predictor = Predictor(here, plans(here))
    predictor.learn(1, {name: s / 2 for name, s in devices.items()}, server)
    assert predictor.reason() == "devices are 2x faster than their profiles"
    predictor = Predictor(here, plans(here))
    predictor.learn(1, devices, 3 * server)
    assert predictor.reason() == "the server is 3x slower than its profile"


def test_epochs_that_take_longer_than_predicted_are_a_reason_to_plan_again_once() -> None:
    here = fleet()
    predictor = Predictor(here, plans(here), scatter=0.03)
    predictor.learn(1, *compute_seconds(here, plans(here)))
    predictor.learn_seconds(1, 1.3 * predict_s(here, plans(here)), plans(here))
    assert "1.3x longer than predicted" in predictor.reason()
    predictor.latest({})
    assert predictor.reason() == ""


def test_measured_epochs_still_count_after_a_device_has_left_and_another_has_joined() -> None:
    here = fleet()
    predictor = Predictor(here, plans(here), scatter=0.03)
    predictor.learn_seconds(1, predict_s(here, plans(here)), plans(here))
    assert predictor.reason() == ""
    for epoch, names in ((2, {"d00", "d01", "d02"}), (3, {"d00", "d01", "d03"})):
        predictor.learn_seconds(epoch, 1.3**epoch * predict_s(here.of(names), plans(here)), names)
        assert f"{1.3**epoch:.3g}x longer than predicted" in predictor.reason()
        predictor.latest({})
        assert predictor.reason() == ""
    predictor.replan(4, plans(here, Plan(1, 1)))
    predictor.learn_seconds(4, 100.0, names)
    assert "an epoch takes 100 s, and took" in predictor.reason()


def test_epochs_that_were_predicted_to_take_no_time_say_nothing_about_predictions() -> None:
    layers = tuple(LayerProfile(name, (0.0, 0.0), (0.0, 0.0), 0, 0) for name in "abcd")
    costs = Costs(Profile("any", "float32", (1, 50), layers))
    members = tuple(replace(member, costs=costs, link=Link()) for member in fleet(2).members)
    here = replace(fleet(2), members=members, server=costs)
    assert predict_s(here, plans(here)) == 0.0
    predictor = Predictor(here, plans(here), scatter=0.03)
    predictor.learn_seconds(1, 1.0, plans(here))
    assert predictor.reason() == ""
    predictor.replan(2, plans(here, Plan(1, 1)))
    searched = replace(predictor.latest({}), stable_rounds=9.0)
    assert search_again(searched, predictor.plans).keys() == plans(here).keys()


def test_devices_that_are_slowed_down_by_others_on_their_machine_are_not_taken_for_slow() -> None:
    here = fleet(4, speed=0.5)
    members = tuple(replace(member, host_share=1.0) for member in here.members)
    here = replace(here, members=members, host=SharedHost(2))
    devices, server = compute_seconds(here, plans(here, Plan(4, 1)))
    assert devices["d00"] > 1.5 * compute_seconds(replace(here, host=None), plans(here, Plan(4, 1)))[0]["d00"]
    predictor = Predictor(here, plans(here, Plan(4, 1)))
    predictor.learn(1, devices, server)
    assert predictor.reason() == ""


def test_epochs_are_forgotten_only_if_changed_links_would_change_them() -> None:
    here = fleet(2)
    whole, split = plans(here, Plan(4, 1)), plans(here, Plan(1, 4))
    predictor = Predictor(here, whole, scatter=0.02)

    def known(*rates: tuple[float, float]) -> list[bool]:
        for epoch, (up, down) in enumerate(rates, start=3):
            predictor.measure_links(epoch, {member.name: measured(up, down) for member in here.members})
        return [predictor._measured.measured_s(each) is not None for each in (whole, split)]

    for epoch, each in ((1, whole), (2, split)):
        predictor.replan(epoch, each)
        predictor.learn_seconds(epoch, 1.0, whole.keys())
    assert known((10e6, 20e6)) == [True, True]
    assert known((14e6, 28e6)) == [True, False]


def test_links_that_drift_slowly_are_noticed_by_all_of_their_drift() -> None:
    here = fleet(2)
    predictor = Predictor(here, plans(here, Plan(1, 4)), scatter=0.02)
    predictor.learn_seconds(1, 1.0, plans(here).keys())
    rate = 10e6
    for epoch in range(2, 9):
        rate *= 0.9  # never by more than a fifth at a time
        predictor.measure_links(epoch, {member.name: measured(rate, 20e6) for member in here.members})
    assert predictor._measured.measured_s(plans(here, Plan(1, 4))) is None


def test_a_server_without_layers_is_as_slow_as_the_devices_on_its_machine() -> None:
    here = fleet(2)
    members = tuple(replace(member, host_share=1.0, costs=here.server) for member in here.members)
    shared = replace(here, members=members, host=SharedHost(2))
    for where, factor in ((shared, 2.0), (replace(shared, host=None), 1.0)):
        predictor, whole = Predictor(where, plans(where, Plan(4, 1))), plans(where, Plan(4, 1))
        devices_s, server_s = compute_seconds(where, whole)
        predictor.learn(1, {name: 2 * seconds for name, seconds in devices_s.items()}, server_s)
        slower = predictor.now().server.all_layers_s(50) / where.server.all_layers_s(50)
        assert slower == pytest.approx(factor, rel=0.1)

"""Plans are chosen in a separate process, and known situations are not searched again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest
from support.fleets import LINK, PROFILE, fleet, measured, plans

from pipar.errors import PlanError
from pipar.methods import METHODS, Plan
from pipar.planner.background_search import ReplanBySearch, SearchProcess, _are_new, _tried_by_kind, search_again
from pipar.planner.compute_load import compute_seconds
from pipar.planner.costs import Costs
from pipar.planner.fleet import Fleet
from pipar.planner.learned_costs import Predictor
from pipar.planner.measured_epochs import MeasuredEpochs
from pipar.planner.search import search_plans
from pipar.planner.search_settings import QUICK, UNHURRIED, SearchSettings
from pipar.planner.simulator import simulate
from pipar.planner.stage_times import move_s
from pipar.planner.timing import steady_epoch_s
from pipar.settings.links import Link
from reproduction.plan_scores import learned_plans

SLOW, FAST = Link(up_bps=1e6, down_bps=1e6), Link(up_bps=100e6, down_bps=100e6)


@pytest.mark.slow
def test_current_plans_stay_if_others_gain_little() -> None:
    here = fleet()
    best = search_again(here, plans(here, Plan(1, 1)))
    assert search_again(here, best) == best


@pytest.mark.slow
def test_layers_move_only_if_links_stay_stable_for_long_enough_to_pay_for_it() -> None:
    here = fleet()
    start = plans(here, Plan(1, 1))
    slow_to_move = Costs(replace(PROFILE, install_s_per_byte=1e-4), 0.5)  # 13 s for new replicas of all four
    here = replace(here, server=slow_to_move)
    best = search_again(here, start)
    assert {plan.split_point for plan in best.values()} != {1}
    gained_s = steady_epoch_s(simulate, here, start) - steady_epoch_s(simulate, here, best)
    enough = 2 + 2 * move_s(here, start, best) / gained_s
    assert search_again(replace(here, stable_rounds=1.01 * enough), start) == best
    kept = search_again(replace(here, stable_rounds=0.99 * enough), start)
    assert {plan.split_point for plan in kept.values()} == {1}


def test_plans_are_searched_after_a_device_was_swapped_for_another() -> None:
    here = fleet(3)
    before, now = ({name: Plan(4, 1) for name in names} for names in (("d00", "d01"), ("d00", "d02")))
    measured = MeasuredEpochs(layers=4).with_epoch(before, 1.0)
    assert search_again(replace(here.of(now), measured=measured), now).keys() == now.keys()


def after_trying(of: Fleet, *cuts: int, first: int = 0) -> Fleet:
    """Return the fleet with devices that have tried these split points, from the given one on."""
    more = {
        member.name: of.tried_split_points.get(member.name, frozenset()) | set(cuts) for member in of.members[first:]
    }
    return replace(of, tried_split_points={**of.tried_split_points, **more})


TRYING, NOT_TRYING = replace(UNHURRIED, trial_cost=0.1), replace(UNHURRIED, trial_cost=0.0)


@pytest.mark.slow
def test_new_split_points_are_tried_if_they_are_predicted_to_cost_little() -> None:
    here = fleet(speed=0.35)
    best = search_again(here, plans(here), NOT_TRYING)
    (cut,) = {plan.split_point for plan in best.values()}
    trial = search_again(after_trying(here, cut), best, TRYING)
    (new,) = {plan.split_point for plan in trial.values()}
    assert new != cut
    best_s, trial_s = (steady_epoch_s(simulate, here, each) for each in (best, trial))
    cost = trial_s / best_s - 1
    assert search_again(after_trying(here, cut), best, replace(UNHURRIED, trial_cost=1.01 * cost)) == trial
    assert search_again(after_trying(here, cut), best, replace(UNHURRIED, trial_cost=0.99 * cost)) == best
    assert search_again(after_trying(here, cut), best, QUICK) == best
    # Nor before a training, twice, one after another without end, or on links that change.
    assert search_again(here, best, TRYING) == best
    assert search_again(after_trying(here, cut, new), best, TRYING) == best
    assert search_again(after_trying(here, cut, 101, 102), best, TRYING) == trial
    assert search_again(after_trying(here, cut, 101, 102, 103), best, TRYING) == best
    assert search_again(replace(after_trying(here, cut), stable_rounds=20.0), best, TRYING) == trial
    assert search_again(replace(after_trying(here, cut), stable_rounds=19.0), best, TRYING) == best
    # Devices of one kind share what one of them has tried.
    assert search_again(after_trying(after_trying(here, cut), new, first=3), best, TRYING) == best


def test_a_split_point_is_new_to_each_kind_of_device_separately() -> None:
    here = fleet(2)
    both = tuple(
        replace(member, memory_bytes=limit) for member, limit in zip(here.members, (10**9, 2 * 10**9), strict=True)
    )
    first, second = (member.name for member in both)

    def are_new(had_first: set[int], had_second: set[int]) -> bool:
        known = {first: frozenset(had_first), second: frozenset(had_second)}
        of_both = _tried_by_kind(replace(here, members=both, tried_split_points=known))
        return _are_new(of_both, {first: Plan(2, 1), second: Plan(3, 1)})

    assert not are_new({2}, {3})
    assert are_new({3}, {2})  # neither has tried the other's split point
    assert are_new({1, 3, 4}, {3})
    assert not are_new({1, 3, 4, 5}, {1})  # the first has tried enough
    assert are_new({1, 2, 3, 4}, {1})
    assert not are_new(set(), {1})  # its tried split points are unknown


@pytest.mark.slow
@pytest.mark.parametrize(("share", "is_tried"), [(0.09, True), (0.11, False)])
def test_plans_that_take_long_to_move_to_are_not_tried(
    share: float, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = fleet(speed=0.35)
    best = search_again(here, plans(here), NOT_TRYING)
    monkeypatch.setattr(
        "pipar.planner.background_search.move_s", lambda *_: share / 2 * steady_epoch_s(simulate, here, best)
    )
    begun = after_trying(here, *{plan.split_point for plan in best.values()})
    assert (search_again(begun, best, TRYING) != best) is is_tried


@pytest.mark.slow
@pytest.mark.parametrize(("third_layer", "cut"), [(0.9, 3), (1.1, 2)])
def test_a_trial_ends_or_stays_by_its_measured_time(third_layer: float, cut: int) -> None:
    """Devices begin with two layers; the time of the third is unknown until they have had it."""
    here = fleet(speed=0.333)
    best = search_again(here, plans(here), NOT_TRYING)
    assert {plan.split_point for plan in best.values()} == {2}
    really = here.members[0].costs.slower(1.0, [1.0, 1.0, third_layer, 1.0])
    members = tuple(replace(member, costs=really) for member in here.members)
    truth = replace(here, members=members, server=here.server.slower(1.01))  # which makes a search due
    learned = learned_plans(here, truth, best, 5)
    assert {plan.split_point for plan in learned.values()} == {cut}


def test_a_known_situation_is_not_searched_again() -> None:
    here = fleet()
    searched: list[float | None] = []

    async def search(of: Fleet, start: Mapping[str, Plan], settings: SearchSettings) -> Mapping[str, Plan]:
        searched.append(of.members[0].link.up_bps)
        return search_again(of, start, settings)

    async def ask() -> list[Mapping[str, Plan]]:
        replan = ReplanBySearch(Predictor(here, plans(here)), search)
        return [await replan(dict.fromkeys(plans(here), link)) for link in (SLOW, FAST, SLOW, FAST)]

    answers = asyncio.run(ask())
    assert searched == [1e6, 100e6]
    assert answers[0] == answers[2] != answers[1] == answers[3]


def test_plans_of_a_known_situation_that_were_measured_since_are_searched_again() -> None:
    here = fleet()
    before, predicted = plans(here, Plan(4, 1)), plans(here, Plan(1, 4))
    predictor = Predictor(here, before, scatter=0.02)
    answers = [predicted, before, before]

    async def search(*_: object) -> Mapping[str, Plan]:
        return answers.pop(0)

    async def ask() -> None:
        replan = ReplanBySearch(predictor, search)
        assert await replan(dict.fromkeys(before, LINK)) == predicted
        predictor.learn_seconds(1, 1.0, before)
        predictor.replan(2, predicted)
        predictor.learn_seconds(2, 2.0, before)
        predictor.replan(3, before)
        assert await replan(dict.fromkeys(before, FAST)) == before
        assert await replan(dict.fromkeys(before, LINK)) == before

    asyncio.run(ask())


def test_a_device_that_has_left_is_not_planned_for() -> None:
    here = fleet()
    names = [member.name for member in here.members]
    asked: list[tuple[list[str], list[str]]] = []

    async def search(of: Fleet, start: Mapping[str, Plan], _: SearchSettings) -> Mapping[str, Plan]:
        asked.append(([member.name for member in of.members], sorted(start)))
        return start

    asyncio.run(ReplanBySearch(Predictor(here, plans(here)), search)(dict.fromkeys(names[1:], SLOW)))
    assert asked == [(names[1:], sorted(names[1:]))]


def test_changed_links_get_a_short_search_and_calibrated_machines_a_long_one() -> None:
    here = fleet()
    predictor, settings_used = Predictor(here, plans(here)), list[SearchSettings]()

    async def search(_: Fleet, start: Mapping[str, Plan], settings: SearchSettings) -> Mapping[str, Plan]:
        settings_used.append(settings)
        return start

    async def ask() -> None:
        replan = ReplanBySearch(predictor, search)
        await replan(dict.fromkeys(plans(here), SLOW))
        predictor.learn(1, *compute_seconds(here.slower(devices=1.1), plans(here)))
        await replan(dict.fromkeys(plans(here), SLOW))
        await replan(dict.fromkeys(plans(here), FAST))

    asyncio.run(ask())
    assert settings_used == [QUICK, UNHURRIED, QUICK]


@pytest.mark.slow
def test_the_process_finds_the_plans_of_a_search_here_and_ends_when_it_is_closed() -> None:
    here, start = fleet(), plans(fleet(), Plan(1, 1))

    async def ask() -> tuple[Mapping[str, Plan], float, int | None]:
        search_process = SearchProcess()
        answer = await search_process(here, start)
        await search_process(here, answer)
        process = search_process._process
        assert process is not None
        await search_process.close()
        return answer, search_process.cpu_s, process.returncode

    answer, cpu_s, code = asyncio.run(ask())
    assert answer == search_again(here, start)
    assert cpu_s > 0
    assert code is not None


@pytest.mark.slow
def test_the_process_returns_one_sentence_for_a_fleet_that_cannot_be_planned() -> None:
    here = fleet()
    tiny = replace(here, members=tuple(replace(member, memory_bytes=1000) for member in here.members))

    async def ask() -> None:
        search_process = SearchProcess()
        try:
            await search_process(tiny, plans(here))
        finally:
            await search_process.close()

    with pytest.raises(PlanError, match="memory"):
        asyncio.run(ask())


def test_plans_are_made_with_measured_links() -> None:
    here = fleet()
    predictor = Predictor(here, plans(here))
    predictor.measure_links(1, {name: measured(5e6, 5e6) for name in plans(here)})
    assert predictor.fleet_for(2).members[0].link.up_bps == pytest.approx(5e6)
    assert predictor.fleet_for(1).members[0].link == LINK


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pipar", "sfl"])
def test_a_search_takes_the_next_best_cut_if_the_best_leaks_too_much(method: str) -> None:
    here = replace(fleet(), method=METHODS[method])
    (free,) = {plan.split_point for plan in search_plans(here, simulate).plans.values()}
    held = replace(here, leaky_cuts=frozenset({free}))
    limited = search_plans(held, simulate)
    assert free not in {plan.split_point for plan in limited.plans.values()}
    assert limited.epoch_s >= search_plans(here, simulate).epoch_s
    # Planned again, from the current plans, for links that have changed.
    others = tuple(replace(member, link=FAST) for member in held.members)
    again = search_again(replace(held, members=others), limited.plans)
    assert free not in {plan.split_point for plan in again.values()}

"""Lost links do not change the weights; a lost round equals one in which its device had no data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from support import reference
from support.reference import State
from support.roaming import A, B, C, roam, same
from support.training import EXACT, Case, largest_error, reference_data

from pipar.events import Back, Dropped, Lost, RoundRestarted
from pipar.methods import Plan

pytestmark = pytest.mark.usefixtures("one_thread")


def without(case: Case, absent: Mapping[str, Sequence[int]]) -> State:
    """Return the definition's weights if these devices have no data in these epochs."""
    workload = case.workload()
    data = reference_data(workload)
    for number, name in enumerate(sorted(workload.names)):
        for epoch in absent.get(name, ()):
            data[number][epoch - 1] = []  # type: ignore[index]
    return reference.train(case.method, workload.build_model(), data, case.split_points[0], case.rules())


UNHURT = {
    "pipar": Case("pipar", (1, 3, 4), (7, 3, 2), momentum="keep", schedule="1f1b"),
    "sfl2": Case("sfl2", (2,), momentum="keep"),
    "sl": Case("sl", (2,)),
    "fl": Case("fl"),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", UNHURT)
def test_links_lost_for_a_while_change_no_bit_of_the_weights(method: str) -> None:
    case = UNHURT[method]
    undisturbed = roam(case, {})
    frames = undisturbed.carried[A]
    for cut in range(4, frames - 4, max(1, frames // 6)):
        cuts = {A: [cut, 5, 7], B: [frames - cut], C: [5, 6, 7]}
        roamed = roam(case, cuts)
        assert same(roamed.state, undisturbed.state), cut
        assert roamed.counted == undisturbed.counted
        assert len(roamed.of(Back)) >= 3
        assert not roamed.of(Dropped)
        assert not roamed.of(Lost)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "absent_in"),
    [
        (Case("pipar", (1,), (7,), epochs=3), 1),
        (Case("pipar", (2,), (3,), epochs=3, momentum="keep"), 1),
        (Case("pipar", (2, 1, 4), (3,), epochs=3), 2),
        (Case("sfl", (3,), epochs=3), 1),
        (Case("fl", epochs=3), 1),
        (Case("sl", (2,), epochs=3), 1),
    ],
    ids=str,
)
def test_a_lost_round_equals_one_in_which_its_device_had_no_data(case: Case, absent_in: int) -> None:
    undisturbed = roam(case, {})
    each = undisturbed.carried[B] // case.epochs
    cut = each // 2 + (absent_in - 1) * each + 2
    roamed = roam(case, {B: [cut]}, pause_s=0.5, resume_window=0.2)
    assert [(event.device, event.epoch) for event in roamed.of(Dropped)] == [(B, absent_in)]  # type: ignore[attr-defined]
    absent = [epoch for epoch, counts in enumerate(roamed.counted, start=1) if B not in counts]
    assert absent[0] == absent_in
    assert absent[-1] < case.epochs  # it has joined again
    assert largest_error(roamed.state, without(case, {B: absent})) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sfl2", "sl"])
def test_a_round_in_which_no_device_counts_does_not_change_a_shared_model(method: str) -> None:
    case = Case(method, (2,), epochs=2)
    undisturbed = roam(case, {})
    cuts = {name: [frames // case.epochs // 2 + 2] for name, frames in undisturbed.carried.items()}
    roamed = roam(case, cuts, pause_s=0.5, resume_window=0.2, min_devices=3)
    assert sorted((event.device, event.epoch) for event in roamed.of(Dropped)) == [(A, 1), (B, 1), (C, 1)]  # type: ignore[attr-defined]
    assert len(roamed.of(RoundRestarted)) == 1
    assert same(roamed.state, undisturbed.state)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", ["reset", "keep"])
def test_a_straggler_counts_in_the_rounds_that_it_was_ready_for(momentum: str) -> None:
    case = Case("pipar", (2,), (3,), epochs=4, momentum=momentum)
    slowest_s = max(result.seconds for result in roam(case, {}).results)
    roamed = roam(case, {A: [12]}, pause_s=0.6 * slowest_s, round_deadline=1.1 * slowest_s, resume_window=100.0)
    absent = [epoch for epoch, counts in enumerate(roamed.counted, start=1) if A not in counts]
    assert absent == [1]
    assert not roamed.of(Lost)
    assert largest_error(roamed.state, without(case, {A: absent})) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("momentum", ["reset", "keep"])
def test_plans_may_change_while_devices_are_lost_and_late(momentum: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipar.planner.replanner.NOTICED", -1.0)
    case = Case("pipar", (2,), (3,), epochs=5, momentum=momentum)
    slowest_s = max(result.seconds for result in roam(replace(case, split_points=(4,)), {}).results)
    roamed = roam(
        case,
        {A: [12], B: [9]},
        replan=[Plan(1, 2), Plan(4, 3)] * 5,
        pause_s=1.2 * slowest_s,
        round_deadline=1.1 * slowest_s,
        resume_window=100.0,
    )
    assert len(roamed.of(Dropped)) >= 1
    assert not roamed.of(Lost)
    absent = {name: [n for n, counts in enumerate(roamed.counted, 1) if name not in counts] for name in (A, B, C)}
    assert absent == {A: [1], B: [1], C: []}
    assert largest_error(roamed.state, without(case, absent)) < EXACT

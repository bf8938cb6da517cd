"""Contention is that of pipar's own work: other programs on the machine hardly change it, and are reported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from pipar.planner.costs import Costs
from pipar.profiling import contention, machine_load
from pipar.profiling.contention import least_of_attempts, measure_contention
from pipar.profiling.machine_load import OtherPrograms, worked_s
from pipar.profiling.profile import LayerProfile, Profile

STATISTICS = """cpu  1000 0 100 9000 0 0 0 0 0 0
cpu0 {0} 0 50 4000 300 10 5 {1} 77 0
cpu1 100 20 30 4000 0 0 0 0 0 0
cpu2 999 0 0 0 0 0 0 0 0 0
intr 12345
"""
LAYERS = (LayerProfile("one", (0.1, 0.2), (0.1, 0.2), 4, 4),)


def test_cores_have_worked_by_all_programs_and_what_other_machines_stole() -> None:
    text = STATISTICS.format(200, 40)
    assert worked_s(text, {0, 1}, 100) == pytest.approx((200 + 50 + 10 + 5 + 40 + 100 + 20 + 30) / 100)
    assert worked_s("", {0, 1}, 100) == 0.0


def test_other_programs_use_what_this_process_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, own = iter([10.0, 14.0]), iter([1.0, 3.0])
    monkeypatch.setattr(machine_load.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(machine_load.time, "process_time", lambda: next(own))
    monkeypatch.setattr(machine_load.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(machine_load.os, "sysconf", lambda _: 100)
    file = tmp_path / "stat"
    file.write_text(STATISTICS.format(200, 0))
    others = OtherPrograms(file)
    file.write_text(STATISTICS.format(500, 300))
    assert others.cores() == pytest.approx((6.0 - 2.0) / 4.0)


def test_a_system_that_does_not_say_is_taken_for_quiet(tmp_path: Path) -> None:
    assert OtherPrograms(tmp_path / "missing").cores() == 0.0


class Loads:
    """Pretends that other programs use these cores, one measurement after the other."""

    def __init__(self, *cores: float) -> None:
        self._left: Iterator[float] = iter(cores)

    def __call__(self) -> OtherPrograms:
        others = OtherPrograms(Path("/missing"))
        others.cores = lambda: next(self._left)  # type: ignore[method-assign]
        return others


@pytest.mark.parametrize(
    ("loads", "may_repeat", "attempts"),
    [((0.1, 2.0), True, 1), ((2.0, 0.1, 2.0), True, 2), ((2.0, 2.0, 2.0, 2.0), True, 3), ((2.0, 0.1), False, 1)],
)
def test_a_measurement_is_repeated_while_the_machine_is_busy(
    loads: tuple[float, ...], may_repeat: bool, attempts: int
) -> None:
    measured = iter([9.0, 1.3, 4.0, 1.1])
    assert least_of_attempts(lambda: next(measured), lambda: may_repeat, Loads(*loads)) == min(
        [9.0, 1.3, 4.0][:attempts]
    )
    assert next(measured) == [9.0, 1.3, 4.0, 1.1][attempts]


@pytest.mark.parametrize(("waited_s", "expected"), [(0.0, 3.0), (0.25, 2.5), (1.0, 1.0)])
def test_a_pass_that_waits_for_a_core_does_not_count_that(
    monkeypatch: pytest.MonkeyPatch, waited_s: float, expected: float
) -> None:
    """Each pass takes 0.5 s of a core; with others at work, 1.5 s by the clock, and some of that without a core."""
    crowded, now, waited = False, 0.0, 0.0

    def run(_: nn.Sequential, __: int) -> object:
        nonlocal now, waited
        now, waited = now + (1.5 if crowded else 0.5), waited + (waited_s if crowded else 0.0)
        return None

    class AtWork:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> None:
            nonlocal crowded
            crowded = True

        def __exit__(self, *_: object) -> None:
            nonlocal crowded
            crowded = False

    monkeypatch.setattr(contention, "_at_work", AtWork)
    monkeypatch.setattr(contention.time, "perf_counter", lambda: now)
    monkeypatch.setattr(contention, "waited_for_core_s", lambda: waited)
    found = measure_contention(nn.Sequential(nn.Identity()), 1, run, others=3, budget_s=100.0)
    assert found == (expected,)


def test_contention_is_never_more_than_all_cores_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    monkeypatch.setattr(contention, "least_of_attempts", lambda *_: 17.3)
    passes = measure_contention(model, 2, lambda network, _: network(torch.ones(1, 2)), others=1, budget_s=0.0)
    assert max(passes) <= 2.0


def test_a_kept_profile_with_an_implausible_factor_is_used_up_to_the_bound() -> None:
    def factor(crowded: float, crowd: int) -> float:
        return Costs(Profile("any", "float32", (1, 50), LAYERS, crowded=(crowded, crowded), crowd=crowd)).contention(10)

    assert factor(18.0, 1) == factor(2.0, 1) == 1.0
    assert factor(1.3, 1) == pytest.approx(0.3)
    assert factor(18.0, 3) == 1.0


def test_a_profile_says_why_it_is_doubtful() -> None:
    quiet = Profile("any", "float32", (1, 50), LAYERS, crowded=(1.2, 1.3), crowd=1)
    assert quiet.doubt == ""
    assert replace(quiet, busy_cores=1.8).doubt == "was measured while other programs used 1.8 cores"
    assert replace(quiet, crowded=(1.2, 17.8)).doubt == "has a contention factor of 17.8, and at most 2 is plausible"
    again = Profile.from_json(replace(quiet, busy_cores=1.8).to_json())
    assert again.busy_cores == 1.8
    assert "busy_cores" not in quiet.to_json()

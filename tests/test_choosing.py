"""Plans are chosen in a process of their own, and known situations are not searched again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest
from fleets import LINK, fleet, measured, plans

from pipar.choosing import Choices, Chooser, chosen
from pipar.config import Link
from pipar.errors import PlanError
from pipar.foresight import Foresight
from pipar.methods import Plan
from pipar.planner.fleet import Fleet

SLOW, FAST = Link(up_bps=1e6, down_bps=1e6), Link(up_bps=100e6, down_bps=100e6)


def test_plans_in_force_stay_if_others_are_hardly_better() -> None:
    here = fleet()
    best = chosen(here, plans(here, Plan(1, 1)))
    assert chosen(here, best) == best


def test_a_situation_that_comes_back_is_not_searched_again() -> None:
    here = fleet()
    searched: list[float | None] = []

    async def search(of: Fleet, start: Mapping[str, Plan]) -> Mapping[str, Plan]:
        searched.append(of.members[0].link.up_bps)
        return chosen(of, start)

    async def ask() -> list[Mapping[str, Plan]]:
        choices = Choices(Foresight(here, plans(here)), search)
        return [await choices(dict.fromkeys(plans(here), link)) for link in (SLOW, FAST, SLOW, FAST)]

    answers = asyncio.run(ask())
    assert searched == [1e6, 100e6]
    assert answers[0] == answers[2] != answers[1] == answers[3]


def test_who_is_gone_is_not_planned_for() -> None:
    here = fleet()
    names = [member.name for member in here.members]
    asked: list[tuple[list[str], list[str]]] = []

    async def search(of: Fleet, start: Mapping[str, Plan]) -> Mapping[str, Plan]:
        asked.append(([member.name for member in of.members], sorted(start)))
        return start

    asyncio.run(Choices(Foresight(here, plans(here)), search)(dict.fromkeys(names[1:], SLOW)))
    assert asked == [(names[1:], sorted(names[1:]))]


@pytest.mark.slow
def test_the_process_chooses_what_a_search_here_does_and_ends_when_it_is_closed() -> None:
    here, start = fleet(), plans(fleet(), Plan(1, 1))

    async def ask() -> tuple[Mapping[str, Plan], float, int | None]:
        chooser = Chooser()
        answer = await chooser(here, start)
        await chooser(here, answer)
        process = chooser._process
        assert process is not None
        await chooser.close()
        return answer, chooser.cpu_s, process.returncode

    answer, cpu_s, code = asyncio.run(ask())
    assert answer == chosen(here, start)
    assert cpu_s > 0
    assert code is not None


@pytest.mark.slow
def test_a_fleet_that_cannot_be_planned_is_one_sentence_from_the_process() -> None:
    here = fleet()
    tiny = replace(here, members=tuple(replace(member, memory_bytes=1000) for member in here.members))

    async def ask() -> None:
        chooser = Chooser()
        try:
            await chooser(tiny, plans(here))
        finally:
            await chooser.close()

    with pytest.raises(PlanError, match="memory"):
        asyncio.run(ask())


def test_what_was_measured_of_links_is_planned_with() -> None:
    here = fleet()
    foresight = Foresight(here, plans(here))
    foresight.measure_links(1, {name: measured(5e6, 5e6) for name in plans(here)})
    assert foresight.fleet_for(2).members[0].link.up_bps == pytest.approx(5e6)
    assert foresight.fleet_for(1).members[0].link == LINK

"""The turns at a shared model do not depend on the order of arrival."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipar.execution.clock import run_virtually
from pipar.server.shared_model_turns import TurnOrder


def served(iterations: dict[str, int], delays: dict[str, list[float]]) -> list[tuple[int, str]]:
    """Return the turns of devices that arrive with these delays before each of their iterations."""
    log: list[tuple[int, str]] = []

    async def device(turns: TurnOrder, name: str) -> None:
        for iteration in range(1, iterations[name] + 1):
            await asyncio.sleep(delays[name][iteration])
            await turns.wait_for(name)
            log.append((iteration, name))
            await asyncio.sleep(1.0)  # the time of its turn
            log.append((iteration, name))
            turns.end_turn(name)
        await asyncio.sleep(delays[name][0])
        turns.finish(name)

    async def main() -> None:
        turns = TurnOrder(iterations)
        await asyncio.gather(*(device(turns, name) for name in iterations))

    run_virtually(main())
    return log


@st.composite
def rounds(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, list[float]]]:
    names = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5, unique=True))
    iterations = {name: draw(st.integers(0, 4)) for name in names}
    delay = st.integers(0, 6).map(float)
    return iterations, {name: draw(st.lists(delay, min_size=5, max_size=5)) for name in names}


@pytest.mark.slow
@settings(max_examples=50)
@given(rounds())
def test_turns_go_by_iteration_and_then_by_name_in_any_order_of_arrival(
    round_: tuple[dict[str, int], dict[str, list[float]]],
) -> None:
    iterations, delays = round_
    by_hand = sorted((iteration, name) for name, last in iterations.items() for iteration in range(1, last + 1))
    # Each turn is logged at its start and at its end: there is no other turn in between.
    assert served(iterations, delays) == [turn for turn in by_hand for _ in range(2)]


def test_a_single_device_never_waits() -> None:
    assert served({"a": 3}, {"a": [0.0] * 4}) == [(n, "a") for n in (1, 1, 2, 2, 3, 3)]


def test_a_device_that_finishes_early_is_skipped() -> None:
    nobody_late = {name: [0.0] * 5 for name in "abc"}
    log = served({"a": 1, "b": 3, "c": 2}, nobody_late)
    assert [f"{name}{iteration}" for iteration, name in log[::2]] == ["a1", "b1", "c1", "b2", "c2", "b3"]


def test_a_device_waits_for_a_slower_one_that_comes_before_it_by_name() -> None:
    async def main() -> float:
        turns = TurnOrder(["a", "b"])

        async def slow() -> None:
            await asyncio.sleep(5.0)
            await turns.wait_for("a")
            await asyncio.sleep(2.0)
            turns.end_turn("a")

        first = asyncio.create_task(slow())
        await turns.wait_for("b")
        at = asyncio.get_running_loop().time()
        await first
        return at

    assert run_virtually(main()) == 7.0


def test_a_device_that_finishes_while_it_is_next_lets_the_others_on() -> None:
    async def main() -> None:
        turns = TurnOrder(["a", "b"])
        waiting = asyncio.create_task(turns.wait_for("b"))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        turns.finish("a")
        await waiting

    run_virtually(main())


def test_a_turn_is_held_up_by_the_device_that_has_it_while_others_wait() -> None:
    async def main() -> None:
        turns = TurnOrder(["a", "b", "c"])
        assert turns.held_up_by() is None
        waiting = asyncio.create_task(turns.wait_for("c"))
        await asyncio.sleep(1.0)
        assert turns.held_up_by() == "a"
        turns.finish("a")
        assert turns.held_up_by() == "b"
        turns.finish("b")
        assert turns.held_up_by() is None
        await waiting

    run_virtually(main())

"""Virtual time: the clock jumps, keeps the order, keeps every float, and never waits in real time."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import PATIENCE_S

from pipar.errors import TrainingError
from pipar.execution.clock import VirtualTimeLoop, run_virtually, sleep_until


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _wake_at(when: float, name: str, log: list[tuple[str, float]]) -> None:
    await sleep_until(when)
    log.append((name, _now()))


def test_the_clock_starts_at_zero_and_jumps_over_a_year_without_waiting() -> None:
    async def main() -> tuple[float, float]:
        start = _now()
        await asyncio.sleep(365 * 86400)
        return start, _now()

    began = time.monotonic()
    assert run_virtually(main()) == (0.0, 365 * 86400.0)
    assert time.monotonic() - began < PATIENCE_S


def test_sleepers_wake_in_order_of_time_not_of_creation() -> None:
    async def main() -> list[tuple[str, float]]:
        log: list[tuple[str, float]] = []
        await asyncio.gather(*(_wake_at(when, name, log) for name, when in (("c", 3.0), ("a", 1.0), ("b", 2.0))))
        return log

    assert run_virtually(main()) == [("a", 1.0), ("b", 2.0), ("c", 3.0)]


def test_sleepers_of_the_same_moment_all_wake_then_and_in_the_same_order_every_time() -> None:
    async def main() -> list[tuple[str, float]]:
        log: list[tuple[str, float]] = []
        await asyncio.gather(*(_wake_at(1.0, name, log) for name in "dbca"))
        return log

    assert sorted(run_virtually(main())) == [(name, 1.0) for name in "abcd"]
    assert run_virtually(main()) == run_virtually(main())


@pytest.mark.slow
@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=20))
def test_a_sleeper_wakes_at_exactly_the_float_it_asked_for(moments: list[float]) -> None:
    async def main() -> list[tuple[str, float]]:
        log: list[tuple[str, float]] = []
        await asyncio.gather(*(_wake_at(when, str(when), log) for when in moments))
        return log

    log = run_virtually(main())
    assert [(name, float(name)) for name, _ in log] == log
    assert [when for _, when in log] == sorted(moments)


def test_times_add_up_bit_for_bit_as_written_by_hand() -> None:
    async def main() -> float:
        for _ in range(10):
            await asyncio.sleep(0.1)
        return _now()

    by_hand = 0.0
    for _ in range(10):
        by_hand += 0.1
    assert run_virtually(main()) == by_hand


def test_two_moments_a_nanosecond_apart_stay_apart_late_in_a_run() -> None:
    async def main() -> list[tuple[str, float]]:
        log: list[tuple[str, float]] = []
        await asyncio.gather(_wake_at(5000.000000001, "later", log), _wake_at(5000.0, "sooner", log))
        return log

    assert run_virtually(main()) == [("sooner", 5000.0), ("later", 5000.000000001)]


def test_sleeping_until_the_past_returns_immediately() -> None:
    async def main() -> float:
        await sleep_until(2.0)
        await sleep_until(1.0)
        return _now()

    assert run_virtually(main()) == 2.0


def test_tasks_that_all_wait_for_each_other_are_an_error_not_a_hang() -> None:
    async def main() -> None:
        first, second = asyncio.Event(), asyncio.Event()

        async def wait_then_set(mine: asyncio.Event, other: asyncio.Event) -> None:
            await mine.wait()
            other.set()

        await asyncio.gather(wait_then_set(first, second), wait_then_set(second, first))

    with pytest.raises(TrainingError, match="every task of the run waits for another one"):
        run_virtually(main())


def test_a_timeout_fires_at_its_virtual_moment() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return _now()

    assert run_virtually(main()) == 30.0


def test_a_cancelled_sleeper_leaves_no_timer() -> None:
    async def main() -> float:
        task = asyncio.create_task(sleep_until(100.0))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(1)
        return _now()

    assert run_virtually(main()) == 2.0


def test_an_exception_of_the_program_is_raised_unchanged() -> None:
    async def main() -> None:
        await asyncio.sleep(1)
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        run_virtually(main())


def test_the_same_program_runs_in_the_same_order_every_time() -> None:
    async def main() -> list[tuple[str, float]]:
        log: list[tuple[str, float]] = []
        await asyncio.gather(*(_wake_at((n * 7919 % 13) / 8, str(n), log) for n in range(200)))
        return log

    assert run_virtually(main()) == run_virtually(main())


def test_in_real_time_sleep_until_does_not_return_early() -> None:
    async def main() -> float:
        when = _now() + 0.001
        await sleep_until(when)
        return _now() - when

    assert asyncio.run(main()) >= 0


def test_a_virtual_loop_closes_without_a_warning() -> None:
    loop = VirtualTimeLoop()
    assert loop.time() == 0.0
    loop.close()

"""Backoff: the length of the pauses, that they repeat with a seed, and when the device gives up. No test sleeps."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from pipar.execution.clock import run_virtually
from pipar.transport.backoff import Backoff, Pause


class Watch:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _ceiling(attempt: int) -> float:
    return min(30.0, 0.5 * 2 ** (attempt - 1))


def _lived_through(backoff: Backoff, watch: Watch, attempt_s: float = 0.0) -> list[Pause]:
    """Return the pauses of a device that waits for each of them and never reaches its server."""
    pauses = []
    for pause in backoff.pauses():
        pauses.append(pause)
        watch.now_s += pause.wait_s + attempt_s
    return pauses


def test_the_longest_pauses_double_up_to_thirty_seconds() -> None:
    longest = [pause.wait_s for pause in islice(Backoff(lambda: 1.0, Watch()).pauses(), 9)]
    assert longest == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_attempts_count_from_one() -> None:
    assert [pause.attempt for pause in islice(Backoff(lambda: 0.5, Watch()).pauses(), 3)] == [1, 2, 3]


@pytest.mark.slow
def test_pauses_of_many_devices_fill_the_whole_range_evenly() -> None:
    names = [f"pi-{number}" for number in range(1000)]
    devices = [list(islice(Backoff.of_device(0, name, Watch()).pauses(), 10)) for name in names]
    for attempt in range(1, 11):
        shares = sorted(pauses[attempt - 1].wait_s / _ceiling(attempt) for pauses in devices)
        assert shares[0] >= 0
        assert shares[-1] < 1
        # Kolmogorov and Smirnov: even draws exceed 2.3 / sqrt(n) in one of 20,000 comparisons, and there are ten here.
        farthest = max(abs(share - place / len(shares)) for place, share in enumerate(shares))
        assert farthest < 2.3 / len(shares) ** 0.5


def test_equal_seeds_and_names_wait_equally_long_and_others_do_not() -> None:
    def waits(seed: int, name: str) -> list[Pause]:
        return list(islice(Backoff.of_device(seed, name, Watch()).pauses(), 8))

    assert waits(0, "pi-1") == waits(0, "pi-1")
    assert waits(0, "pi-1") != waits(0, "pi-2")
    assert waits(0, "pi-1") != waits(1, "pi-1")


def test_another_lost_link_begins_with_a_short_but_different_pause() -> None:
    backoff = Backoff.of_device(0, "pi-1", Watch())
    first, second = (list(islice(backoff.pauses(), 7)) for _ in range(2))
    assert second[0].wait_s <= 0.5
    assert second != first


def test_the_last_attempt_is_made_a_second_before_the_time_is_up() -> None:
    watch = Watch()
    pauses = _lived_through(Backoff(random.Random(1).random, watch, give_up_after_s=60.0), watch)
    assert sum(pause.wait_s for pause in pauses) == pytest.approx(59.0)
    assert pauses[-1].within_s == pytest.approx(1.0)


def test_attempts_that_hang_end_when_the_time_is_up() -> None:
    for give_up_after_s in (0.5, 5.0, 60.0):
        watch = Watch()
        for pause in Backoff(random.Random(1).random, watch, give_up_after_s=give_up_after_s).pauses():
            assert pause.within_s is not None
            watch.now_s += pause.wait_s + pause.within_s
        assert watch.now_s == pytest.approx(100.0 + give_up_after_s)


def test_the_time_counts_from_the_first_request_for_a_pause() -> None:
    watch = Watch()
    pauses = Backoff(lambda: 1.0, watch, give_up_after_s=10.0).pauses()
    watch.now_s += 8.0  # the duration of the first attempt
    assert next(pauses) == Pause(1, 0.5, 1.5)


def test_the_duration_of_attempts_counts() -> None:
    watch = Watch()
    pauses = _lived_through(Backoff(lambda: 1.0, watch, give_up_after_s=10.0), watch, attempt_s=4.0)
    assert pauses == [Pause(1, 0.5, 9.5), Pause(2, 1.0, 4.5)]


def test_without_time_there_is_no_attempt() -> None:
    assert list(Backoff(lambda: 1.0, Watch(), give_up_after_s=0.0).pauses()) == []


def test_without_a_limit_there_is_always_another_attempt() -> None:
    watch = Watch()
    pauses = Backoff(lambda: 1.0, watch).pauses()
    for _ in range(5000):  # a power of two that was not held back would have overflowed
        watch.now_s += next(pauses).wait_s
    assert next(pauses) == Pause(5001, 30.0)


def test_it_runs_on_the_virtual_clock() -> None:
    import asyncio

    async def device() -> float:
        loop = asyncio.get_running_loop()
        for pause in Backoff.of_device(0, "pi-1", loop.time, give_up_after_s=600.0).pauses():
            await asyncio.sleep(pause.wait_s)
        return loop.time()

    assert run_virtually(device()) == pytest.approx(599.0)

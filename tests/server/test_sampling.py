"""Which devices are drawn for a round: by the seed, equally often, also if devices come and go."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipar.server.sampling import Draw
from pipar.settings.config import drawn_devices


def names(count: int) -> list[str]:
    return [f"pi-{number:04d}" for number in range(count)]


@given(st.integers(1, 40), st.data(), st.integers(0, 2**32), st.integers(1, 60))
@settings(max_examples=200, deadline=None)
def test_every_device_is_drawn_within_one_of_the_mean_at_any_time(
    devices: int, data: st.DataObject, seed: int, rounds: int
) -> None:
    number = data.draw(st.integers(1, devices))
    draw, drawn = Draw(number, seed), Counter(dict.fromkeys(names(devices), 0))
    for epoch in range(1, rounds + 1):
        chosen = draw.next(epoch, names(devices))
        assert chosen == sorted(set(chosen))
        assert len(chosen) == number
        drawn.update(chosen)
        mean = epoch * number / devices
        assert all(abs(count - mean) < 1 for count in drawn.values())


def test_ten_of_a_thousand_devices_for_a_hundred_rounds_are_each_of_them_once() -> None:
    draw = Draw(10, seed=3)
    drawn = [name for epoch in range(1, 101) for name in draw.next(epoch, names(1000))]
    assert sorted(drawn) == names(1000)


def test_the_seed_decides_and_the_order_of_arrival_does_not() -> None:
    def drawn(seed: int, present: list[str]) -> list[list[str]]:
        draw = Draw(3, seed)
        return [draw.next(epoch, present) for epoch in range(1, 9)]

    assert drawn(1, names(9)) == drawn(1, names(9)[::-1])
    assert drawn(1, names(9)) != drawn(2, names(9))


def test_a_draw_is_continued_from_its_counts() -> None:
    whole, first = Draw(4, 5), Draw(4, 5)
    expected = [whole.next(epoch, names(11)) for epoch in range(1, 31)]
    for epoch in range(1, 14):
        first.next(epoch, names(11))
    resumed = Draw(4, 5, first.counts)
    assert [resumed.next(epoch, names(11)) for epoch in range(14, 31)] == expected[13:]


def test_a_device_that_joins_late_or_comes_back_does_not_make_up_for_missed_rounds() -> None:
    draw = Draw(1, 0)
    for epoch in range(1, 31):
        draw.next(epoch, ["a", "b", "c"])
    later = [draw.next(epoch, ["a", "b", "d"])[0] for epoch in range(31, 61)]
    assert Counter(later)["d"] in (9, 10, 11)
    back = [draw.next(epoch, ["a", "b", "c", "d"])[0] for epoch in range(61, 101)]
    assert all(8 <= count <= 12 for count in Counter(back).values())


@pytest.mark.parametrize(
    ("given", "present", "least", "wanted"),
    [("all", 7, 1, 7), (3, 7, 1, 3), (3, 2, 1, 2), (0.5, 7, 1, 4), (0.01, 7, 1, 1), (0.01, 7, 3, 3), (1.0, 7, 1, 7)],
)
def test_a_number_or_a_share_of_the_present_devices_is_drawn(
    given: int | float | str, present: int, least: int, wanted: int
) -> None:
    assert drawn_devices(given, present, least) == wanted  # type: ignore[arg-type]


def test_all_devices_need_no_draw() -> None:
    for everyone in ("all", 1.0):
        draw = Draw(everyone)  # type: ignore[arg-type]
        assert not draw.is_partial
        assert draw.next(1, ["b", "a"]) == ["a", "b"]
        assert draw.counts == {}

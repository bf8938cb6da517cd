"""Rates, durations and sizes are read as people write them; anything else is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipar.errors import ConfigError
from pipar.units import (
    format_bytes,
    format_mbits,
    format_percent,
    format_rate,
    format_seconds,
    parse_duration,
    parse_rate,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "bits_per_second"),
    [("10Mbit/s", 10e6), ("10 Mbit/s", 10e6), ("2.5mbit/s", 2.5e6), ("1Gbit/s", 1e9), ("64kbit/s", 64e3), (5, 5.0)],
)
def test_a_rate_is_in_bits_per_second(text: str | float, bits_per_second: float) -> None:
    assert parse_rate(text) == bits_per_second


@pytest.mark.parametrize(
    ("text", "seconds"), [("20ms", 0.02), ("30s", 30.0), ("5 min", 300.0), ("2h", 7200.0), ("10us", 1e-5), (0, 0.0)]
)
def test_a_duration_is_in_seconds(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "size"), [("1GiB", 2**30), ("16 KiB", 16384), ("1.5MB", 1_500_000), ("7B", 7), (1e3, 1000)]
)
def test_a_size_is_in_bytes(text: str | float, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "fast", "10 parsec/s", "-3Mbit/s", "10MB", "1,5Mbit/s", "Mbit/s", "nan"])
def test_text_that_is_not_a_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=f"'{text}' is not a rate; write it like '10Mbit/s'"):
        parse_rate(text)


def test_a_number_as_text_is_refused_for_its_missing_unit() -> None:
    with pytest.raises(ConfigError, match=r"'10' has no unit; write a rate like '10Mbit/s' \(units: bit/s, kbit/s"):
        parse_rate("10")


@pytest.mark.parametrize(("parse", "example"), [(parse_duration, "20ms"), (parse_size, "1GiB")])
def test_durations_and_sizes_are_refused_with_their_own_example(parse: object, example: str) -> None:
    assert callable(parse)
    with pytest.raises(ConfigError, match=f"write it like '{example}'"):
        parse("10Mbit/s")


@given(st.one_of(st.floats(1e-3, 1e15), st.integers(1, 10**6).map(lambda kilobits: kilobits * 1e3)))
def test_a_rate_prints_as_text_that_parses_back_to_the_last_bit(rate: float) -> None:
    assert parse_rate(format_rate(rate)) == rate


@pytest.mark.parametrize("thing", [True, [1], {"up": 1}, None])
def test_a_value_that_is_neither_text_nor_a_number_is_refused_too(thing: Any) -> None:
    with pytest.raises(ConfigError, match="is not a rate"):
        parse_rate(thing)


def test_no_limit_prints_as_unlimited() -> None:
    assert format_rate(None) == "unlimited"
    assert format_rate(10e6) == "10Mbit/s"


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (16_400_000, "16.4 MB"), (2_000, "2.0 KB"), (3e12, "3000.0 GB")]
)
def test_a_size_is_printed_with_a_readable_unit(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("share", "digits", "text"),
    [
        (0.5925, 1, "59.3"),
        (0.125, 0, "13"),
        (0.135, 0, "14"),
        (0.0, 1, "0.0"),
        (1.0, 1, "100.0"),
        (0.28125, 2, "28.13"),
    ],
)
def test_a_half_of_the_last_digit_of_a_percentage_is_rounded_up(share: float, digits: int, text: str) -> None:
    assert format_percent(share, digits) == text


def test_a_share_that_is_not_finite_is_printed_unchanged() -> None:
    assert format_percent(float("nan")) == "nan"


def test_seconds_and_rates_in_messages_are_rounded_and_have_no_exponent() -> None:
    assert format_seconds(25.1163) == "25.1 s"
    assert (format_seconds(0.04567, 2), format_seconds(12345.6), format_seconds(2.0)) == ("0.046 s", "12300 s", "2 s")
    assert (format_mbits(300e6, 2), format_mbits(3.04e11, 2), format_mbits(49999999.99999931)) == (
        "300",
        "300000",
        "50",
    )

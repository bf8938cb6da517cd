"""Randomness by key: the same everywhere, different for every key."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipar import random_streams

Text = st.text("ab1:é", max_size=4)
Part = st.one_of(st.integers(-20, 20), Text)
Key = st.tuples(st.integers(-2, 2), Text, st.lists(Part, max_size=3).map(tuple))


def first(seed: int, purpose: str, *key: str | int) -> int:
    return int(random_streams.generator(seed, purpose, *key).bit_generator.random_raw())


def test_numbers_of_a_key_never_change() -> None:
    # Golden: if these change, every recorded run stops being repeatable.
    assert first(0, "order", "device-1", 0) == 5713556901154302987
    assert first(-1, "", "é") == 12761674199712036233


def test_the_key_is_the_digest_of_type_length_and_text_of_each_part() -> None:
    digest = hashlib.blake2b(b"i1:0s5:orders8:device-1i2:12", digest_size=16).digest()
    philox = np.random.Philox(key=int.from_bytes(digest, "little"))
    assert first(0, "order", "device-1", 12) == int(philox.random_raw())


@pytest.mark.slow
def test_another_process_with_another_hash_seed_draws_the_same() -> None:
    program = (
        "from pipar import random_streams; print(random_streams.generator(7, 'order', 'pi', 3).permutation(5).tolist())"
    )
    drawn = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONHASHSEED": "123"}, capture_output=True, text=True, check=True
    )
    assert drawn.stdout.strip() == str(random_streams.generator(7, "order", "pi", 3).permutation(5).tolist())


def test_drawing_from_one_generator_does_not_affect_another_of_the_same_key() -> None:
    one, other = random_streams.generator(0, "a"), random_streams.generator(0, "a")
    one.random(10)
    assert other.random() == random_streams.generator(0, "a").random()


@pytest.mark.slow
@given(Key, Key)
def test_different_keys_draw_different_numbers(one: tuple, other: tuple) -> None:  # type: ignore[type-arg]
    same = first(one[0], one[1], *one[2]) == first(other[0], other[1], *other[2])
    assert same == (one == other)


def test_keys_that_are_divided_differently_differ() -> None:
    keys = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("1", 1), (1, "1"), (11,), (1, 1)]
    assert len({first(0, "p", *key) for key in keys}) == len(keys)


def test_numpy_integers_are_integers() -> None:
    assert first(0, "p", int(np.int64(3))) == first(0, "p", np.int64(3))  # type: ignore[arg-type]

"""Clipping is exact, noise has its stated distribution, and randomised labels reveal no more than epsilon allows."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipar import random_streams
from pipar.privacy.mechanisms import (
    Array,
    clip_and_noise,
    clip_factor,
    keep_probability,
    noisy,
    randomised_labels,
    update_norm,
)

SHAPES = {"0.weight": (40, 3, 5), "0.bias": (40,), "1.weight": (300, 300), "1.running_mean": (7,), "2.empty": (0, 3)}
chance = partial(random_streams.generator, 7, "update", "pi", 1, 0)


@pytest.fixture(scope="module")
def stats() -> Any:
    """scipy's tests of distributions, whose import would cost every worker a second before its first test."""
    return importlib.import_module("scipy.stats")


def tensors(seed: int, scale: float, dtype: str = "float64") -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {name: (scale * rng.standard_normal(shape)).astype(dtype) for name, shape in SHAPES.items()}


def trained(received: dict[str, Array], norm: float) -> dict[str, Array]:
    """Return the received arrays plus an update of this norm."""
    update = tensors(2, 1.0)
    length = math.sqrt(sum(float((one**2).sum()) for one in update.values()))
    return {name: received[name] + update[name] * (norm / length) for name in received}


@pytest.mark.parametrize("norm", [1.0001, 3.0, 1e6])
def test_a_large_update_keeps_its_direction_and_has_the_norm_that_it_is_clipped_to(norm: float) -> None:
    received = tensors(1, 0.0)  # zero, so that nothing is rounded
    after = trained(received, norm)
    before = {name: values.copy() for name, values in after.items()}
    assert clip_and_noise(after, received, clip=0.7, multiplier=0.0, noise=chance) == pytest.approx(norm, rel=1e-12)
    assert update_norm(after, received) == pytest.approx(0.7, rel=1e-12)
    for name, values in after.items():
        np.testing.assert_allclose(values, before[name] * (0.7 / norm), rtol=1e-12)


@pytest.mark.parametrize("norm", [0.0, 0.3, 0.69999])
def test_a_small_update_stays_unchanged(norm: float) -> None:
    """To the last bit in float32; in float64 W0 + (W - W0) is rounded once."""
    received = tensors(1, 1.0)
    after = trained(received, norm)
    for dtype, rounding in (("float32", 0.0), ("float64", 2.3e-16)):
        start, end = ({name: values.astype(dtype) for name, values in one.items()} for one in (received, after))
        before = {name: values.copy() for name, values in end.items()}
        clip_and_noise(end, start, clip=0.7, multiplier=0.0, noise=chance)
        for name, values in end.items():
            np.testing.assert_allclose(values, before[name], rtol=rounding, atol=0)


def test_a_server_that_sends_huge_weights_sees_no_larger_update_for_it() -> None:
    """Near 2^53 numbers are 2 apart: an update of 1, rounded before its noise is added, would become 2 or 0."""
    start = np.full(100_000, 2.0**53)
    end = start.copy()
    end[: len(end) // 2] += 2.0
    after = {"w": end}
    clip_and_noise(after, {"w": start}, clip=1.0 * math.sqrt(len(end) / 2), multiplier=0.004, noise=chance)
    # A change of 1 with a noise of 0.9 (in units of 2: 0.5 and 0.45) is rounded up about as often as down.
    moved = (after["w"] - start)[: len(end) // 2]
    assert 0.3 < (moved > 0).mean() < 0.7


@pytest.mark.slow
@settings(deadline=None)
@given(st.floats(0, 1e150), st.floats(1e-9, 1e9))
def test_no_norm_exceeds_the_clip_after_it_is_scaled(norm: float, clip: float) -> None:
    factor = clip_factor(norm, clip)
    assert 0 <= factor <= 1
    assert factor * norm <= clip * (1 + 1e-12)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e200, 2.15e153])
def test_an_update_that_has_diverged_is_replaced_by_zero(wrong: float) -> None:
    received = tensors(1, 1.0)
    after = trained(received, 1.0)
    for name in ("0.bias", "1.running_mean"):  # the last overflows only when its sums of squares are added
        after[name][3:] = wrong
    clip_and_noise(after, received, clip=1.0, multiplier=0.5, noise=chance)
    for name in received:
        noise = 0.5 * chance(name).standard_normal(SHAPES[name])
        np.testing.assert_array_equal(after[name], received[name] + noise)


def test_noise_does_not_depend_on_memory_layout_or_chunks() -> None:
    received = {"w": np.zeros((300, 300))}  # more than one chunk
    straight, across = {"w": np.ones((300, 300))}, {"w": np.ones((300, 300)).T}
    for after in (straight, across):
        clip_and_noise(after, received, clip=1e9, multiplier=1e-9, noise=chance)
    np.testing.assert_array_equal(straight["w"], across["w"])
    np.testing.assert_array_equal(straight["w"], 1.0 + chance("w").standard_normal((300, 300)))


def test_every_tensor_and_every_round_has_independent_noise() -> None:
    def noise(draw: Callable[[str], np.random.Generator]) -> dict[str, Array]:
        after = {"a": np.zeros(1000), "b": np.zeros(1000)}
        clip_and_noise(after, {"a": np.zeros(1000), "b": np.zeros(1000)}, clip=1.0, multiplier=1.0, noise=draw)
        return after

    once, again, later = noise(chance), noise(chance), noise(partial(random_streams.generator, 7, "update", "pi", 2, 1))
    assert all(np.array_equal(once[name], again[name]) for name in once)
    for one, other in ((once["a"], once["b"]), (once["a"], later["a"])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.15  # five standard deviations of a thousand pairs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_noise_has_the_stated_mean_variance_and_distribution(dtype: str, stats: Any) -> None:
    """With a fixed seed; the assertions would fail for one seed in a thousand."""
    clip, multiplier, count = 2.5, 1.3, 200_000
    after, received = {"w": np.full(count, 3.0, dtype)}, {"w": np.full(count, 3.0, dtype)}
    clip_and_noise(after, received, clip=clip, multiplier=multiplier, noise=chance)
    noise, scale = after["w"].astype(np.float64) - 3.0, clip * multiplier
    assert after["w"].dtype == dtype
    assert abs(noise.mean()) < 3.3 * scale / math.sqrt(count)
    assert abs(noise.var() / scale**2 - 1) < 3.3 * math.sqrt(2 / count)
    assert stats.kstest(noise / scale, "norm").pvalue > 0.001


# --- inputs


@pytest.mark.slow
def test_noise_on_inputs_is_gaussian_of_the_given_scale_and_does_not_change_its_argument(stats: Any) -> None:
    inputs = np.ones((50, 3, 16, 16), np.float32)
    seen = noisy(inputs, 0.4, random_streams.generator(1, "pixel", "pi", 1, 0))
    assert (seen.dtype, seen.shape, inputs.max()) == (np.float32, inputs.shape, 1.0)
    noise = (seen.astype(np.float64) - 1.0).ravel() / 0.4
    assert abs(noise.mean()) < 3.3 / math.sqrt(noise.size)
    assert stats.kstest(noise, "norm").pvalue > 0.001


# --- labels


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "epsilon"), [(2, 0.5), (10, 3.0), (10, 0.1), (100, 4.0)])
def test_labels_are_true_with_the_probability_of_epsilon_and_all_others_equally_likely(
    classes: int, epsilon: float, stats: Any
) -> None:
    count = 200_000
    labels = np.full(count, classes - 1)
    told = randomised_labels(labels, classes=classes, epsilon=epsilon, rng=random_streams.generator(3, "label", "pi"))
    kept = keep_probability(epsilon, classes)
    expected = np.full(classes, (1 - kept) / (classes - 1))
    expected[-1] = kept
    assert stats.chisquare(np.bincount(told, minlength=classes), expected * count).pvalue > 0.001


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(2, 1000), st.floats(0.001, 50))
def test_no_answer_is_more_than_e_to_the_epsilon_times_as_likely_as_with_another_label(k: int, epsilon: float) -> None:
    kept = keep_probability(epsilon, k)
    other = (1 - kept) / (k - 1)
    # `kept` is rounded, which shows in 1 - kept where that is tiny, so the ratio is compared by its parts.
    assert kept <= math.exp(epsilon) * (other + sys.float_info.epsilon)
    assert other <= math.exp(epsilon) * kept
    assert kept == pytest.approx(math.exp(epsilon) / (math.exp(epsilon) + k - 1), rel=1e-12)


def test_measured_answers_keep_the_ratio_for_every_two_labels() -> None:
    classes, epsilon, count = 4, 1.0, 400_000
    seen = [
        np.bincount(
            randomised_labels(
                np.full(count, label), classes=classes, epsilon=epsilon, rng=random_streams.generator(5, "label", label)
            ),
            minlength=classes,
        )
        for label in range(classes)
    ]
    for one, other, answer in product(range(classes), range(classes), range(classes)):
        # Four standard deviations of the counts' ratio are allowed on top.
        slack = 4 * math.sqrt(1 / seen[one][answer] + 1 / seen[other][answer])
        assert math.log(seen[one][answer] / seen[other][answer]) <= epsilon + slack


def test_a_network_with_one_class_has_nothing_to_hide() -> None:
    rng = random_streams.generator(1, "label", "pi")
    assert randomised_labels(np.zeros(9, np.int64), classes=1, epsilon=0.1, rng=rng).tolist() == [0] * 9

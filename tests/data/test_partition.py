"""Which device gets which samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipar.data.partition import Scheme, device_sizes, even_sizes, partition
from pipar.errors import ConfigError, DataError
from pipar.settings.config import Config
from pipar.settings.config_file import config_from

SCHEMES: tuple[Scheme, ...] = ("iid", "dirichlet", "shards")


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, list[int]]:
    labels = np.array(draw(st.lists(st.integers(0, 6), max_size=60)), np.int64)
    cuts = sorted(draw(st.lists(st.integers(0, len(labels)), max_size=6)))
    return labels, [b - a for a, b in zip([0, *cuts], cuts, strict=False)]


@pytest.mark.slow
@given(cases(), st.sampled_from(SCHEMES), st.integers(0, 2**32), st.floats(1e-6, 1e6), st.integers(1, 5))
def test_every_scheme_gives_disjoint_parts_of_exact_sizes_and_is_deterministic(
    case: tuple[np.ndarray, list[int]],
    scheme: Scheme,
    seed: int,
    alpha: float,
    shards: int,
) -> None:
    labels, sizes = case
    parts = partition(labels, sizes, scheme=scheme, seed=seed, alpha=alpha, shards_per_device=shards)
    again = partition(labels, sizes, scheme=scheme, seed=seed, alpha=alpha, shards_per_device=shards)
    assert [len(part) for part in parts] == sizes
    everything = np.concatenate([*parts, np.empty(0, np.int64)])
    assert len(set(everything.tolist())) == sum(sizes)
    assert everything.size == 0 or (everything.min() >= 0 and everything.max() < len(labels))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.slow
@given(st.integers(0, 10_000), st.integers(1, 200))
def test_even_sizes_add_up_and_differ_by_at_most_one(total: int, devices: int) -> None:
    sizes = even_sizes(total, devices)
    assert (len(sizes), sum(sizes)) == (devices, total)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_another_seed_gives_other_parts(scheme: Scheme) -> None:
    labels = np.arange(1000) % 10
    one, other = (partition(labels, [100] * 10, scheme=scheme, seed=seed) for seed in (0, 1))
    assert any(set(a) != set(b) for a, b in zip(one, other, strict=True))


def shares(labels: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    return np.array([np.bincount(labels[part], minlength=10) / len(part) for part in parts])


def test_a_small_alpha_gives_devices_few_labels_and_a_large_one_all_equally() -> None:
    labels = np.arange(20_000) % 10
    few, many = (
        shares(labels, partition(labels, [500] * 20, scheme="dirichlet", seed=0, alpha=alpha)).max(axis=1).mean()
        for alpha in (0.05, 1000.0)
    )
    assert few > 0.6
    assert many < 0.16  # 500 draws with probability 0.1: three deviations above it is 0.14


def test_shards_of_one_label_each_leave_a_device_with_at_most_that_many_labels() -> None:
    labels = np.arange(1000) % 10
    parts = partition(labels, [100] * 10, scheme="shards", seed=3, shards_per_device=2)
    assert all(len(set(labels[part])) <= 2 for part in parts)


def test_shards_of_a_part_of_the_data_still_use_every_label() -> None:
    labels = np.sort(np.arange(1000) % 10)
    parts = partition(labels, [20] * 10, scheme="shards", seed=0)
    assert set(labels[np.concatenate(parts)]) == set(range(10))


def test_iid_parts_have_all_labels_in_about_equal_shares() -> None:
    labels = np.sort(np.arange(10_000) % 10)
    assert shares(labels, partition(labels, [1000] * 10, scheme="iid", seed=0)).max() < 0.15


def test_too_many_samples_are_refused_with_the_number_available() -> None:
    with pytest.raises(DataError, match="there are 10 training samples, but 3 devices need 12"):
        partition(np.zeros(10, np.int64), [4, 4, 4], scheme="iid", seed=0)


def test_wrong_settings_are_refused() -> None:
    labels = np.zeros(10, np.int64)
    with pytest.raises(ConfigError, match="no partition 'random'"):
        partition(labels, [1], scheme="random", seed=0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="alpha"):
        partition(labels, [1], scheme="dirichlet", seed=0, alpha=0.0)
    with pytest.raises(ConfigError, match="shards_per_device"):
        partition(labels, [1], scheme="shards", seed=0, shards_per_device=0)
    with pytest.raises(ConfigError, match="-1 samples"):
        partition(labels, [-1], scheme="iid", seed=0)
    with pytest.raises(ConfigError, match="0 devices"):
        even_sizes(10, 0)


@pytest.mark.slow
def test_more_devices_than_samples_are_refused_before_they_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_slow(_: Config) -> None:
        raise AssertionError("a hundred thousand devices were listed")

    monkeypatch.setattr("pipar.data.partition.device_specs", too_slow)
    config = config_from({"devices": [{"count": 60_000}, {"name": "pi", "count": 40_000}]})
    with pytest.raises(
        DataError, match="100000 devices share 1197 training samples, but each needs at least 1: use fewer"
    ):
        device_sizes(config, 1197)

"""The average is the weighted mean for any order of arrival; the hash changes with every bit."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipar.aggregation.averaging import federated_average
from pipar.tensors.bodies import weights_sha256

values = st.floats(-1e3, 1e3, width=32)
models = st.lists(
    st.tuples(st.lists(values, min_size=3, max_size=3), st.integers(1, 10_000)), min_size=1, max_size=5
)  # fmt: skip


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(models)
def test_the_average_is_the_weighted_mean_to_the_last_bits_of_float64(given_: list[tuple[list[float], int]]) -> None:
    states = [({"w": torch.tensor(weights, dtype=torch.float64)}, samples) for weights, samples in given_]
    average = federated_average(states)["w"]
    total = sum(samples for _, samples in given_)
    for place in range(3):
        exact = sum(Fraction(weights[place]) * samples for weights, samples in given_) / total
        largest = max(abs(weights[place]) for weights, _ in given_)
        assert abs(average[place].item() - float(exact)) <= 1e-14 * max(largest, 1e-300)


def test_a_float32_average_is_summed_in_float64_and_rounded_once() -> None:
    # In float32, 16777216 + 1 is 16777216: both small values would be lost.
    states = [({"w": torch.tensor([value], dtype=torch.float32)}, 1) for value in (16777216.0, 1.0, 1.0, 2.0)]
    average = federated_average(states)["w"]
    assert average.dtype == torch.float32
    assert average.item() == 16777220.0 / 4


def test_models_are_weighted_by_samples() -> None:
    low, high = {"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}
    assert federated_average([(low, 3), (high, 1)])["w"].item() == 1.0


def test_in_name_order_the_average_is_the_same_bits_for_any_order_of_arrival() -> None:
    generator = torch.Generator().manual_seed(0)
    arrived = {f"pi-{n}": ({"w": torch.randn(100, generator=generator)}, n + 1) for n in range(7)}
    hashes = set()
    for names in (sorted(arrived, reverse=True), sorted(arrived, key=lambda name: name[::-1]), list(arrived)):
        shuffled = {name: arrived[name] for name in names}
        hashes.add(weights_sha256(federated_average([shuffled[name] for name in sorted(shuffled)])))
    assert len(hashes) == 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integer_counters_stay_integers_and_take_the_largest(dtype: torch.dtype) -> None:
    states = [({"n": torch.tensor([value], dtype=dtype)}, 1) for value in (3, 7, 5)]
    average = federated_average(states)["n"]
    assert (average.dtype, average.item()) == (dtype, 7)


def test_a_large_counter_is_not_rounded_and_a_negative_one_not_raised() -> None:
    states = [({"n": torch.tensor([2**60 + 1, -5])}, 1), ({"n": torch.tensor([2**60, -9])}, 1)]
    assert federated_average(states)["n"].tolist() == [2**60 + 1, -5]


def test_averaging_does_not_change_the_models() -> None:
    one, other = {"w": torch.ones(2), "n": torch.tensor([1])}, {"w": torch.zeros(2), "n": torch.tensor([4])}
    federated_average([(one, 1), (other, 1)])
    assert one["w"].tolist() == [1.0, 1.0]
    assert (one["n"].item(), other["n"].item()) == (1, 4)


def state() -> dict[str, torch.Tensor]:
    return {"b": torch.tensor([1.0, 2.0]), "a": torch.zeros(2, 2, dtype=torch.float64), "n": torch.tensor(3)}


def test_the_hash_does_not_depend_on_the_order_of_the_names() -> None:
    assert weights_sha256(state()) == weights_sha256(dict(reversed(list(state().items()))))


CHANGES = {
    "the last bit": {"b": torch.nextafter(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))},
    "the sign of zero": {"a": torch.tensor([[0.0, 0.0], [0.0, -0.0]], dtype=torch.float64)},
    "the shape": {"a": torch.zeros(4, dtype=torch.float64)},
    "the dtype": {"a": torch.zeros(2, 4, dtype=torch.float32)},
    "a counter": {"n": torch.tensor(4)},
    "a name": {"c": torch.tensor(4)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_hash_changes_with(change: str) -> None:
    assert weights_sha256({**state(), **CHANGES[change]}) != weights_sha256(state())


def test_the_hash_depends_on_values_and_not_on_memory_layout() -> None:
    values_ = torch.arange(6.0).reshape(2, 3)
    assert weights_sha256({"w": values_.t()}) == weights_sha256({"w": values_.t().contiguous()})


def test_a_model_with_an_empty_tensor_has_a_hash() -> None:
    assert weights_sha256({"w": torch.zeros(0, 3)}) != weights_sha256({"w": torch.zeros(3, 0)})

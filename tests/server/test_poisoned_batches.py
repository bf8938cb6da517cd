"""A device whose batches would ruin a model that others share is excluded, and the model stays as it was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.hostile import Tamper, at_iteration, times
from support.roaming import A, B, C, roam, same
from support.training import Case

from pipar.events import Dropped
from pipar.nn.snapshot import Snapshot
from pipar.wire.messages import Message

#: Some overflow at once, others leave a model that overflows for the next device.
SIZES = {
    "float64": (1e200, 1e160, 1e30, 1e16),
    "float32": (1e37, 1e30, 1e16),
}


def poisoned(factor: float, iteration: int = 1) -> Tamper:
    return at_iteration(iteration, times(factor))


def constant(value: float) -> Tamper:
    return at_iteration(1, lambda values, labels: (np.full_like(values, value), labels))


def case(method: str, norm: str, dtype: str = "float64") -> Case:
    return Case(method, norm=norm, dtype=dtype, encoding="raw", sizes=(100, 230, 157), epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sfl2", "sl", "sfl", "pipar"])
@pytest.mark.parametrize(("dtype", "norm"), [("float64", "none"), ("float64", "batch"), ("float32", "batch")])
def test_finite_activations_of_absurd_size_leave_the_weights_of_a_training_without_their_device(
    method: str, norm: str, dtype: str
) -> None:
    small = case(method, norm, dtype)
    expected = roam(small, {}, absent={C})
    for factor in SIZES[dtype]:
        trained = roam(small, {}, tampers={C: poisoned(factor)}, saves=True)
        assert [(event.device, event.epoch) for event in trained.of(Dropped)] == [(C, 1)], factor
        assert trained.counted == expected.counted
        assert C in trained.endings
        assert same(trained.state, expected.state), factor
        for body in trained.snapshots.values():
            saved = Snapshot.read(body)
            tensors = [*saved.model.values(), *(one for state in saved.optimizer.values() for one in state.values())]
            assert all(torch.isfinite(tensor).all() for tensor in tensors)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sfl2", "sl"])
def test_a_device_that_turns_hostile_later_is_named_and_nobody_else_is_blamed(method: str) -> None:
    trained = roam(case(method, "batch"), {}, tampers={C: poisoned(1e200, iteration=2)})
    assert [(event.device, event.epoch) for event in trained.of(Dropped)] == [(C, 1)]
    assert [sorted(counted) for counted in trained.counted] == [[A, B], [A, B]]
    assert all(tensor.isfinite().all() for tensor in trained.state.values())
    assert [result.val_loss is not None and np.isfinite(result.val_loss) for result in trained.results] == [True, True]


@pytest.mark.slow
def test_batch_statistics_of_a_discarded_batch_are_discarded_too() -> None:
    small = case("sfl2", "batch")
    expected = roam(small, {}, absent={C})
    trained = roam(small, {}, tampers={C: constant(1e17)})  # whose variance is 0, and whose mean would stay
    assert same(trained.state, expected.state)


@pytest.mark.slow
@pytest.mark.parametrize("hostile", [A, C])
@pytest.mark.parametrize("factor", [1e3, 1e4, 1e6])
def test_no_honest_device_is_blamed_for_a_model_that_another_one_has_changed(hostile: str, factor: float) -> None:
    def always(message: Message) -> Message:
        return at_iteration(message.iteration, times(factor))(message)

    small = replace(case("sfl2", "none", "float32"), sizes=(200, 230, 257))
    trained = roam(small, {}, tampers={hostile: always})
    assert [(event.device, event.epoch) for event in trained.of(Dropped)] == [(hostile, 1)]
    assert [len(counted) for counted in trained.counted] == [2, 2]

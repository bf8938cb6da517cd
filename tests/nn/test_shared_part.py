"""A shared server-side model takes a batch whole or not at all."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

from pipar.errors import UnusableStepError
from pipar.nn.micro_batches import Decoded
from pipar.nn.optimizers import OptimizerSettings, sgd
from pipar.nn.shared_part import SharedServerPart
from pipar.tasks.losses import ElementLoss
from pipar.tasks.task import Task, classification
from pipar.tensors.bodies import tensor_body
from pipar.tensors.inputs import InputForm, TensorForm
from pipar.wire.messages import Kind, Message
from tests.support.labels import label_bytes

LABELS = (torch.arange(6) % 3, 6, 6)


def shared_part(rate: float = 0.1, *, trusts_devices: bool = False) -> SharedServerPart:
    torch.manual_seed(0)
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    part = SharedServerPart(module, sgd(rate, momentum=0.9), task=classification(3))
    part.trusts_devices = trusts_devices
    return part


def train(part: SharedServerPart, inputs: torch.Tensor, *, step: bool = True) -> None:
    part.backward(part.forward(Decoded(inputs, torch.arange(len(inputs)) % 3, len(inputs), len(inputs))))
    if step:
        part.step()


def everything(part: SharedServerPart) -> dict[str, torch.Tensor]:
    momentum = {f"momentum of {name}": tensor for name, tensor in part.optimizer_state().items()}
    return copy.deepcopy({**part.state(), **momentum})


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_an_unfinished_batch_leaves_neither_gradients_nor_statistics() -> None:
    part = shared_part()
    train(part, torch.randn(6, 4))
    before = everything(part)
    train(part, torch.randn(6, 4), step=False)
    assert not same(everything(part), before)
    part.discard()
    assert same(everything(part), before)
    assert all(weight.grad is None for weight in part.module.parameters())


def as_device(part: SharedServerPart, device: str, factor: float) -> None:
    """Train a batch of a device whose gradient has this many times the usual size."""
    activation = part.backward(part.forward(Decoded(torch.randn(6, 4), torch.arange(6) % 3, 6, 6)))
    part.encode(activation, "raw", (1, 1, 1, device))
    for weight in part.module.parameters():
        assert weight.grad is not None
        weight.grad.mul_(factor)
    part.step()


def test_a_gradient_far_above_those_of_other_devices_is_refused_and_large_ones_of_all_are_not() -> None:
    part = shared_part()
    as_device(part, "a", 1.0)
    as_device(part, "b", 1.0)
    with pytest.raises(UnusableStepError):
        as_device(part, "c", 100.0)
    part.discard()
    for factor in (5.0, 25.0, 100.0):  # a training that diverges: no device is to blame
        for device in ("a", "b"):
            as_device(part, device, factor)


def test_the_first_device_of_all_is_compared_with_the_weights() -> None:
    part = shared_part()
    with pytest.raises(UnusableStepError):
        as_device(part, "a", 1000.0)


def test_a_device_that_has_left_is_not_compared_with() -> None:
    part = shared_part()
    as_device(part, "a", 1.0)
    part.keep_errors_of(["b"])
    as_device(part, "b", 2.0)
    assert list(part._gradients) == ["b"]


@pytest.mark.parametrize("gradient", [float("nan"), float("inf"), 1e30, 1e4])
def test_a_step_that_would_ruin_the_weights_changes_nothing(gradient: float) -> None:
    part = shared_part()
    train(part, torch.randn(6, 4))
    before = everything(part)
    train(part, torch.randn(6, 4), step=False)
    for weight in part.module.parameters():
        assert weight.grad is not None
        weight.grad.fill_(gradient)
    with pytest.raises(UnusableStepError, match="would change the weights of the shared server-side model by"):
        part.step()
    part.discard()
    assert same(everything(part), before)


def test_statistics_near_overflow_refuse_the_step() -> None:
    part = shared_part()
    train(part, torch.randn(6, 4) * 1e25, step=False)  # its variance is near overflow, and its gradients are 0
    with pytest.raises(UnusableStepError, match="values that are too large"):
        part.step()
    part.discard()
    assert all(torch.isfinite(buffer).all() for buffer in part.module.buffers())


def test_installed_statistics_are_what_a_discarded_batch_returns_to() -> None:
    part, other = shared_part(), shared_part()
    train(other, torch.randn(6, 4))
    part.install(other.state(), keep_state=False)
    train(part, torch.randn(6, 4), step=False)
    part.discard()
    assert same(part.state(), other.state())


def test_a_first_device_is_held_to_small_steps_until_another_one_has_made_some() -> None:
    part = shared_part()
    as_device(part, "a", 1.0)
    with pytest.raises(UnusableStepError):
        as_device(part, "a", 1000.0)


def test_a_training_with_its_own_devices_only_may_diverge_as_in_plain_torch() -> None:
    part = shared_part(trusts_devices=True)
    for device, factor in (("a", 1.0), ("b", 1.0), ("c", 1000.0), ("a", 1.0)):
        as_device(part, device, factor)


@pytest.mark.parametrize("factor", [1e4, 1e6, 1e9])
def test_statistics_far_above_those_of_the_round_refuse_the_step(factor: float) -> None:
    part = shared_part()
    train(part, torch.randn(6, 4))
    before = everything(part)
    train(part, torch.randn(6, 4) * factor, step=False)  # batch normalisation hides the factor from the gradients
    with pytest.raises(UnusableStepError, match=r"running_\w+ of the shared server-side model to"):
        part.step()
    part.discard()
    assert same(everything(part), before)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.1, None], ids=["running average", "cumulative average"])
def test_statistics_cannot_be_raised_slowly_by_one_device(momentum: float | None) -> None:
    part, scale, counted = shared_part(), 1.0, dict.fromkeys("abc", 0)
    next(layer for layer in part.module.modules() if isinstance(layer, nn.BatchNorm1d)).momentum = momentum
    for _ in range(40):
        for device in ("a", "b", "c"):
            activation = part.backward(
                part.forward(Decoded(torch.randn(6, 4) * (scale if device == "c" else 1.0), *LABELS))
            )
            part.encode(activation, "raw", (1, 1, 1, device))
            with contextlib.suppress(UnusableStepError):
                part.step()
                counted[device] += 1
            part.discard()
        part.install(part.state(), keep_state=True)  # the next round
        scale *= 1.5
    assert counted == {"a": 40, "b": 40, "c": counted["c"]}
    assert counted["c"] < 30
    assert part.state()["0.running_var"].max() < 30**2


def test_a_batch_of_an_honest_device_may_vary_ten_times_as_much_as_the_others() -> None:
    part = shared_part(rate=1e-6)
    for device, scale in (("a", 1.0), ("b", 1.0), ("c", 12.0)):
        activation = part.backward(part.forward(Decoded(torch.randn(6, 4) * scale, *LABELS)))
        part.encode(activation, "raw", (1, 1, 1, device))
        part.step()


def test_statistics_of_all_devices_may_grow_together() -> None:
    part = shared_part(rate=1e-6)
    for scale in (1.0, 3.0, 9.0, 27.0):
        for device in ("a", "b", "c"):
            activation = part.backward(part.forward(Decoded(torch.randn(6, 4) * scale, *LABELS)))
            part.encode(activation, "raw", (1, 1, 1, device))
            part.step()


def test_the_shape_of_one_devices_activations_does_not_bind_the_next_device() -> None:
    module = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 3))
    part = SharedServerPart(module, sgd(0.1), task=classification(3))
    for size in (4, 8):
        body = tensor_body(torch.randn(6, 2, size, size), label_bytes(torch.arange(6) % 3))
        message = Message(Kind.ACTIVATION, 1, 1, 1, 6, 6, body)
        activation = part.backward(part.forward(part.decode(message, "raw")))
        part.encode(activation, "raw", (1, 1, 1, f"device-{size}"))
        part.step()


NUMBER = InputForm((TensorForm((1,), torch.float32),))
HONEST = {"sgd": sgd(0.05, momentum=0.9), "faster": sgd(0.5), "adamw": OptimizerSettings("adamw", 0.01)}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("scale", [1.0, 10.0])
@pytest.mark.parametrize("name", HONEST)
def test_no_honest_device_is_refused_in_its_turn_if_each_has_samples_of_one_class(
    name: str, scale: float, devices: int
) -> None:
    """Each trains until it knows its class well; then the gradients of the next one are far larger."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    part = SharedServerPart(module, HONEST[name], task=classification(4))
    for epoch in (1, 2, 3):
        for device in range(devices):
            for iteration in range(20):
                inputs, targets = torch.randn(10, 8).relu() * scale**device, torch.full((10,), device)
                activation = part.backward(part.forward(Decoded(inputs, targets, 10, 10)))
                part.encode(activation, "raw", (epoch, iteration, 1, f"device-{device}"))
                part.step()


@pytest.mark.usefixtures("one_thread")
def test_adam_takes_gradients_far_above_the_weights_if_all_devices_have_such() -> None:
    torch.manual_seed(0)
    part = SharedServerPart(nn.Linear(4, 1), OptimizerSettings("adam", 0.1), task=Task(ElementLoss("mse"), NUMBER))
    for device in "aab":
        inputs, targets = torch.randn(10, 4), torch.full((10, 1), 5000.0)
        activation = part.backward(part.forward(Decoded(inputs, targets, 10, 10)))
        part.encode(activation, "raw", (1, 1, 1, device))
        part.step()

"""Trainings with frozen parameters give the weights of plain PyTorch with the same parameters frozen."""

from __future__ import annotations

import asyncio

import pytest
import torch
from support import reference
from support.networks import Residual
from support.over_grpc import train_over_grpc
from support.training import EXACT, Case, largest_error, reference_data, reference_state, train_in_virtual_time
from torch import nn

from pipar.errors import OrdersError
from pipar.job.model_setup import part_builder
from pipar.methods import Plan
from pipar.wire.orders import Orders

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

FIRST = ("conv1.*",)
MOST = ("conv1.*", "conv2.*", "fc4.*")


@pytest.mark.parametrize(
    "case",
    [
        Case("fl", freeze=FIRST),
        Case("sfl", (1,), freeze=FIRST),
        Case("sfl", (2,), freeze=MOST, momentum="keep"),
        Case("pipar", (1, 2, 3), (3, 1, 5), freeze=MOST, momentum="keep"),
        Case("pipar", (1,), (5,), freeze=("conv1.*", "*.bias"), sizes=(101,)),
        Case("pipar", (2,), (3,), freeze=FIRST, schedule="1f1b", sizes=(50, 57, 1, 8, 9)),
        Case("pipar", (3,), (3,), freeze=MOST, aggregator="fedprox", aggregation=(("proximal", 0.1),)),
        Case("sl", (2,), freeze=MOST),
        Case("sl", (3,), freeze=FIRST),
        Case("sfl2", (2,), freeze=MOST),
        Case("sfl2", (1,), freeze=("fc5.*",)),
        Case("pipar", (2,), (1,), freeze=MOST, norm="batch"),
        Case("sfl2", (2,), freeze=MOST, norm="batch"),
    ],
    ids=str,
)
def test_weights_are_those_of_plain_torch(case: Case) -> None:
    assert largest_error(train_in_virtual_time(case).state, reference_state(case)) < EXACT


@pytest.mark.parametrize("method", ["pipar", "sfl2"])
def test_an_aggregator_gets_no_frozen_weights(method: str) -> None:
    case = Case(method, (2,), (1,), freeze=("conv?.*",), aggregator="median")
    start, state = case.workload().build_model().state_dict(), train_in_virtual_time(case).state
    assert all(torch.equal(state[name], start[name]) for name in start if name.startswith("conv"))
    assert not torch.equal(state["fc4.linear.weight"], start["fc4.linear.weight"])


@pytest.mark.parametrize("split_point", [1, 3])
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_module_that_comes_with_frozen_parameters_is_trained_like_in_plain_torch(
    split_point: int, pieces: int
) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        model = Residual()
        model.stem.requires_grad_(False)
        model.layer1[0].requires_grad_(False)
        return model.double()

    case = Case("pipar", (split_point,), (pieces,), sizes=(23, 7))
    data = reference_data(case.workload(made()))
    expected = reference.train("fl", made(), data, 0, case.rules())
    assert largest_error(train_in_virtual_time(case, made()).state, expected) < EXACT


@pytest.mark.parametrize("method", ["pipar", "sfl", "sfl2", "sl"])
def test_a_device_without_anything_to_train_gets_no_gradients_and_computes_no_backward(method: str) -> None:
    case = Case(
        method, (2,), (3 if method == "pipar" else 1,), sizes=(101, 7), freeze=("conv?.*",), encoding="raw", cache="off"
    )
    trained = train_in_virtual_time(case)
    assert largest_error(trained.state, reference_state(case)) < EXACT
    assert {span.kind for span in trained.spans if span.owner != "server" and span.lane == "compute"} >= {"fc"}
    assert not any(span.kind in ("bc", "step") and span.lane == "compute" for span in trained.spans if not span.waiting)
    # A gradient has 8 bytes for each of the numbers that cross the cut; the answers have a header and nothing else.
    assert trained.epochs[1].bytes_down < 101 * 8 * 10
    assert trained.epochs[1].bytes_up > 108 * 8 * 16


def test_a_device_with_a_trained_layer_gets_gradients_next_to_one_without() -> None:
    case = Case("pipar", (1, 3), (3, 2), sizes=(23, 17), freeze=("conv1.*",))
    trained = train_in_virtual_time(case)
    assert largest_error(trained.state, reference_state(case)) < EXACT
    backwards = {span.owner for span in trained.spans if span.kind == "bc" and not span.waiting}
    assert backwards == {"phone-b"}


def test_weights_over_grpc_are_those_of_plain_torch() -> None:
    case = Case("pipar", (1, 2), (3, 2), sizes=(23, 17), freeze=("conv1.*",), epochs=2, even=True)
    assert largest_error(asyncio.run(train_over_grpc(case)).state, reference_state(case)) < EXACT


def test_a_device_refuses_to_leave_layers_untrained_that_its_own_network_trains() -> None:
    orders = Orders(1, Plan(1, 1), 5, 100, False, False, frozen_layers=1)
    build = part_builder(Case("pipar").workload(), "phone-a")
    with pytest.raises(OrdersError, match="nothing in the first 1 layers, but this device's network trains layer 1"):
        build(orders)


def test_frozen_parameters_are_sent_only_before_the_first_round() -> None:
    def bytes_of(freeze: tuple[str, ...]) -> list[tuple[int, int]]:
        case = Case("fl", sizes=(8, 7), epochs=3, encoding="raw", freeze=freeze)
        return [(epoch.bytes_up, epoch.bytes_down) for epoch in train_in_virtual_time(case).epochs]

    model = Case("fl").workload().build_model()
    frozen = 2 * sum(weight.nbytes for name, weight in model.named_parameters() if name.startswith("fc4"))
    every, some = bytes_of(()), bytes_of(("fc4.*",))
    for before, after in zip(every, some, strict=True):
        assert before[0] - after[0] == pytest.approx(frozen, rel=0.01)
    assert [before[1] - after[1] for before, after in zip(every, some, strict=True)][1:] == pytest.approx(
        [frozen] * 2, rel=0.01
    )

"""Networks that are no nn.Sequential train the weights of the uncut network, at every cut and for every N."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import reference
from support.networks import Attention, Branching, Chosen, Encoder, Guarded, Recurrent, Residual, Tied, UNet, sentences
from support.over_grpc import train_over_grpc
from support.training import EXACT, Case, largest_error, reference_data, train_in_virtual_time
from torch import nn

from pipar.errors import ModelError
from pipar.events import EpochResult, ignore
from pipar.launch.virtual import train_timing_only

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "residual": Residual,
    "u-net": UNet,
    "attention": Attention,
    "recurrent": Recurrent,
    "tied": Tied,
    "no grad": Guarded,
}

#: Of a network that offers fewer, not much would be tested.
LEAST_CUTS = {"residual": 5, "u-net": 5, "attention": 5, "recurrent": 2, "tied": 1, "no grad": 2}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]()


def expected(case: Case, model: nn.Module, datasets: Any = None) -> reference.State:
    workload = case.workload(model, datasets)
    return reference.train("fl", model.double(), reference_data(workload), 0, case.rules())


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_are_those_of_the_uncut_network(name: str) -> None:
    layers = len(Case("pipar").workload(made(name)).build_model())
    assert layers - 1 >= LEAST_CUTS[name]
    reached: reference.State | None = None
    for split_point in range(1, layers + 1):  # P = Q is a call of the whole network
        pieces = (1, 3, 5)[(split_point - 1) % 3]
        case = Case("pipar", (split_point,), (pieces,), sizes=(23, 7))
        reached = reached or expected(case, made(name))
        assert largest_error(train_in_virtual_time(case, made(name)).state, reached) < EXACT


@pytest.mark.parametrize("pieces", [1, 3, 5])
def test_devices_with_different_cuts_and_numbers_train_the_same_weights(pieces: int) -> None:
    case = Case("pipar", (1, 3), (pieces, 2), momentum="keep", sizes=(23, 7))
    state = train_in_virtual_time(case, made("residual")).state
    assert largest_error(state, expected(case, made("residual"))) < EXACT


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_over_grpc_are_those_of_the_uncut_network(name: str) -> None:
    case = Case("pipar", (1,), (3,), sizes=(23, 7), epochs=1, even=True)
    trained = asyncio.run(train_over_grpc(case, model=made(name)))
    assert largest_error(trained.state, expected(case, made(name))) < EXACT


def test_a_timing_only_run_sends_the_bytes_of_every_tensor_both_ways() -> None:
    torch.manual_seed(0)
    datasets = [sentences(23), sentences(7, seed=1)]
    case = Case("pipar", (3,), (2,), sizes=(23, 7), encoding="raw")
    trained = train_in_virtual_time(case, Encoder(), datasets)
    layer = trained.job.server_profile.layers[2]
    assert len(layer.tensor_bytes) > 1
    assert 0 < layer.gradient_bytes < layer.output_bytes
    forecast: list[EpochResult] = []
    train_timing_only(trained.job, lambda result, _: forecast.append(result), ignore)
    for name, size in (("phone-a", 23), ("phone-b", 7)):
        (up, down), (sent, back) = (epochs[1].device_bytes[name] for epochs in (forecast, trained.epochs))
        assert abs(up - sent) < 0.06 * sent, (up, sent)
        assert abs(down - back) < 0.06 * back, (down, back)
        assert sent - back > 0.8 * size * (layer.output_bytes - layer.gradient_bytes)


def test_federated_learning_trains_a_network_that_cannot_be_cut() -> None:
    torch.manual_seed(0)
    model = Branching()
    case = Case("fl", sizes=(23, 7))
    assert largest_error(train_in_virtual_time(case, model).state, expected(case, model)) < EXACT


def test_a_method_that_cuts_refuses_a_network_that_cannot_be_cut() -> None:
    with pytest.raises(
        ModelError, match=r"Branching cannot be cut, because .* in model.cut_points, or train it whole with --method fl"
    ):
        train_in_virtual_time(Case("pipar", sizes=(23, 7)), Branching())


@pytest.mark.parametrize("split_point", [1, 2])
@pytest.mark.parametrize("pieces", [1, 3, 5])
def test_modules_that_no_recording_can_follow_train_the_weights_of_the_uncut_network(
    split_point: int, pieces: int
) -> None:
    case = Case("pipar", (split_point,), (pieces,), sizes=(23, 7), cut_points=("stem", "body"))
    torch.manual_seed(0)
    model = Chosen()
    assert largest_error(train_in_virtual_time(case, model).state, expected(case, model)) < EXACT


@pytest.mark.parametrize(("name", "pieces"), [("residual", 1), ("residual", 3), ("u-net", 5)])
def test_named_cuts_train_the_weights_of_the_uncut_network(name: str, pieces: int) -> None:
    points = {"residual": ("pool", "layer1.0"), "u-net": ("down2", "bottom")}[name]
    case = Case("pipar", (1, 2), (pieces,), sizes=(23, 7), cut_points=points)
    assert largest_error(train_in_virtual_time(case, made(name)).state, expected(case, made(name))) < EXACT


@pytest.mark.parametrize("method", ["pipar", "sfl"])
def test_a_network_that_cannot_be_cut_trains_whole_in_any_method(method: str) -> None:
    torch.manual_seed(0)
    model = Branching()
    case = Case(method, sizes=(23, 7), cut_points=())
    reached = reference.train(method, model.double(), reference_data(case.workload(model)), 1, case.rules())
    assert largest_error(train_in_virtual_time(case, model).state, reached) < EXACT


def sharing() -> nn.Sequential:
    """Return a sequence with one ReLU in two places, and one weight in two layers."""
    torch.manual_seed(0)
    rectified, one, two = nn.ReLU(), nn.Linear(12, 12), nn.Linear(12, 12)
    two.weight = one.weight
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), rectified, one, rectified, two, nn.Linear(12, 10))


def test_a_sequence_is_not_cut_between_two_uses_of_a_weight() -> None:
    cuts = Case("pipar").workload(sharing()).cuts()
    assert [cut.after for cut in cuts.cuts] == ["0", "1", "2", "5"]
    assert {(one.first, one.reason) for one in cuts.not_offered} == {
        ("3", "5.weight is used on both sides"),
        ("4", "5.weight is used on both sides"),
    }


@pytest.mark.parametrize(("split_point", "pieces"), [(2, 1), (3, 3), (4, 5), (5, 2)])
def test_a_sequence_with_shared_layers_trains_the_weights_of_the_uncut_network(split_point: int, pieces: int) -> None:
    case = Case("pipar", (split_point,), (pieces,), sizes=(23, 7))
    assert largest_error(train_in_virtual_time(case, sharing()).state, expected(case, sharing())) < EXACT

"""The weights of a file are those that a training starts from; a file that does not fit is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support import reference
from support.networks import Tied
from support.training import EXACT, Case, largest_error, reference_data, train_in_virtual_time
from torch import nn

from pipar.errors import ModelError
from pipar.nn.start_weights import load_weights


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "start.safetensors"


def test_a_network_has_the_weights_of_the_file_in_its_own_dtype(file: Path) -> None:
    given = network()
    given[1].running_mean.fill_(0.25)
    save_file(given.state_dict(), file)
    model = network().double()
    load_weights(model, str(file))
    assert all(tensor.dtype in (torch.float64, torch.int64) for tensor in model.state_dict().values())
    assert all(
        torch.equal(model.state_dict()[name], value.to(model.state_dict()[name].dtype))
        for name, value in given.state_dict().items()
    )


def test_one_name_of_a_shared_weight_is_enough(file: Path) -> None:
    given, model = Tied(), Tied()
    state = {name: value.contiguous() for name, value in given.state_dict().items() if name != "decoder.weight"}
    save_file(state, file)
    load_weights(model, str(file))
    assert torch.equal(model.decoder.weight, given.first.weight)
    assert model.decoder.weight is model.first.weight


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"0.weight": None}, r"the file has no '0.weight', which is 4x3 in float32 in the network"),
        ({"0.bias": torch.zeros(5)}, r"its '0.bias' is 5 in float32, but that of the network is 4 in float32"),
        ({"3.bias": torch.zeros(5)}, r"the network has no '3.bias', which is 5 in float32 in the file"),
        ({"1.num_batches_tracked": torch.tensor(1.0)}, r"is a number in float32, but that of .* is a number in int64"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_and_changes_nothing(
    change: dict[str, torch.Tensor | None], says: str, file: Path
) -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {**network().state_dict(), **change}
    save_file({name: value for name, value in state.items() if value is not None}, file)
    with pytest.raises(ModelError, match=says):
        load_weights(model, str(file))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_two_values_for_one_weight_are_refused(file: Path) -> None:
    state = {name: value.clone() for name, value in Tied().state_dict().items()}
    state["decoder.weight"] += 1
    save_file(state, file)
    with pytest.raises(ModelError, match=r"'\w+.weight' and '\w+.weight' are one weight of the network"):
        load_weights(Tied(), str(file))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fl", "pipar"])
def test_a_training_starts_from_the_weights_of_the_file(method: str, file: Path) -> None:
    case = Case(method, (2,), (3,), sizes=(23, 7), epochs=1, weights=str(file))
    torch.manual_seed(7)
    start = Case("fl").workload().build_model()
    for weight in start.parameters():
        nn.init.normal_(weight, std=0.1)
    save_file(start.state_dict(), file)
    expected = reference.train("fl", start, reference_data(case.workload()), 0, case.rules())
    assert largest_error(train_in_virtual_time(case).state, expected) < EXACT

"""Frozen parameters cost nothing: no optimiser state, no bytes after the first model, no averaging."""

from __future__ import annotations

import pytest
import torch
from support.networks import Residual, Tied
from torch import nn

from pipar.cutting.frozen import changing_state, check_stays_frozen, check_trains, freeze, frozen_layers, frozen_names
from pipar.errors import ModelError, ProtocolError
from pipar.nn.device_part import DeviceSettings, TorchDevicePart
from pipar.nn.learner import LearnerSettings, TorchLearner
from pipar.nn.micro_batches import MicroBatch
from pipar.nn.optimizers import sgd
from pipar.tasks.task import classification
from pipar.tensors.bodies import read_state, state_body
from pipar.wire.messages import Body
from pipar.wire.orders import TrainedPart


def network() -> nn.Sequential:
    layers = (nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 2))
    return nn.Sequential(*layers)


def received(body: Body) -> Body:
    return Body.of(bytearray().join(body.buffers), encoding=body.encoding)


def learner(model: nn.Sequential) -> TorchLearner:
    return TorchLearner(model, {"a": 4, "b": 4}, LearnerSettings(sgd(), task=classification(2)))


# --- which


def test_patterns_freeze_the_parameters_that_they_match() -> None:
    model = Residual()
    freeze(model, ["stem.*", "layer1.0.conv?.weight"])
    frozen = {"stem.weight", "stem.bias", "layer1.0.conv1.weight", "layer1.0.conv2.weight"}
    assert frozen_names(model) == frozen


def test_a_weight_with_two_names_is_frozen_under_both() -> None:
    model = Tied()
    freeze(model, ["decoder.weight"])
    assert frozen_names(model) == {"first.weight", "decoder.weight"}


def test_a_pattern_without_a_match_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"'layer9.\*', which matches no parameter of the network: .*'1.weight', ..., '4.b"
    ):
        freeze(network(), ["1.*", "layer9.*"])


def test_a_network_without_anything_to_train_is_refused() -> None:
    model = network()
    freeze(model, ["*"])
    with pytest.raises(ModelError, match="all parameters of the network are frozen"):
        check_trains(model)


class Averaging(nn.Module):
    """Stores an average in a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.average += x.mean(0)
        return x


def test_a_frozen_parameter_that_a_forward_changes_is_refused() -> None:
    model = nn.Sequential(Averaging(), nn.Linear(4, 2))
    with pytest.raises(ModelError, match=r"'0.average' has requires_grad=False, but the network changes it"):
        check_stays_frozen(model, torch.rand(2, 4))
    assert torch.equal(model[0].average, torch.zeros(4))


def test_layers_without_parameters_count_as_frozen() -> None:
    model = network()
    assert frozen_layers(model) == 1
    freeze(model, ["1.*", "2.weight"])
    assert frozen_layers(model) == 2
    freeze(model, ["2.bias"])
    assert frozen_layers(model) == 3


def test_buffers_of_frozen_layers_change() -> None:
    model = network()
    freeze(model, ["1.*", "2.*"])
    assert set(changing_state(model)) == {
        *("2.running_mean", "2.running_var", "2.num_batches_tracked"),
        *("3.weight", "3.bias", "4.weight", "4.bias"),
    }


# --- on a device


def test_a_device_gets_frozen_parameters_once_and_never_returns_them() -> None:
    source, model = network(), network()
    for one in (source, model):
        freeze(one, ["1.*", "2.*"])
    part = TorchDevicePart(model, sgd(), has_loss=True, settings=DeviceSettings(keeps_base=True))
    part.unpack_and_install(received(state_body(source.state_dict())), keep_state=False)
    assert torch.equal(model[1].weight, source[1].weight)
    with torch.no_grad():
        source[3].weight += 1
    part.unpack_and_install(received(state_body(changing_state(source))), keep_state=False)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in source.state_dict().items())
    for changes in (False, True):
        assert set(read_state(received(part.pack(changes=changes)), changing_state(model))) == set(
            changing_state(model)
        )


def test_the_first_model_must_have_the_frozen_parameters() -> None:
    model = network()
    freeze(model, ["1.*"])
    part = TorchDevicePart(model, sgd(), has_loss=True)
    with pytest.raises(ProtocolError, match=r"'1\.weight' is in only one"):
        part.unpack_and_install(received(state_body(changing_state(model))), keep_state=False)


@pytest.mark.parametrize("missing", ["3.weight", "2.running_mean"])
def test_no_other_entry_may_be_missing(missing: str) -> None:
    model = network()
    freeze(model, ["1.*", "2.*"])
    part = TorchDevicePart(model, sgd(), has_loss=True)
    part.unpack_and_install(received(state_body(model.state_dict())), keep_state=False)
    state = {name: value for name, value in changing_state(model).items() if name != missing}
    with pytest.raises(ProtocolError, match="is in only one"):
        part.unpack_and_install(received(state_body(state)), keep_state=False)


def test_only_trained_parameters_have_momentum() -> None:
    model = network()
    freeze(model, ["1.*", "2.*"])
    part = TorchDevicePart(model, sgd(), has_loss=True)
    part.forward(1, MicroBatch(torch.rand(4, 4), torch.tensor([0, 1, 0, 1]), 4))
    part.backward(1, None)
    part.step()
    assert set(part.optimizer_state()) == {
        f"{name}/momentum_buffer" for name in ("3.weight", "3.bias", "4.weight", "4.bias")
    }


# --- on the server


def test_a_device_that_returns_frozen_parameters_is_refused() -> None:
    model = network()
    freeze(model, ["1.*"])
    part = state_body({name: value for name, value in model.state_dict().items() if not name.startswith("4.")})
    with pytest.raises(ProtocolError, match="a returned a model that does not match"):
        learner(model).aggregate([TrainedPart("a", received(part), 1)])


def test_aggregation_leaves_frozen_parameters_and_their_memory_alone() -> None:
    model = network()
    freeze(model, ["1.*", "4.weight"])
    server = learner(model)
    before = model[1].weight.data_ptr()
    shared = server.replica("a").module
    assert shared[-1].weight.data_ptr() == server.replica("b").module[-1].weight.data_ptr()
    assert shared[-1].bias.data_ptr() != server.replica("b").module[-1].bias.data_ptr()
    server.aggregate([TrainedPart(name, received(server.pack(name, frozen=False)), 1) for name in ("a", "b")])
    assert model[1].weight.data_ptr() == before
    assert shared[-1].weight.data_ptr() == model[4].weight.data_ptr()
    sizes = [server.part_bytes("a", frozen=frozen) for frozen in (True, False)]
    assert sizes[0] - sizes[1] == 4 * (12 + 3)


class Scaled(nn.Module):
    """Has a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((3,), 7.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_aggregation_keeps_buffers_that_are_not_saved() -> None:
    server = TorchLearner(
        nn.Sequential(nn.Linear(4, 3), Scaled(), nn.Linear(3, 2)),
        {"a": 1},
        LearnerSettings(sgd(), task=classification(2)),
    )
    server.aggregate([TrainedPart("a", received(server.pack("a")), 1)])
    assert torch.equal(server.model[1].scale, torch.full((3,), 7.0))

"""A network is cut after the modules that the user names, and nowhere else; a name that does not fit is a sentence."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence

import pytest
import torch
from support.networks import Attention, Branching, Recurrent, Residual, Tied, UNet
from torch import Tensor, nn
from torch.nn import functional as F

from pipar.cutting import named_cuts as module
from pipar.cutting.named_cuts import named_line
from pipar.cutting.split import join_states, named_layers, split_model
from pipar.cutting.stage_line import Line
from pipar.errors import ModelError
from pipar.tensors.inputs import tensors_of

EXAMPLE = torch.zeros(2, 1, 4, 4, dtype=torch.float64)

pytestmark = pytest.mark.usefixtures("one_thread")


class Chained(nn.Module):
    """Modules one after another; what the middle one does depends on values, so it cannot be recorded."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), norm(12))
        self.body = nn.Sequential(Choosing(), nn.ReLU(inplace=True), Choosing())
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)))


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if float(x.detach().amax()) > 1 else self.two(x)


class Adding(Chained):
    def forward(self, x: Tensor) -> Tensor:
        first = self.stem(x)
        return self.head(self.body(first) + first)


class Switching(Chained):
    """It calls a module or not by what it is given, without any other operation outside of its modules."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.stem(x)
        return self.head(first if first.amax() > 1e9 else self.body(first))


def children() -> nn.Sequential:
    layers = {"a": nn.Flatten(), "b": nn.Linear(16, 8), "c": nn.ReLU(), "d": nn.Linear(8, 8), "e": nn.Linear(8, 10)}
    return nn.Sequential(OrderedDict(layers))


def shared() -> nn.Sequential:
    network = nn.Sequential(OrderedDict({"a": nn.Flatten(), "b": nn.Linear(16, 16), "d": nn.Linear(16, 16)}))
    network.d.weight = network.b.weight
    return network


def trained_alike(line: Line, samples: int = 5) -> None:
    """Assert that a step at every cut has the gradients and buffers of the uncut network."""
    inputs = torch.randn(samples, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(samples))
    labels = torch.arange(samples) % 10
    whole = copy.deepcopy(line.whole).train()
    F.cross_entropy(whole(inputs), labels).backward()
    for split_point in range(1, len(line)):
        device, server = (copy.deepcopy(part).train() for part in split_model(line, split_point))
        crossing = tensors_of(device(inputs))
        row = [one.detach().requires_grad_(one.requires_grad) for one in crossing]
        F.cross_entropy(server(*(one.clone() for one in row)), labels).backward()
        for sent, received in zip(crossing, row, strict=True):
            if received.grad is not None:
                sent.backward(received.grad, retain_graph=True)
        found = {name: w.grad for part in (device, server) for name, w in part.named_parameters() if w.grad is not None}
        expected = {name: w.grad for name, w in whole.named_parameters() if w.grad is not None}
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(join_states(device.state_dict(), server.state_dict()), dict(whole.state_dict()))


@pytest.mark.parametrize(
    ("network", "names"),
    [
        (children(), ["b", "d"]),
        (nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(16, 8), nn.ReLU()), nn.Linear(8, 10)), ["1.0", "1"]),
        (Chained(), ["stem", "body"]),
        (Chained(nn.BatchNorm1d), ["stem.1", "body.0", "body.1"]),
    ],
    ids=["children", "inside of children", "modules", "inside of modules"],
)
def test_modules_that_run_one_after_another_are_cut_without_a_recording(
    network: nn.Module, names: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TracedNetwork", None)
    line = named_line(network.double(), names, EXAMPLE)
    assert list(named_layers(line)) == [*names, "output"]
    assert list(line.state_dict()) == list(network.state_dict())
    trained_alike(line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "names"),
    [
        (Residual(), ["pool", "layer1.0", "layer1"]),
        (Residual(norm=nn.BatchNorm2d), ["stem", "layer1.0.norm", "layer1.1"]),
        (UNet(), ["down1", "down2", "bottom", "up2"]),
        (Attention(), ["embed", "norm1", "value", "norm2"]),
        (Recurrent(), ["embed", "lstm"]),
        (Tied(), ["decoder"]),
    ],
    ids=["residual", "batch norm", "u-net", "attention", "recurrent", "tied"],
)
def test_recorded_operations_are_cut_after_the_last_one_of_a_named_module(
    network: nn.Module, names: Sequence[str]
) -> None:
    line = named_line(network.double(), names, EXAMPLE)
    assert list(named_layers(line)) == [*names, "output"]
    trained_alike(line)


@pytest.mark.parametrize(
    ("network", "names", "sentence"),
    [
        (
            Chained(),
            ["stem", "boddy"],
            r"names 'boddy', which is not a module of Chained \(did you mean 'body'\?\): it",
        ),
        (Chained(), ["stem", "stem"], "names 'stem' twice"),
        (Chained(), ["body", "stem"], r"\['body', 'stem'\] is not in order of execution: write \['stem', 'body'\]"),
        (Chained(), ["stem", "head"], "cannot be cut after 'head', because the network also ends there"),
        (Chained(), ["body.2", "body"], "cannot be cut after 'body.2', because the next one .* ends there"),
        (shared(), ["b"], r"cannot be cut after 'b', because d\.weight is used on both sides"),
    ],
    ids=["unknown", "twice", "out of order", "the end", "the same end", "shared"],
)
def test_a_name_that_does_not_fit_is_refused(network: nn.Module, names: Sequence[str], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        named_line(network.double(), names, EXAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "names", "sentence"),
    [
        (Residual(), ["layer1.0", "pool"], r"not in order of execution: write \['pool', 'layer1.0'\]"),
        (Tied(), ["middle"], r"cannot be cut after 'middle', because (first|decoder)\.weight is used on both sides"),
        (Residual(), ["head"], "cannot be cut after 'head', because the network also ends there"),
        (Adding(), ["stem"], "add is computed after body, outside of its modules, and .* depend on the values"),
        (Switching(), ["stem"], "amax is computed after stem, outside of its modules, and .* depend on the values"),
    ],
    ids=["out of order", "shared", "the end", "a sum of modules", "a choice between modules"],
)
def test_a_cut_that_is_impossible_is_refused_with_its_reason(
    network: nn.Module, names: Sequence[str], sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        named_line(network.double(), names, EXAMPLE)


def test_a_named_cut_that_fails_the_check_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "differs", lambda *_: True)
    with pytest.raises(ModelError, match=r"cannot be cut after 'stem', because a step .* differs"):
        named_line(Chained().double(), ["stem"], EXAMPLE)


def test_without_any_cut_point_every_network_is_one_stage() -> None:
    line = named_line(Branching().double(), [], EXAMPLE)
    assert (len(line), line.cuts and line.cuts.source) == (1, "whole")


def test_parts_of_a_chain_switch_between_training_and_evaluation() -> None:
    line = named_line(
        nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 10)), ["1"], EXAMPLE.float()
    )
    _, server = split_model(line, 1)
    dropout = next(one for one in server.stages["output"].modules() if isinstance(one, nn.Dropout))  # type: ignore[attr-defined]
    for mode in (False, True):
        server.train(mode)
        assert dropout.training == mode

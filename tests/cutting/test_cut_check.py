"""A line of stages that does not train as its network is found, whatever the network starts with and does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.networks import Reversed
from torch import Tensor, nn

from pipar.cutting.cut_check import differs
from pipar.cutting.named_cuts import named_line
from pipar.cutting.stage_line import Line, line_of_stages
from pipar.errors import ModelError

EXAMPLE = torch.zeros(2, 4)


class Scaled(nn.Module):
    """Adds a layer's output, multiplied with a factor for each value."""

    def __init__(self, factor: float = 1.0, change: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.factor = nn.Parameter(torch.full((4,), factor))
        self.change = change

    def forward(self, values: Tensor) -> Tensor:
        return values + self.factor * self.change(self.layer(values))


def line(network: nn.Sequential, **others: nn.Module) -> Line:
    """Return a line of a sequence's children, some of them replaced."""
    found = line_of_stages(dict(network.named_children()), network)
    found.stages.update(others)
    return found


def sequence(factor: float = 1.0, *, zero: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4), Scaled(factor), nn.Linear(4, 3))
    if zero:
        nn.init.zeros_(network[2].weight)
    return network


@pytest.mark.parametrize("network", [sequence(), sequence(1e-6), sequence(zero=True)], ids=["usual", "small", "zero"])
def test_a_wrong_gradient_is_found_behind_factors_and_layers_that_start_small(network: nn.Sequential) -> None:
    assert not differs(line(network), EXAMPLE)
    wrong = Scaled(change=lambda values: torch.relu(Reversed.apply(values)))  # type: ignore[no-untyped-call]
    wrong.layer, wrong.factor = network[1].layer, network[1].factor
    assert differs(line(network, **{"1": wrong}), EXAMPLE)


class Squeezed(nn.Module):
    """Loses the dimension of the samples if there is one sample."""

    def forward(self, values: Tensor) -> Tensor:
        return values.squeeze()


class Unsqueezed(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values.reshape(-1, 4)


def test_what_crosses_has_a_row_for_each_sample_also_for_a_single_one() -> None:
    network = nn.Sequential(nn.Linear(4, 4), Squeezed(), Unsqueezed())
    assert differs(line(network), EXAMPLE)
    whole = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Squeezed(), Unsqueezed()))
    assert not differs(line(whole), EXAMPLE)


class OtherwiseAlone(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return 2 * values if len(values) == 1 else values


def test_a_stage_that_computes_something_else_for_a_single_sample_is_found() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    assert not differs(line(network), EXAMPLE)
    assert differs(line(network, **{"1": OtherwiseAlone()}), EXAMPLE)


def test_a_network_that_takes_no_single_sample_is_checked_with_more() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert not differs(line(network), EXAMPLE)
    assert differs(line(network, **{"1": nn.Identity()}), EXAMPLE)


class Keeping(nn.Module):
    """Leaves what it computes where another module reads it."""

    def __init__(self, shared: dict[str, Tensor], *, reads: bool, detached: bool) -> None:
        super().__init__()
        self.layer, self.shared, self.reads, self.detached = nn.Linear(4, 4), shared, reads, detached

    def forward(self, values: Tensor) -> Tensor:
        if self.reads:
            return self.layer(values) + self.shared["kept"][: len(values)]
        made: Tensor = self.layer(values)
        self.shared["kept"] = made.detach() if self.detached else made
        return made


@pytest.mark.parametrize("detached", [True, False])
def test_stages_that_share_what_is_no_tensor_of_theirs_cannot_be_cut(detached: bool) -> None:
    shared: dict[str, Tensor] = {}
    network = nn.Sequential(
        Keeping(shared, reads=False, detached=detached), nn.ReLU(), Keeping(shared, reads=True, detached=detached)
    )
    if detached:
        network(EXAMPLE)  # leaves something to read
    with pytest.raises(ModelError, match="differs from that of the network"):
        named_line(network, ["0"], EXAMPLE)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", torch.tensor([True, False, True, True]))

    def forward(self, values: Tensor) -> Tensor:
        return self.layer(values) * self.mask


def test_buffers_of_any_dtype_are_compared() -> None:
    assert not differs(line(nn.Sequential(Masked(), nn.Linear(4, 4))), EXAMPLE)

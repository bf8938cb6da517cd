"""Where an nn.Sequential cannot be cut between two of its children, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.networks import Applied, Keeping, Restoring
from torch import nn

from pipar.cutting.sequence import grouped_line, uses_twice
from pipar.cutting.stage_line import Line

EXAMPLE = torch.zeros(2, 4)
DIFFERS = "a step through it differs from that of the uncut network"
NO_ROWS = "what crosses it has no row for each sample"


def grouped(*between: nn.Module, is_known: bool = False) -> Line | None:
    return grouped_line(nn.Sequential(nn.Linear(4, 4), *between, nn.Linear(4, 3)), EXAMPLE, is_known=is_known)


def test_a_sequence_is_not_cut_between_two_parameters_with_one_memory() -> None:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    assert not uses_twice(nn.Sequential(one, nn.ReLU(), two))
    two.weight = nn.Parameter(one.weight.data)
    network = nn.Sequential(nn.Linear(4, 4), one, nn.ReLU(), two)
    assert uses_twice(network)
    line = grouped_line(network, torch.zeros(2, 4), is_known=True)
    assert line is not None
    assert list(line.stages) == ["0", "3"]


def through_an_object(*, is_kept: bool) -> list[nn.Module]:
    """Return children of which the last one adds what the first one has kept in a dictionary, if it is there."""
    shared: dict[str, torch.Tensor] = {"kept": torch.zeros(1, 4)} if is_kept else {}
    return [Keeping(shared), nn.Tanh(), Restoring(shared)]


@pytest.mark.parametrize(
    ("between", "reasons"),
    [
        (through_an_object(is_kept=False), {"1": DIFFERS, "2": DIFFERS}),
        (through_an_object(is_kept=True), {"1": DIFFERS, "2": DIFFERS}),
        ([Applied(torch.Tensor.detach)], {"0": DIFFERS}),
        (
            [Applied(lambda x: (x, x * 2)), Applied(lambda x: x[0] + x[1])],
            {"1": "what crosses it is a tuple, not a tensor"},
        ),
        ([Applied(lambda x: {"x": x}), Applied(lambda x: x["x"])], {"1": "what crosses it is a dict, not a tensor"}),
        ([Applied(lambda x: x.t()), Applied(lambda x: x.t())], {"1": NO_ROWS}),
        ([nn.Unflatten(1, (2, 2)), nn.Flatten(0, 1), Applied(lambda x: x.reshape(-1, 4))], {"2": NO_ROWS}),
        ([Applied(torch.fft.fft), Applied(torch.abs)], {"1": "values in complex64 cross it"}),
    ],
)
def test_a_sequence_is_not_cut_where_its_children_cannot_be_told_apart(
    between: list[nn.Module], reasons: dict[str, str]
) -> None:
    line = grouped(*between)
    assert line is not None
    assert line.cuts is not None
    assert {one.first: one.reason for one in line.cuts.not_offered} == reasons
    assert len(line) == len(between) + 2 - len(reasons)


def test_layers_of_torch_may_change_the_rows_too() -> None:
    line = grouped(nn.Unflatten(1, (2, 2)), nn.Flatten(0, 1), nn.Unflatten(0, (-1, 2)), nn.Flatten(1), is_known=True)
    assert line is not None
    assert list(line.stages) == ["0", "1", "3", "4", "5"]


@pytest.mark.parametrize(
    "between", [[nn.BatchNorm1d(4), nn.Dropout(0.5)], [nn.ReLU(inplace=True)], [Applied(torch.tanh)]]
)
def test_other_sequences_can_be_cut_after_each_child(between: list[nn.Module]) -> None:
    assert grouped(*between) is None


def drawing() -> Callable[[Any], Any]:
    drawn = iter(range(1, 1000))
    return lambda x: x * next(drawn)


def test_a_sequence_of_which_no_two_steps_are_the_same_is_cut_after_each_child() -> None:
    assert grouped(Applied(drawing())) is None

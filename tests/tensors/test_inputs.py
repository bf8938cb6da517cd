"""A network is called as its user calls it: with a tensor, a tuple or a dictionary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipar.errors import ModelError
from pipar.networks.models import check_fits
from pipar.tasks.task import classification
from pipar.tensors.inputs import InputForm, Inputs, call, drawn_like, split_rows, tensors_of

IDS = torch.tensor([[4, 5, 6], [7, 8, 9], [1, 2, 3]])
INPUTS: dict[str, Inputs] = {
    "tensor": torch.zeros(3, 2),
    "integers": IDS,
    "tuple": (torch.zeros(3, 2), IDS),
    "dictionary": {"ids": IDS, "mask": torch.ones(3, 3, dtype=torch.bool)},
}


class Told(nn.Module):
    def forward(self, *given: Tensor, **named: Tensor) -> tuple[int, list[str]]:
        return len(given), list(named)


def test_a_network_is_called_as_its_user_calls_it() -> None:
    found = [call(Told(), inputs) for inputs in INPUTS.values()]
    assert found == [(1, []), (1, []), (2, []), (0, ["ids", "mask"])]


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_pieces_have_the_structure_of_the_whole(inputs: Inputs) -> None:
    first, second = split_rows(inputs, [1, 2])
    assert type(first) is type(second) is type(inputs)
    for whole, one, two in zip(*map(tensors_of, (inputs, first, second)), strict=True):
        assert torch.equal(torch.cat([one, two]), whole)


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_examples_have_the_form_of_the_samples_and_integers_their_range(inputs: Inputs) -> None:
    form = InputForm.of(inputs)
    drawn = form.random(4, torch.float64, torch.Generator().manual_seed(0))
    for made in (form.example(4, torch.float64), drawn, drawn_like(form.example(2, torch.float64), 4, seed=0)):
        assert InputForm.of(made) == form
        for tensor, given in zip(tensors_of(made), tensors_of(inputs), strict=True):
            assert len(tensor) == 4
            assert tensor.dtype == (torch.float64 if given.is_floating_point() else given.dtype)
            if not given.is_floating_point():
                assert given.min() <= tensor.min() <= tensor.max() <= given.max()


def test_forms_are_told_apart_and_printed() -> None:
    forms = [InputForm.of(inputs) for inputs in INPUTS.values()]
    assert [str(form) for form in forms] == ["2", "3 (int64)", "(2, 3 (int64))", "ids 3 (int64), mask 3 (bool)"]
    assert [form.is_floats for form in forms] == [True, False, False, False]
    assert len(set(forms)) == 4
    assert InputForm.of(IDS + 1000) == InputForm.of(IDS)


class Named(nn.Linear):
    def forward(self, ids: Tensor, mask: Tensor, scale: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return super().forward(ids.float() * mask)


def test_a_dictionary_without_the_names_that_a_forward_takes_is_refused() -> None:
    check_fits(Named(3, 2), InputForm.of(INPUTS["dictionary"]), classification(2))
    with pytest.raises(ModelError, match=r"dictionaries with ids, but .* takes ids, mask, scale: there is no 'mask'"):
        check_fits(Named(3, 2), InputForm.of({"ids": IDS}), classification(2))
    with pytest.raises(ModelError, match="it takes no 'words'"):
        check_fits(Named(3, 2), InputForm.of({"ids": IDS, "mask": IDS, "words": IDS}), classification(2))

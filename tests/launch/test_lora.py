"""Adapters of low rank around frozen weights: only they are trained and sent, with the weights of plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from support import reference
from support.networks import Attention
from support.training import EXACT, Case, largest_error, reference_data, train_in_virtual_time
from torch import Tensor, nn

from pipar.cutting.frozen import frozen_layers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


class LoRA(nn.Module):
    """W x + B A x: W is frozen, A and B have a low rank; Hu et al. 2021."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.A.T @ self.B.T


def adapted() -> nn.Module:
    """A frozen transformer with adapters at its queries and values, and a trained head."""
    torch.manual_seed(0)
    model = Attention().requires_grad_(False)
    model.query, model.value = LoRA(model.query), LoRA(model.value)
    model.head.requires_grad_(True)
    return model.double()


@pytest.mark.parametrize("pieces", [1, 3])
def test_weights_are_those_of_plain_torch_at_every_cut(pieces: int) -> None:
    line = Case("pipar").workload(adapted()).build_model()
    assert 1 <= frozen_layers(line) < len(line) - 1
    case = Case("pipar", (1,), (pieces,), sizes=(23, 7), epochs=3)
    expected = reference.train("fl", adapted(), reference_data(case.workload(adapted())), 0, case.rules())
    for split_point in range(1, len(line)):
        case = Case("pipar", (split_point,), (pieces,), sizes=(23, 7), epochs=3)
        assert largest_error(train_in_virtual_time(case, adapted()).state, expected) < EXACT


def test_only_adapters_and_the_head_are_sent_after_the_first_model() -> None:
    case = Case("fl", sizes=(23, 7), epochs=2, encoding="raw")
    trained = train_in_virtual_time(case, adapted())
    model = adapted()
    adapters = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
    every = sum(weight.nbytes for weight in model.parameters())
    names = 1_000  # of tensors, in the header of each model, and control messages
    for epoch in trained.epochs:
        assert 2 * adapters < epoch.bytes_down < 2 * (adapters + names) < every


def test_adapters_that_peft_makes_train_the_weights_of_plain_torch() -> None:
    peft = pytest.importorskip("peft", exc_type=ImportError)

    def made() -> nn.Module:
        torch.manual_seed(0)
        adapters = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["head"])
        model: nn.Module = peft.get_peft_model(Attention(), adapters)
        return model.double()

    case = Case("pipar", (2,), (3,), sizes=(23, 7))
    expected = reference.train("fl", made(), reference_data(case.workload(made())), 0, case.rules())
    trained = train_in_virtual_time(case, made())
    assert largest_error(trained.state, expected) < EXACT

"""Micro-batches that are computed at the same time train the same bits as one after another, in whichever order."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.waiting import PATIENCE_S
from torch import nn

from pipar.errors import ProtocolError
from pipar.nn import at_once
from pipar.nn.micro_batches import Decoded
from pipar.nn.optimizers import sgd
from pipar.nn.server_part import TorchServerPart
from pipar.tasks.task import classification

SIZES = (3, 1, 4, 2, 3)
BATCHES = 3


class Tied(nn.Module):
    """Uses one weight twice, has one that is never used, a buffer, and an attribute that its forward sets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.unused = nn.Parameter(torch.randn(2))
        self.register_buffer("scale", torch.full((6,), 0.5))
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x @ self.weight
        return torch.relu(self.seen * self.scale) @ self.weight


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.ReLU(inplace=True), nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 5)
    )


def tied() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(18, 6), Tied(), nn.Linear(6, 5))


def frozen() -> nn.Sequential:
    network = convolutional()
    network[1].requires_grad_(False)
    return network


def part(make: Callable[[], nn.Sequential]) -> TorchServerPart:
    torch.manual_seed(5)
    return TorchServerPart(make(), sgd(learning_rate=0.3, momentum=0.9), task=classification(5), at_once=True)


def batch(number: int) -> list[Decoded]:
    generator = torch.Generator().manual_seed(number)
    samples = sum(SIZES)
    return [
        Decoded(
            torch.randn(size, 2, 3, 3, generator=generator),
            torch.randint(5, (size,), generator=generator),
            samples,
            samples,
        )
        for size in SIZES
    ]


def one_after_another(trained: TorchServerPart) -> list[torch.Tensor]:
    """Train some batches; return the gradients of all activations."""
    gradients = []
    for number in range(BATCHES):
        for decoded in batch(number):
            activation = trained.backward(trained.forward(decoded))
            assert isinstance(activation, torch.Tensor)
            assert activation.grad is not None
            gradients.append(activation.grad)
        trained.step()
    return gradients


def in_order(trained: TorchServerPart, orders: list[list[int]]) -> list[torch.Tensor]:
    """Train the same with all forwards first, and the backwards in these orders."""
    gradients = []
    for number, order in enumerate(orders):
        trained.begin_batch_at_once()
        pieces = batch(number)
        forwarded = [trained.forward_at_once(decoded) for decoded in pieces]
        for place in order:
            trained.backward_at_once(place + 1, forwarded[place])
        for decoded in pieces:
            assert isinstance(decoded.activation, torch.Tensor)
            assert decoded.activation.grad is not None
            gradients.append(decoded.activation.grad)
        trained.step()
    return gradients


@pytest.mark.parametrize("make", [convolutional, tied, frozen])
@pytest.mark.parametrize("seed", range(3))
def test_weights_losses_and_gradients_have_the_bits_of_one_after_another(
    make: Callable[[], nn.Sequential], seed: int
) -> None:
    rng = random.Random(seed)
    orders = [rng.sample(range(len(SIZES)), len(SIZES)) for _ in range(BATCHES)]
    alone, together = part(make), part(make)
    expected, gradients = one_after_another(alone), in_order(together, orders)
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(alone.state().values(), together.state().values(), strict=True))
    states = [list(one.optimizer_state().values()) for one in (alone, together)]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    assert alone.take_loss() == together.take_loss()


def test_the_order_of_additions_shows_in_these_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are added as they come give other bits, so the test above would notice."""

    def add_at_once(
        self: at_once.InOrder, _: int, copied: at_once.WeightSharingCopy, add_loss: at_once.AddLoss
    ) -> None:
        add_loss()
        self._accumulate(copied.take_gradients())

    monkeypatch.setattr(at_once.InOrder, "add", add_at_once)
    alone, together = part(convolutional), part(convolutional)
    one_after_another(alone)
    in_order(together, [list(reversed(range(len(SIZES))))] * BATCHES)
    assert not all(torch.equal(a, b) for a, b in zip(alone.state().values(), together.state().values(), strict=True))


def test_threads_train_the_same_bits() -> None:
    alone, together = part(tied), part(tied)
    one_after_another(alone)
    with ThreadPoolExecutor(3) as threads:
        for number in range(BATCHES):
            together.begin_batch_at_once()
            started = threading.Barrier(3)

            def compute(place: int, decoded: Decoded, started: threading.Barrier = started) -> None:
                if place < 3:  # the first three are computed at the same time
                    started.wait(PATIENCE_S)
                together.backward_at_once(place + 1, together.forward_at_once(decoded))

            for job in [threads.submit(compute, *each) for each in enumerate(batch(number))]:
                job.result(PATIENCE_S)
            together.step()
    assert all(torch.equal(a, b) for a, b in zip(alone.state().values(), together.state().values(), strict=True))


@pytest.mark.parametrize("make", [convolutional, tied])
def test_batches_may_be_computed_at_once_after_others_that_were_not(make: Callable[[], nn.Sequential]) -> None:
    """As when devices have left; `tied` keeps an activation of the batch before, which cannot be copied."""
    alone, mixed = part(make), part(make)
    for trained in (alone, mixed):
        one_after_another(trained)
        trained.take_loss()
    one_after_another(alone)
    in_order(mixed, [list(reversed(range(len(SIZES))))] * BATCHES)
    assert all(torch.equal(a, b) for a, b in zip(alone.state().values(), mixed.state().values(), strict=True))
    assert alone.take_loss() == mixed.take_loss()


def test_copies_follow_weights_that_have_got_other_memory() -> None:
    alone, together = part(convolutional), part(convolutional)
    in_order(together, [list(range(len(SIZES)))])
    for weight in together.module.parameters():
        weight.data = weight.data.clone()
    in_order(together, [list(range(len(SIZES)))] * BATCHES)
    in_order(alone, [list(range(len(SIZES)))])
    in_order(alone, [list(range(len(SIZES)))] * BATCHES)
    assert all(torch.equal(a, b) for a, b in zip(alone.state().values(), together.state().values(), strict=True))


def test_a_model_that_is_installed_is_that_of_the_copies() -> None:
    other = copy.deepcopy(part(tied).module)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.1)
    alone, together = part(tied), part(tied)
    for trained in (alone, together):
        in_order(trained, [list(range(len(SIZES)))])
        trained.install(other.state_dict(), keep_state=False)
        trained.take_loss()
    one_after_another(alone)
    in_order(together, [list(reversed(range(len(SIZES))))] * BATCHES)
    assert all(torch.equal(a, b) for a, b in zip(alone.state().values(), together.state().values(), strict=True))
    assert alone.take_loss() == together.take_loss()


def test_a_batch_that_is_not_complete_is_not_followed_by_another() -> None:
    trained = part(convolutional)
    trained.begin_batch_at_once()
    trained.backward_at_once(2, trained.forward_at_once(batch(0)[1]))
    with pytest.raises(AssertionError, match="not been added"):
        trained.begin_batch_at_once()
    trained.discard()
    trained.begin_batch_at_once()


def test_activations_that_do_not_fit_are_a_breach_of_the_protocol() -> None:
    trained = part(convolutional)
    trained.begin_batch_at_once()
    with pytest.raises(ProtocolError, match="do not take activations"):
        trained.forward_at_once(Decoded(torch.zeros(2, 3, 3, 3), torch.zeros(2, dtype=torch.int64), 2, 2.0))

"""No device that trains as it was told is refused, however different its data are: plain FedAvg by torch alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipar.aggregation.update_check import UpdateCheck
from pipar.errors import UnusableModelError

State = dict[str, Tensor]
Samples = tuple[Tensor, Tensor]


def dense(outputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, outputs))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def half_frozen() -> nn.Module:
    model = normed()
    model[0].requires_grad_(requires_grad=False)  # type: ignore[index]
    return model


class Counted(nn.Module):
    """Counts its batches in an integer of its own, and begins with a flag that its first batch clears."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("is_new", torch.tensor(data=True))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1  # type: ignore[operator]
            self.is_new = torch.tensor(data=False)
        output: Tensor = self.inner(x)
        return output


def line() -> nn.Module:
    return nn.Linear(6, 1)


def one_class(device: int, count: int, draw: torch.Generator) -> Samples:
    """Every device has samples of one class only, which are scaled in its own way."""
    return torch.randn(count, 6, generator=draw) * 3.0**device, torch.full((count,), device % 4)


def prices(device: int, count: int, draw: torch.Generator) -> Samples:
    """Targets as they are in a table of prices: in the hundreds of thousands."""
    x = torch.randn(count, 6, generator=draw)
    return x, (3e5 + 4e4 * device + 5e4 * x[:, :1])


def amounts(device: int, count: int, draw: torch.Generator) -> Samples:
    x, y = prices(device, count, draw)
    return x, 1000.0 * y


def sgd(rate: float, momentum: float = 0.0) -> Any:
    return lambda weights: torch.optim.SGD(weights, rate, momentum)


def adam(rate: float) -> Any:
    return lambda weights: torch.optim.Adam(weights, rate)


@dataclass(frozen=True)
class Training:
    sizes: tuple[int, ...] = (40, 40, 40)
    network: Callable[[], nn.Module] = dense
    data: Callable[[int, int, torch.Generator], Samples] = one_class
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] = sgd(0.1, 0.9)  # noqa: RUF009 - it has no state
    rounds: int = 6
    passes: int = 1
    drawn: int | None = None  # devices of a round, in turn

    def run(self, check: UpdateCheck) -> State:
        """Train; the check raises if it refuses a device."""
        torch.manual_seed(0)
        draw = torch.Generator().manual_seed(1)
        model = self.network()
        parts = [self.data(number, size, draw) for number, size in enumerate(self.sizes)]
        for round_ in range(self.rounds):
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
            many = self.drawn or len(parts)
            now = sorted((round_ * many + place) % len(parts) for place in range(many))
            states = {number: self._train(copy.deepcopy(model), parts[number]) for number in now}
            check.begin()
            for number, state in states.items():
                check.add(f"d{number}", state, before, trained, self.passes * self.sizes[number])
            check.check()
            check.end()
            total = sum(self.sizes[number] for number in now)
            model.load_state_dict(
                {
                    name: sum(states[n][name].double() * (self.sizes[n] / total) for n in now).to(tensor.dtype)  # type: ignore[union-attr]
                    for name, tensor in before.items()
                }
            )
        return model.state_dict()

    def _train(self, model: nn.Module, samples: Samples) -> Any:
        optimizer = self.make([weight for weight in model.parameters() if weight.requires_grad])
        model.train()
        for _ in range(self.passes):
            for x, y in zip(samples[0].split(10), samples[1].split(10), strict=True):
                optimizer.zero_grad()
                self.loss(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return model.state_dict()


ALONE, TWO, THREE, UNLIKE = (40,), (40, 40), (40, 40, 40), (10, 4000)
HONEST: dict[str, Training] = {
    "one class each": Training(),
    "alone": Training(ALONE),
    "two": Training(TWO),
    "high rate": Training(make=sgd(1.0, 0.9)),
    "two, high rate": Training(TWO, make=sgd(1.0, 0.9)),
    "many passes": Training(TWO, passes=30, make=sgd(0.5)),
    "adam": Training(UNLIKE, make=adam(0.05), passes=3),
    "few samples and many": Training(UNLIKE, make=sgd(0.5, 0.9)),
    "normalisation": Training(network=normed, make=sgd(1.0, 0.9)),
    "normalisation, few samples and many": Training(UNLIKE, normed, make=sgd(0.5, 0.9)),
    "frozen layers": Training(TWO, half_frozen, make=sgd(1.0, 0.9)),
    "integers": Training(TWO, Counted),
    "integers, alone in its round": Training(THREE, Counted, drawn=1, rounds=9),
    "drawn": Training((40, 200, 10, 80, 40), normed, drawn=1, rounds=12, make=sgd(1.0, 0.9)),
    "prices": Training(THREE, line, prices, F.mse_loss, sgd(0.05)),
    "prices, alone": Training(ALONE, line, prices, F.mse_loss, sgd(0.05)),
    "prices, drawn": Training(THREE, line, prices, F.mse_loss, sgd(0.05), drawn=1),
    "prices, few samples and many": Training(UNLIKE, line, prices, F.mse_loss, sgd(0.01)),
    "prices, many samples and few": Training((4000, 10), line, prices, F.mse_loss, sgd(0.003)),
    "prices, adam": Training((10, 20, 4000), line, prices, F.mse_loss, adam(50.0)),
    "amounts, alone": Training(ALONE, line, amounts, F.mse_loss, sgd(0.05)),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", HONEST)
def test_no_honest_device_is_refused(name: str) -> None:
    HONEST[name].run(UpdateCheck())


def test_a_device_whose_targets_are_scaled_in_another_way_is_refused() -> None:
    def mixed(device: int, count: int, draw: torch.Generator) -> Samples:
        x, y = prices(device, count, draw)
        return x, y if device else y / 1e5

    with pytest.raises(UnusableModelError, match="scaled in another way"):
        Training(TWO, line, mixed, F.mse_loss, sgd(0.05)).run(UpdateCheck())

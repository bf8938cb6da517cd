"""Federated learning with any optimiser, schedule and clipping, as a plain loop over whole networks; torch alone.

`data[k][e]` is the list of batches of device k in epoch e. A schedule is one of torch's own, and is stepped after each
batch of a device, however often the optimiser is made again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]
Data = Sequence[Sequence[Sequence[Batch]]]
State = dict[str, Tensor]
Optimizer = torch.optim.Optimizer
Scheduler = torch.optim.lr_scheduler.LRScheduler


@dataclass(frozen=True)
class Plain:
    """What is trained how."""

    make: Callable[[nn.Module], Optimizer]
    keep: bool = False  # the state of the optimiser over aggregations
    schedule: Callable[[Optimizer, int], Scheduler] | None = None  # of an optimiser, and its number of steps
    clip_norm: float | None = None
    proximal: float = 0.0
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    clip_sides: Callable[[nn.Module], Sequence[Sequence[nn.Parameter]]] | None = None  # each with a norm of its own


def train(model: nn.Module, data: Data, plain: Plain) -> State:
    """Return the global model's state after all epochs; the given model is not changed."""
    models = [copy.deepcopy(model).train() for _ in data]
    optimizers = [plain.make(own) for own in models]
    settings = [groups_at_each_step(plain, model, sum(map(len, device))) for device in data]
    for epoch in range(len(data[0])):
        for own, optimizer, device, at in zip(models, optimizers, data, settings, strict=True):
            start = [weight.detach().clone() for weight in own.parameters()]
            for batch in device[epoch]:
                set_groups(optimizer, next(at))
                step(own, optimizer, batch, plain, start)
        counts = [sum(len(labels) for _, labels in device[epoch]) for device in data]
        new = average([own.state_dict() for own in models], counts)
        for own in models:
            own.load_state_dict(new)
        if not plain.keep:
            optimizers = [plain.make(own) for own in models]
    return models[0].state_dict()


def train_in_turn(
    model: nn.Module, data: Data, plain: Plain, sides: Callable[[nn.Module], Sequence[Sequence[nn.Parameter]]]
) -> State:
    """Return the state after split learning: devices train one network in turn.

    The optimiser of a device's side starts again with each turn, and that of the server's side is kept. Both follow the
    schedule of the device.
    """
    own = copy.deepcopy(model).train()
    settings = [groups_at_each_step(plain, model, sum(map(len, device))) for device in data]
    kept = plain.make(own)
    first = {id(weight) for weight in sides(own)[0]}
    for epoch in range(len(data[0])):
        for device, at in zip(data, settings, strict=True):
            for weight in [weight for weight in kept.state if id(weight) in first]:
                del kept.state[weight]
            for batch in device[epoch]:
                set_groups(kept, next(at))
                step(own, kept, batch, plain, [])
    return own.state_dict()


def groups_at_each_step(plain: Plain, model: nn.Module, steps: int) -> Iterator[list[dict[str, object]]]:
    """Yield the settings of the optimiser's groups before each step, as torch's schedule makes them."""
    optimizer = plain.make(copy.deepcopy(model))
    schedule = None if plain.schedule is None else plain.schedule(optimizer, steps)
    for number in range(steps):
        yield [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        if schedule is not None and number < steps - 1:
            optimizer.step()  # without gradients; else torch warns about the order
            schedule.step()


def set_groups(optimizer: Optimizer, groups: Sequence[dict[str, object]]) -> None:
    for group, new in zip(optimizer.param_groups, groups, strict=True):
        group.update(new)


def step(model: nn.Module, optimizer: Optimizer, batch: Batch, plain: Plain, start: Sequence[Tensor]) -> None:
    inputs, labels = batch
    model.zero_grad()
    loss = plain.loss(model(inputs), labels)
    if plain.proximal:
        away = [(w - first).square().sum() for w, first in zip(model.parameters(), start, strict=True)]
        loss = loss + plain.proximal / 2 * torch.stack(away).sum()
    loss.backward()
    if plain.clip_norm is not None:
        sides = [list(model.parameters())] if plain.clip_sides is None else plain.clip_sides(model)
        for side in sides:
            nn.utils.clip_grad_norm_(side, plain.clip_norm)
    optimizer.step()


def average(states: Sequence[State], counts: Sequence[int]) -> State:
    shares = [count / sum(counts) for count in counts]
    return {
        name: torch.stack([state[name] * share for state, share in zip(states, shares, strict=True)]).sum(0)
        for name in states[0]
    }

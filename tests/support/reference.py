"""A second, plain implementation of each training method from its definition, with torch alone.

Nothing is split, cut into micro-batches or pipelined here: whole batches go through the whole network.
`data[k][e]` is the list of batches of device k (in name order) in epoch e.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
Batch = tuple[Inputs, Inputs]
Data = Sequence[Sequence[Sequence[Batch]]]
State = dict[str, Tensor]


@dataclass(frozen=True)
class Rules:
    """Everything that the weights depend on, in addition to network and data."""

    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    keep_state: bool = False
    loss: Callable[[Tensor, Any], Tensor] = field(default=F.cross_entropy)  # the mean over the batch
    proximal: float = 0.0  # mu of FedProx
    #: From the global model, the devices' models and their samples to the next global model; None: `average`.
    aggregate: Callable[[State, Sequence[State], Sequence[int]], State] | None = None

    #: Makes another optimiser than SGD of parameters.
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer | None:
        parameters = list(module.parameters())
        if self.make is not None and parameters:
            return self.make(parameters)
        settings = {"lr": self.learning_rate, "momentum": self.momentum, "weight_decay": self.weight_decay}
        return torch.optim.SGD(parameters, **settings) if parameters else None


def train(method: str, model: nn.Module, data: Data, split_point: int, rules: Rules) -> State:
    """Return the global model's state after all epochs; the given model is not changed."""
    start = copy.deepcopy(model).train()
    if method == "sl":
        return split_learning(start, data, split_point, rules)
    if method == "sfl2":
        return splitfed_v2(start, data, split_point, rules)
    return federated(start, data, rules)  # fl, sfl and pipar train the same weights, wherever the cut is


def federated(model: nn.Module, data: Data, rules: Rules) -> State:
    """Every device trains the whole model on its own batches; the models are averaged by samples."""
    models = [copy.deepcopy(model) for _ in data]
    optimizers = [rules.optimizer(own) for own in models]
    for epoch in range(len(data[0])):
        before = copy.deepcopy(models[0].state_dict())
        for own, optimizer, device in zip(models, optimizers, data, strict=True):
            start = weights(own)
            for batch in device[epoch]:
                step(own, [optimizer], batch, rules, start)
        new = combine(rules, before, [own.state_dict() for own in models], [samples(device[epoch]) for device in data])
        for own in models:
            own.load_state_dict(new)
        if not rules.keep_state:
            optimizers = [rules.optimizer(own) for own in models]
    return models[0].state_dict()


def split_learning(model: nn.Sequential, data: Data, split_point: int, rules: Rules) -> State:
    """One model goes from device to device; each trains an epoch. Only the server's layers keep their momentum."""
    behind_the_cut = rules.optimizer(model[split_point:])
    for epoch in range(len(data[0])):
        for device in data:
            in_front = rules.optimizer(model[:split_point])  # a new device: momentum stays on the previous one
            for batch in device[epoch]:
                step(model, [in_front, behind_the_cut], batch, rules, [])
    return model.state_dict()


def splitfed_v2(model: nn.Sequential, data: Data, split_point: int, rules: Rules) -> State:
    """One server part serves the devices in turn, iteration by iteration; the device parts are averaged by samples."""
    server = model[split_point:]
    fronts = [copy.deepcopy(model[:split_point]) for _ in data]
    of_server = rules.optimizer(server)
    of_fronts = [rules.optimizer(front) for front in fronts]
    for epoch in range(len(data[0])):
        before = copy.deepcopy(fronts[0].state_dict())
        start = weights(nn.Sequential(fronts[0], server))  # the same on every device
        for iteration in zip_longest(*(device[epoch] for device in data)):
            for front, optimizer, batch in zip(fronts, of_fronts, iteration, strict=True):
                if batch is not None:  # a device without further batches is skipped
                    step(nn.Sequential(front, server), [optimizer, of_server], batch, rules, start)
        counts = [samples(device[epoch]) for device in data]
        new = combine(rules, before, [front.state_dict() for front in fronts], counts)
        for front in fronts:
            front.load_state_dict(new)
        if not rules.keep_state:
            of_fronts = [rules.optimizer(front) for front in fronts]
    model[:split_point].load_state_dict(fronts[0].state_dict())
    return model.state_dict()


def step(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer | None],
    batch: Batch,
    rules: Rules,
    start: Sequence[Tensor],
) -> None:
    """One step of gradient descent on one whole batch; FedProx adds mu/2 |w - start|^2 to its loss."""
    inputs, labels = batch
    model.zero_grad()
    loss = rules.loss(output(model, inputs), labels)
    if rules.proximal:
        away = [(w - first).square().sum() for w, first in zip(model.parameters(), start, strict=True)]
        loss = loss + rules.proximal / 2 * torch.stack(away).sum()
    loss.backward()
    for optimizer in optimizers:
        if optimizer is not None:
            optimizer.step()


def output(model: nn.Module, inputs: Inputs) -> Tensor:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def weights(model: nn.Module) -> list[Tensor]:
    """Return a copy of the weights, in their order."""
    return [weight.detach().clone() for weight in model.parameters()]


def combine(rules: Rules, before: State, states: Sequence[State], counts: Sequence[int]) -> State:
    return average(states, counts) if rules.aggregate is None else rules.aggregate(before, states, counts)


def samples(batches: Sequence[Batch]) -> int:
    return sum(len(first(targets)) for _, targets in batches)


def first(targets: Inputs) -> Tensor:
    """Return one of the tensors that a batch's targets consist of."""
    if isinstance(targets, Tensor):
        return targets
    return next(iter(targets.values())) if isinstance(targets, dict) else targets[0]


def average(states: Sequence[State], counts: Sequence[int]) -> State:
    """Return sum_k n_k M_k / sum_k n_k; counters take the largest value."""
    mean = {}
    for name, first in states[0].items():
        if first.is_floating_point():
            wide = [state[name].double() * (count / sum(counts)) for state, count in zip(states, counts, strict=True)]
            mean[name] = torch.stack(wide).sum(0).to(first.dtype)
        else:
            mean[name] = torch.stack([state[name] for state in states]).amax(0)
    return mean

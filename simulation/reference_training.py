"""The training implemented a second time with torch alone: the model of a round by the definition of its method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipar.data.images import Images
from pipar.data.shard import Shard
from pipar.execution.schedule import cut_epoch
from pipar.nn.optimizers import OptimizerSettings
from simulation.scenario import BATCH

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Rules:
    """How a device trains in a round."""

    optimizer: OptimizerSettings
    passes: int = 1  # over its samples


def copied(state: State) -> State:
    """Return a copy of all tensors."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


@torch.no_grad()
def losses_of(model: nn.Sequential, state: State, sets: Mapping[str, Images]) -> dict[str, float]:
    """Return the loss of a model in eval mode on the samples of each device."""
    model.load_state_dict(state)
    model.eval()
    return {name: F.cross_entropy(model(kept.images), kept.labels).item() for name, kept in sets.items()}


def federated_round(
    model: nn.Sequential, before: State, shards: Mapping[str, Shard], epoch: int, rules: Rules
) -> State:
    """Return the mean, weighted by samples, of the models that these devices train from the previous one."""
    total = sum(len(shard) for shard in shards.values())
    trained = [(copied(_one_device(model, before, shard, epoch, rules)), len(shard)) for shard in shards.values()]
    return {name: _mean([(state[name], count / total) for state, count in trained]) for name in before}


def _mean(weighted: Sequence[tuple[Tensor, float]]) -> Tensor:
    """Return the sum of tensors times their weights; counters of batches take the largest value."""
    if not weighted[0][0].is_floating_point():
        return torch.stack([tensor for tensor, _ in weighted]).amax(0)
    return torch.stack([tensor * share for tensor, share in weighted]).sum(0)


def _one_device(model: nn.Sequential, before: State, shard: Shard, epoch: int, rules: Rules) -> State:
    model.load_state_dict(before)
    velocity: dict[str, Tensor] = {}
    for batch in _batches(shard, epoch, rules, batch_statistics=_has_batch_statistics(model)):
        _descend(model, velocity, batch, rules)
    return model.state_dict()


def split_learning_round(
    model: nn.Sequential,
    before: State,
    velocity: State,
    shards: Mapping[str, Shard],
    epoch: int,
    rules: Rules,
) -> tuple[State, State]:
    """Return the model that passes from device to device, and the momentum of the server's layers.

    Only the server's momentum is passed on: `velocity` holds that of the previous round, for the server's layers only.
    """
    model.load_state_dict(before)
    for shard in shards.values():
        moving = dict(velocity)  # a device's own layers start without momentum
        for batch in _batches(shard, epoch, rules, batch_statistics=_has_batch_statistics(model)):
            _descend(model, moving, batch, rules)
        velocity = {name: moving[name] for name in velocity}
    return copied(model.state_dict()), velocity


@dataclass(frozen=True)
class Contribution:
    """What one device has trained of a server-side model that all devices share."""

    shard: Shard
    samples: int  # of whole batches
    counts: bool  # its own part counts, too


def splitfed_v2_round(
    model: nn.Sequential,
    before: State,
    velocity: State,
    contributions: Mapping[str, Contribution],
    epoch: int,
    rules: Rules,
) -> tuple[State, State]:
    """Return the model of a round of SplitFed V2, and the momentum of the server's layers.

    Batch i of every device, in the order of names, comes before any batch i + 1; the devices' parts are averaged.
    """
    server = {name: tensor.clone() for name, tensor in before.items() if name in velocity}
    parts = {name: {of: before[of] for of in before if of not in velocity} for name in contributions}
    moving: dict[str, State] = {name: {} for name in contributions}
    with_statistics = _has_batch_statistics(model)
    turns = [
        (n, name, batch)
        for name, one in contributions.items()
        for n, batch in _trained_batches(one, epoch, rules, batch_statistics=with_statistics)
    ]
    for _, name, batch in sorted(turns, key=lambda turn: turn[:2]):
        model.load_state_dict({**parts[name], **server})
        momentum = {**moving[name], **velocity}
        _descend(model, momentum, batch, rules)
        state = copied(model.state_dict())
        server, parts[name] = ({of: state[of] for of in part} for part in (server, parts[name]))
        velocity, moving[name] = {of: momentum[of] for of in velocity}, momentum
    return {**_mean_of_parts(parts, contributions), **server}, velocity


def _mean_of_parts(parts: Mapping[str, State], contributions: Mapping[str, Contribution]) -> State:
    names = [name for name, one in contributions.items() if one.counts]
    total = sum(contributions[name].samples for name in names)
    share = {name: contributions[name].samples / total for name in names}
    return {of: _mean([(parts[name][of], share[name]) for name in names]) for of in parts[names[0]]}


def _trained_batches(
    one: Contribution, epoch: int, rules: Rules, *, batch_statistics: bool
) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yield the batches that a device has trained, with their numbers."""
    left = one.samples
    for number, batch in enumerate(_batches(one.shard, epoch, rules, batch_statistics=batch_statistics), start=1):
        left -= len(batch[1])
        if left < 0:
            return
        yield number, batch


def _batches(shard: Shard, epoch: int, rules: Rules, *, batch_statistics: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of a round; each pass over the samples has its own order."""
    for number in range((epoch - 1) * rules.passes + 1, epoch * rules.passes + 1):
        order, start = shard.order(number), 0
        for size in cut_epoch(len(order), BATCH, batch_statistics=batch_statistics):
            yield shard.batch(number, order[start : start + size])
            start += size


def _has_batch_statistics(model: nn.Sequential) -> bool:
    return any(isinstance(layer, nn.BatchNorm1d) for layer in model.modules())


def _descend(model: nn.Sequential, velocity: dict[str, Tensor], batch: tuple[Tensor, Tensor], rules: Rules) -> None:
    """Take one step on a batch: v = mu v + g and w = w - lr v; a weight without a velocity has v = 0."""
    inputs, labels = batch
    rate, momentum = rules.optimizer.learning_rate, rules.optimizer.arguments["momentum"]
    assert rate is not None
    weights = dict(model.named_parameters())
    gradients = torch.autograd.grad(F.cross_entropy(model(inputs), labels), list(weights.values()))
    if rules.optimizer.clip_norm is not None:
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        share = (rules.optimizer.clip_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        gradients = tuple(gradient * share for gradient in gradients)
    with torch.no_grad():
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
            velocity[name] = momentum * velocity[name] + gradient if name in velocity else gradient
            weight.sub_(rate * velocity[name])

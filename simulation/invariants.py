"""What must be true in every simulated world, whatever breaks: one function each, which raises a Violation if not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipar.data.shard import Shard
from pipar.errors import CheckpointError, PiparError, ProtocolError, TrainingError
from pipar.nn.parts import Optimizer
from pipar.nn.snapshot import Snapshot
from pipar.storage.checkpoint import latest, read
from simulation.plan import BATCH

State = Mapping[str, torch.Tensor]
#: Rounding in float64, relative to the largest weight, and nothing else.
EXACT = 1e-12


class Violation(Exception):  # noqa: N818 - it is what was looked for
    """Something that must never be was seen."""

    def __init__(self, invariant: str, sentence: str) -> None:
        super().__init__(f"{invariant}: {sentence}")
        self.invariant = invariant
        self.sentence = sentence


def training_ends(now_s: float, limit_s: float, doing: str) -> None:
    """Whatever happens to links and machines that come back, the training comes to its end."""
    if now_s > limit_s:
        raise Violation("training ends", f"after {limit_s:g} s of virtual time, {doing}.")


def programs_do_not_fail(
    who: str, error: BaseException, *, expected: type[BaseException] | tuple[Any, ...] = ()
) -> None:
    """A server survives whatever its devices and links do; a device ends by no error but those that say why."""
    if not isinstance(error, expected):
        raise Violation("programs do not fail", f"{who} ended by {type(error).__name__}: {error}")


def breaches_have_a_cause(who: str, error: BaseException, *, excused: bool) -> None:
    """Lost links and crashes alone let nobody break the protocol: a peer that did got or sent something damaged."""
    if isinstance(error, ProtocolError | TrainingError) and not excused:
        raise Violation("breaches have a cause", f"{who} ended by {type(error).__name__}: {error}")


def samples_count_once(device: str, *, own: int, said: int, stepped: int | None, begun: int) -> None:
    """A device counts in a round with each of its samples once, and its replica was trained on these and no others."""
    if said != own:
        raise Violation("samples count once", f"{device} counts with {said} samples, but it has {own}.")
    if stepped is not None and stepped != own:
        raise Violation(
            "samples count once", f"the replica of {device} was trained on {stepped} samples, but it has {own}."
        )
    if begun:
        raise Violation("samples count once", f"{device} counts with {begun} samples of a batch that has no step.")


def counted_once_each(devices: Sequence[str]) -> None:
    """Nobody counts twice in an aggregation."""
    if len(set(devices)) != len(devices):
        raise Violation("samples count once", f"of {', '.join(devices)}, one counts twice.")


def aggregate_is_the_mean(epoch: int, after: State, expected: State) -> None:
    """A round's model is what plain training of those who counted comes to, by the definition of the method."""
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    error = max(float((after[name] - tensor).abs().max()) for name, tensor in expected.items()) / largest
    if not error <= EXACT:
        raise Violation("aggregate is the mean", f"the model of round {epoch} is {error:.1e} from that of its devices.")


def log_is_true(folder: Path, counted: Mapping[int, Mapping[str, int]], saved: int) -> None:
    """rounds.jsonl tells of each round once, in order, of none that is not saved, and who counted in it."""
    try:
        lines = (folder / "rounds.jsonl").read_text("utf-8").splitlines()
    except FileNotFoundError:
        return
    told = [json.loads(line) for line in lines]
    if [row["epoch"] for row in told] != list(range(1, len(told) + 1)):
        raise Violation("log is true", f"rounds.jsonl tells of the rounds {[row['epoch'] for row in told]}.")
    if len(told) > saved:
        raise Violation("log is true", f"rounds.jsonl tells of round {len(told)}, but only {saved} are saved.")
    wrong = next((row for row in told if row["counted"] != dict(counted[row["epoch"]])), None)
    if wrong is not None:
        raise Violation("log is true", f"rounds.jsonl says of round {wrong['epoch']}: {wrong['counted']}.")


def weights_are_finite(epoch: int, state: State) -> None:
    """No model has a weight that is infinite or no number."""
    bad = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    if bad:
        raise Violation("weights are finite", f"{bad[0]} of round {epoch} is not.")


@dataclass(frozen=True)
class OnDisk:
    """What the checkpoints of a folder may be."""

    identity: Mapping[str, Any]
    models: Mapping[int, State]  # the model of each round
    counted: Mapping[int, Mapping[str, int]]
    least: int  # the round of the last checkpoint that was reported as saved
    most: int  # the last round that is over
    failed: int  # saves, since the last that was reported


def checkpoint_is_whole(folder: Path, may_be: OnDisk) -> None:
    """The newest checkpoint is that of the last round or the one before, whole, and so are all others."""
    name = "checkpoint is whole"
    for path in sorted(folder.glob("round-*.pipar")):
        try:
            read(path)
        except CheckpointError as error:
            raise Violation(name, str(error)) from None
    try:
        found = latest(folder, may_be.identity, lambda _: None)
    except PiparError as error:
        raise Violation(name, str(error)) from None
    number = 0 if found is None else found.round
    if not max(may_be.least, may_be.most - 1 - may_be.failed) <= number <= may_be.most:
        raise Violation(
            name, f"round {may_be.most} is over and {may_be.least} was saved, but the newest checkpoint is of {number}."
        )
    if found is None:
        return
    model = Snapshot.read(found.tensors).model
    if not all(torch.equal(tensor, model[name]) for name, tensor in may_be.models[number].items()):
        raise Violation(name, f"the checkpoint of round {number} has another model than the round ended with.")
    if [dict(of) for of in found.round_log] != [dict(may_be.counted[n]) for n in range(1, number + 1)]:
        raise Violation(name, f"the checkpoint of round {number} tells of other rounds than were trained.")


@dataclass(frozen=True)
class Held:
    """What is held for one device, or by all of them together, looked at now and then."""

    who: str
    link_bytes: int = 0  # of messages that are not acknowledged or half received
    inbox_bytes: int = 0  # of messages that nobody has read
    replica_bytes: int = 0
    places: int = 0  # in the training
    tasks: int = 0


def memory_is_bounded(held: Held, most: Held) -> None:
    """No more is held for a device than its plan needs, and nothing of one that is gone."""
    for what in ("link_bytes", "inbox_bytes", "replica_bytes", "places", "tasks"):
        number, bound = getattr(held, what), getattr(most, what)
        if number > bound:
            raise Violation(
                "memory is bounded", f"{number} {what.replace('_', ' ')} are held for {held.who}, at most {bound}."
            )


# --- the training written down once more, with torch alone


def plain_round(
    model: nn.Sequential, before: State, shards: Mapping[str, Shard], epoch: int, rules: Optimizer
) -> State:
    """Return the mean, weighted by samples, of what each of these devices trains the model of before to."""
    total = sum(len(shard) for shard in shards.values())
    mean = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    for shard in shards.values():
        for name, tensor in plain_epoch(model, before, shard, epoch, rules).items():
            mean[name] += tensor * (len(shard) / total)
    return mean


def plain_epoch(model: nn.Sequential, before: State, shard: Shard, epoch: int, rules: Optimizer) -> State:
    """Return what one device trains the model of before to."""
    model.load_state_dict(before)
    velocity: dict[str, Tensor] = {}
    for batch in _batches(shard, epoch):
        _descend(model, velocity, batch, rules)
    return model.state_dict()


def plain_relay(
    model: nn.Sequential, before: State, velocity: State, shards: Mapping[str, Shard], epoch: int, rules: Optimizer
) -> tuple[State, State]:
    """Return the model that goes from device to device in split learning, and the momentum behind the cut.

    That is all the momentum that is handed on; `velocity` is that of before, and its names are those of the server.
    """
    model.load_state_dict(before)
    for shard in shards.values():
        moving = dict(velocity)  # in front of the cut it starts anew
        for batch in _batches(shard, epoch):
            _descend(model, moving, batch, rules)
        velocity = {name: moving[name] for name in velocity}
    return _copied(model.state_dict()), velocity


@dataclass(frozen=True)
class Taught:
    """How much one device has taught a server-side model that all share."""

    shard: Shard
    samples: int  # of whole batches
    counts: bool  # with its own part, too


def plain_turns(
    model: nn.Sequential, before: State, velocity: State, taught: Mapping[str, Taught], epoch: int, rules: Optimizer
) -> tuple[State, State]:
    """Return the model of a round of SplitFed V2, and the momentum behind the cut.

    Batch i of every device, in name order, comes before any batch i + 1; the parts in front of the cut are averaged.
    """
    server = {name: tensor.clone() for name, tensor in before.items() if name in velocity}
    fronts = {name: {of: before[of] for of in before if of not in velocity} for name in taught}
    moving: dict[str, State] = {name: {} for name in taught}
    turns = [(n, name, batch) for name, one in taught.items() for n, batch in _first(one, epoch)]
    for _, name, batch in sorted(turns, key=lambda turn: turn[:2]):
        model.load_state_dict({**fronts[name], **server})
        momentum = {**moving[name], **velocity}
        _descend(model, momentum, batch, rules)
        state = _copied(model.state_dict())
        server, fronts[name] = ({of: state[of] for of in part} for part in (server, fronts[name]))
        velocity, moving[name] = {of: momentum[of] for of in velocity}, momentum
    counted = {name: one.samples / sum(t.samples for t in taught.values() if t.counts) for name, one in taught.items()}
    names = [name for name, one in taught.items() if one.counts]
    mean = {of: torch.stack([fronts[name][of] * counted[name] for name in names]).sum(0) for of in fronts[names[0]]}
    return {**mean, **server}, velocity


def _first(one: Taught, epoch: int) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yield the batches that a device has taught, with their numbers."""
    left = one.samples
    for number, batch in enumerate(_batches(one.shard, epoch), start=1):
        left -= len(batch[1])
        if left < 0:
            return
        yield number, batch


def _batches(shard: Shard, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    order = shard.order(epoch)
    for start in range(0, len(order), BATCH):
        yield shard.batch(epoch, order[start : start + BATCH])


def _descend(model: nn.Sequential, velocity: dict[str, Tensor], batch: tuple[Tensor, Tensor], rules: Optimizer) -> None:
    """Step by one batch: v = mu v + g and w = w - lr v; a weight without a velocity has v = 0."""
    inputs, labels = batch
    weights = dict(model.named_parameters())
    gradients = torch.autograd.grad(F.cross_entropy(model(inputs), labels), list(weights.values()))
    with torch.no_grad():
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
            velocity[name] = rules.momentum * velocity[name] + gradient if name in velocity else gradient
            weight.sub_(rules.learning_rate * velocity[name])


def _copied(state: State) -> State:
    return {name: tensor.detach().clone() for name, tensor in state.items()}

"""What must be true in every simulated world, under all faults: one function each, which raises Violation if not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipar.errors import CheckpointError, PiparError, ProtocolError, TrainingError
from pipar.nn.snapshot import Snapshot
from pipar.storage.checkpoint import latest, read
from simulation.reference_training import State

#: Rounding in float64, relative to the largest weight, and nothing else.
EXACT = 1e-12


class Violation(Exception):  # noqa: N818 - it is not an error of the simulation
    """An invariant does not hold."""

    def __init__(self, invariant: str, sentence: str) -> None:
        super().__init__(f"{invariant}: {sentence}")
        self.invariant = invariant
        self.sentence = sentence


def training_ends(now_s: float, limit_s: float, doing: str) -> None:
    """Every link and machine recovers, so the training ends."""
    if now_s > limit_s:
        raise Violation("training ends", f"after {limit_s:g} s of virtual time, {doing}.")


def programs_do_not_fail(
    program: str, error: BaseException, *, expected: type[BaseException] | tuple[Any, ...] = ()
) -> None:
    """The server survives all faults of devices and links; a device ends only with errors that state the reason."""
    if not isinstance(error, expected):
        raise Violation("programs do not fail", f"{program} ended with {type(error).__name__}: {error}")


def breaches_have_a_cause(program: str, error: BaseException, *, excused: bool) -> None:
    """Lost links and crashes alone break no protocol: a breach follows from a damaged or duplicated message."""
    if isinstance(error, ProtocolError | TrainingError) and not excused:
        raise Violation("breaches have a cause", f"{program} ended with {type(error).__name__}: {error}")


def samples_count_once(device: str, *, own: int, said: int, stepped: int | None, begun: int) -> None:
    """A device counts in a round with each of its samples once, and its replica was trained on exactly these."""
    if said != own:
        raise Violation("samples count once", f"{device} counts with {said} samples, but it has {own}.")
    if stepped is not None and stepped != own:
        raise Violation(
            "samples count once", f"the replica of {device} was trained on {stepped} samples, but it has {own}."
        )
    if begun:
        raise Violation(
            "samples count once", f"{device} counts with {begun} samples of a batch that was not followed by a step."
        )


def counted_once_each(devices: Sequence[str]) -> None:
    """No device counts twice in an aggregation."""
    if len(set(devices)) != len(devices):
        raise Violation("samples count once", f"of {', '.join(devices)}, one counts twice.")


def aggregate_is_the_mean(epoch: int, after: State, expected: State) -> None:
    """The model of a round is what plain training on the counted devices gives, by the definition of the method."""
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    error = max(float((after[name] - tensor).abs().max()) for name, tensor in expected.items()) / largest
    if not error <= EXACT:
        raise Violation(
            "aggregate is the mean", f"the model of round {epoch} differs by {error:.1e} from plain training."
        )


def log_is_true(folder: Path, counted: Mapping[int, Mapping[str, int]], saved: int) -> None:
    """rounds.jsonl has each saved round once, in order, with the devices that counted, and no other round."""
    try:
        lines = (folder / "rounds.jsonl").read_text("utf-8").splitlines()
    except FileNotFoundError:
        return
    rows = [json.loads(line) for line in lines]
    if [row["epoch"] for row in rows] != list(range(1, len(rows) + 1)):
        raise Violation("log is true", f"rounds.jsonl has the rounds {[row['epoch'] for row in rows]}.")
    if len(rows) > saved:
        raise Violation("log is true", f"rounds.jsonl has round {len(rows)}, but only {saved} are saved.")
    wrong = next((row for row in rows if row["counted"] != dict(counted[row["epoch"]])), None)
    if wrong is not None:
        raise Violation("log is true", f"rounds.jsonl says of round {wrong['epoch']}: {wrong['counted']}.")


def weights_are_finite(epoch: int, state: State) -> None:
    """No model has a weight that is infinite or NaN."""
    bad = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    if bad:
        raise Violation("weights are finite", f"{bad[0]} of round {epoch} is not finite.")


@dataclass(frozen=True)
class OnDisk:
    """What the checkpoints of a folder may contain."""

    identity: Mapping[str, Any]
    models: Mapping[int, State]  # the model of each round
    counted: Mapping[int, Mapping[str, int]]
    least: int  # the round of the last checkpoint that was reported as saved
    most: int  # the last round that is over
    failed: int  # saves since the last one that was reported


def checkpoint_is_whole(folder: Path, may_be: OnDisk) -> None:
    """All checkpoints are whole, and the newest one is of the last round or the one before."""
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
        raise Violation(name, f"the checkpoint of round {number} does not have the model that the round ended with.")
    if [dict(of) for of in found.round_log] != [dict(may_be.counted[n]) for n in range(1, number + 1)]:
        raise Violation(name, f"the checkpoint of round {number} has other rounds than those that were trained.")


@dataclass(frozen=True)
class MemoryUse:
    """What is held for one device, or for all of them together."""

    holder: str
    link_bytes: int = 0  # of messages that are not acknowledged, or partly received
    inbox_bytes: int = 0  # of unread messages
    replica_bytes: int = 0
    places: int = 0  # in the training
    tasks: int = 0


def memory_is_bounded(used: MemoryUse, most: MemoryUse) -> None:
    """No more is held for a device than its plan needs, and nothing for one that is gone."""
    for what in ("link_bytes", "inbox_bytes", "replica_bytes", "places", "tasks"):
        number, bound = getattr(used, what), getattr(most, what)
        if number > bound:
            raise Violation(
                "memory is bounded",
                f"{number} {what.replace('_', ' ')} are held for {used.holder}; the limit is {bound}.",
            )

"""What must be true in every simulated world, under all faults: one function each, which raises Violation if not."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from pipar.errors import BudgetSpentError, CheckpointError, LinkError, PiparError, ProtocolError, TrainingError
from pipar.execution.spans import Span
from pipar.nn.snapshot import Snapshot
from pipar.storage.checkpoint import latest, read
from simulation.disk import round_of
from simulation.reference_training import State

#: Rounding in float64, relative to the largest weight, and nothing else.
EXACT = 1e-12
#: How many times as far as by rounding the first weights a model may be from plain training, and how far at most.
_EVERY_STEP, _LARGEST_ROUNDING = 20.0, 1e-9


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
    """Lost links and crashes break no protocol: a breach follows from a damaged, duplicated or hostile message."""
    is_breach = isinstance(error, ProtocolError | TrainingError) and not isinstance(error, BudgetSpentError)
    if is_breach and not excused:
        raise Violation("breaches have a cause", f"{program} ended with {type(error).__name__}: {error}")


def admitted_devices_keep_trying(device: str, error: BaseException, *, admitted: bool) -> None:
    """Whatever answers at the server's address, a device that was admitted once does not give up."""
    if admitted and isinstance(error, LinkError):
        raise Violation(
            "admitted devices keep trying", f"{device} was admitted and ended with {type(error).__name__}: {error}"
        )


def only_members_count(epoch: int, counted: Sequence[str], members: Sequence[str]) -> None:
    """A device that never trained is part of no model, whatever it sent."""
    strangers = [name for name in counted if name not in members]
    if strangers:
        raise Violation("only members count", f"round {epoch} counts {strangers[0]}, which only attacks.")


def samples_count_once(device: str, *, own: int, said: int, stepped: int | None, begun: int, passes: int) -> None:
    """A device counts in a round with each of its samples once; its replica was trained on these in each pass."""
    if said != own:
        raise Violation("samples count once", f"{device} counts with {said} samples, but it has {own}.")
    if stepped is not None and stepped != passes * own:
        raise Violation(
            "samples count once",
            f"the replica of {device} was trained on {stepped} samples, but it has {own} and makes {passes} passes.",
        )
    if begun:
        raise Violation(
            "samples count once", f"{device} counts with {begun} samples of a batch that was not followed by a step."
        )


def enough_are_drawn(share: int | float, drawn: Collection[str], present: Collection[str]) -> None:
    """As many devices are drawn as configured, each once, and only devices that are present."""
    wanted = share if isinstance(share, int) else int(share * len(present) + 0.5)
    expected = max(1, min(wanted, len(present)))
    if len(drawn) != expected or not set(drawn) <= set(present):
        raise Violation(
            "draws are fair", f"{len(drawn)} devices of {len(present)} were drawn; {share} asks for {expected}."
        )


def seldom_drawn_come_first(epoch: int, drawn: Collection[str], counts: Mapping[str, int]) -> None:
    """No device is drawn while another one that is present, and was drawn less often, is not."""
    often = max((counts[name] for name in drawn if name in counts), default=0)
    for name in sorted(counts.keys() - set(drawn)):
        if counts[name] < often:
            raise Violation(
                "draws are fair",
                f"{name} was drawn {counts[name]} times, another device {often} times and again for round {epoch}.",
            )


def draws_are_remembered(device: str, drawn: int, remembered: int) -> None:
    """A server that resumes knows of every round that a device was drawn for."""
    if remembered < drawn:
        raise Violation(
            "draws are fair", f"{device} was drawn for {drawn} rounds; a server that resumes knows of {remembered}."
        )


def only_drawn_devices_count(epoch: int, trained: Collection[str], drawn: Collection[str]) -> None:
    """Only devices that were drawn for a round are in its model."""
    others = sorted(set(trained) - set(drawn))
    if others:
        raise Violation("draws are fair", f"round {epoch} has the work of {others[0]}, which was not drawn for it.")


def counted_once_each(devices: Sequence[str]) -> None:
    """No device counts twice in an aggregation."""
    if len(set(devices)) != len(devices):
        raise Violation("samples count once", f"of {', '.join(devices)}, one counts twice.")


def aggregate_is_the_mean(epoch: int, after: State, expected: State, allowed: float = EXACT) -> None:
    """The model of a round is what plain training on the counted devices gives, by the definition of the method."""
    error = largest_error(after, expected)
    if not error <= allowed:
        raise Violation(
            "aggregate is the mean", f"the model of round {epoch} differs by {error:.1e} from plain training."
        )


def largest_error(after: State, expected: State) -> float:
    """Return the largest difference of a weight, relative to the largest weight."""
    largest = max(float(tensor.abs().max()) for tensor in expected.values() if tensor.is_floating_point())
    return max(float((after[name] - tensor).abs().max()) for name, tensor in expected.items()) / largest


def allowed_error(grown: Sequence[float]) -> float:
    """Return how far a model may be from plain training if rounding errors in its first weights grow to these.

    The programs round at every step, and not only at the first. No wrong term is as small as the largest error allowed.
    """
    return min(max(EXACT, _EVERY_STEP * max(grown)), _LARGEST_ROUNDING)


def log_is_true(folder: Path, counted: Mapping[int, Mapping[str, int]], saved: int) -> None:
    """rounds.jsonl has each saved round once, in order, with the devices that counted, and no other round."""
    try:
        lines = (folder / "rounds.jsonl").read_text("utf-8").splitlines()
    except FileNotFoundError:
        return
    try:
        rows = [json.loads(line) for line in lines]
    except ValueError:
        raise Violation("log is true", "rounds.jsonl has a row that is not JSON.") from None
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
    failed: int  # saves since the last one that was reported, or that take longer than a round
    overwritten: frozenset[int] = frozenset()  # rounds of files that a misdirected write has damaged


def checkpoint_is_whole(folder: Path, may_be: OnDisk) -> None:
    """All checkpoints that no fault damaged are whole, and the newest one is of the last round or the one before."""
    name = "checkpoint is whole"
    paths = {round_of(path): path for path in sorted(folder.glob("round-*.pipar"))}
    for path in (path for number, path in paths.items() if number not in may_be.overwritten):
        try:
            read(path)
        except CheckpointError as error:
            raise Violation(name, str(error)) from None
    try:
        found = latest(folder, may_be.identity, lambda _: None)
    except PiparError as error:
        raise Violation(name, str(error)) from None
    number = 0 if found is None else found.round
    least = max(may_be.least, may_be.most - 1 - may_be.failed)
    if may_be.overwritten & paths.keys():  # the newest one that is left
        least = max((saved for saved in paths if saved <= may_be.least and saved not in may_be.overwritten), default=0)
    if not least <= number <= may_be.most:
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


def unread_files_are_kept(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> None:
    """A server that cannot read its newest checkpoint changes no checkpoint, and does not start."""
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        raise Violation("unread files are kept", f"{changed[0]} was changed by a server that could not read it.")


def saved_rounds_stay(resumed: int, saved: int) -> None:
    """No round that was saved is trained again, unless the disk has damaged its checkpoint."""
    if resumed < saved:
        raise Violation("saved rounds stay", f"a server resumes after round {resumed}, but round {saved} was saved.")


def one_server_at_a_time(servers: int) -> None:
    """No two servers use the folder of a run at the same time."""
    if servers > 1:
        raise Violation("one server at a time", f"{servers} servers use the folder of the run.")


def end_is_saved(epoch: int, saved: int) -> None:
    """Devices are told that the training is over only after its last round is saved."""
    if saved < epoch:
        raise Violation("end is saved", f"devices were told that round {epoch} was the last; only {saved} are saved.")


def result_is_complete(folder: Path, counted: Mapping[int, Mapping[str, int]], model: State) -> None:
    """At the end, the result has every round, the model is that of the last one, and the trace can be read."""
    name = "result is complete"
    try:
        rounds = json.loads((folder / "result.json").read_text("utf-8"))["rounds"]
        written = safetensors.torch.load_file(folder / "model.safetensors")
        json.loads((folder / "trace.json").read_text("utf-8"))["traceEvents"]
    except (OSError, ValueError, LookupError) as error:
        raise Violation(name, f"a file cannot be read: {type(error).__name__}: {error}.") from None
    if [row["counted"] for row in rounds] != [dict(counted[epoch]) for epoch in sorted(counted)]:
        raise Violation(name, f"result.json has {len(rounds)} rounds; {len(counted)} were trained.")
    if not all(torch.equal(tensor, written[key]) for key, tensor in model.items()):
        raise Violation(name, "model.safetensors is not the model of the last round.")


#: Half the difference between the delays of HELLO and WELCOME, which faults make up to this long.
_CLOCK_ERROR_S = 40.0


def trace_is_true(spans: Sequence[Span], began_s: float, now_s: float) -> None:
    """Spans of all machines are on the server's clock: within the time of the server's process."""
    for span in spans:
        if span.start < began_s - _CLOCK_ERROR_S or span.end > now_s + _CLOCK_ERROR_S:
            raise Violation(
                "trace is true",
                f"a span of {span.owner} is at {span.start:g} s; the server runs from {began_s:g} to {now_s:g} s.",
            )


def evaluation_is_of_the_model(epoch: int, shown: Mapping[str, Any], losses: Mapping[str, float], samples: int) -> None:
    """Each device has values of the round's model on all its evaluation samples, or a reason why it has none."""
    if unknown := sorted({*shown["devices"], *shown["missing"]} - losses.keys()):
        raise Violation("evaluation is of the model", f"round {epoch} has values of {unknown}.")
    for device, values in shown["devices"].items():
        error = abs(values["loss"] - losses[device])
        if values["samples"] != samples or device in shown["missing"] or not error <= EXACT * max(1.0, losses[device]):
            raise Violation(
                "evaluation is of the model",
                f"in round {epoch}, {device} has {dict(values)}; the loss of that model on its {samples} samples is "
                f"{losses[device]}.",
            )


@dataclass(frozen=True)
class Ledger:
    """The updates that one device has sent, as counted by different parties."""

    device: str
    sent: int  # as seen on its link
    allowed: int
    on_file: int  # in the device's own file


def budget_is_kept(ledger: Ledger) -> None:
    """No update is sent before the device's file has it, and none beyond the budget, over all restarts."""
    if ledger.on_file < ledger.sent:
        raise Violation(
            "budgets are kept", f"{ledger.device} has sent {ledger.sent} updates, but its file has {ledger.on_file}."
        )
    if ledger.sent > ledger.allowed:
        raise Violation(
            "budgets are kept", f"{ledger.device} has sent {ledger.sent} updates; its budget allows {ledger.allowed}."
        )


def budget_stops_in_time(ledger: Ledger) -> None:
    """A device stops because of its budget only if it has used all of it."""
    if ledger.on_file < ledger.allowed:
        raise Violation(
            "budgets are kept",
            f"{ledger.device} stopped after {ledger.on_file} updates; its budget allows {ledger.allowed}.",
        )


def server_count_is_between(device: str, counted: int, known: int, on_file: int) -> None:
    """A server knows of each update that counts, also after a restart, and of none that was not sent."""
    if not counted <= known <= on_file:
        raise Violation(
            "budgets are kept",
            f"the server knows of {known} updates of {device}; {counted} count, and the device has sent {on_file}.",
        )


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

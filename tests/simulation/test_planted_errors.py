"""Each invariant finds the error that it is there for: errors are planted in the production code one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipar.aggregation.update_check import UpdateCheck
from pipar.errors import CheckpointError, LinkError, ProtocolError
from pipar.events import Away
from pipar.methods import Plan
from pipar.nn import learner
from pipar.nn.learner import TorchLearner
from pipar.server.membership import Membership
from pipar.server.participants import Participants
from pipar.server.replicas import SharedReplica
from pipar.server.serving import Serving
from pipar.server.session import Session
from pipar.storage.checkpoint import Checkpoint, Checkpoints, _content
from pipar.storage.run_folder import RunFolder
from pipar.transport.channel import Channel
from pipar.transport.outbox import Outbox
from pipar.wire.frames import Assembler, Frame, _Begun
from pipar.wire.messages import Kind, Message
from pipar.wire.orders import TrainedPart
from simulation.disk import UnreliableDisk
from simulation.scenario import Fault, Scenario, draw_scenario
from simulation.world import simulate

ENOUGH = 40  # worlds in which an error has to show


def found(change: Callable[[Scenario], Scenario] = lambda scenario: scenario, *, first: int = 0) -> str | None:
    """Return the invariant that is violated first in a few dozen worlds; one of the `first` ones saves time."""
    for seed in range(first, first + ENOUGH):
        outcome = simulate(change(draw_scenario(seed)))
        if outcome.violation is not None:
            return outcome.violation.invariant
    return None


def nothing(*_: Any, **__: Any) -> None:
    pass


def one_is_late(scenario: Scenario) -> Scenario:
    """Return a world in which rounds end without one of the devices, which stays."""
    late = [Fault(0.5 + n, "delay", scenario.names[0], 2.5, n) for n in range(12)]
    plans = {name: Plan(1, 2) for name in scenario.names}
    return replace(scenario, method="pipar", plans=plans, faults=tuple(late), round_deadline_s=1.5, keep_state=False)


def one_is_poisoned(scenario: Scenario) -> Scenario:
    poison = Fault(0.0, "poison", scenario.names[0], 0.0, 0)
    return replace(scenario, method="fl", plans=dict.fromkeys(scenario.names, Plan(3, 1)), faults=(poison,))


def with_known_mean(scenario: Scenario) -> Scenario:
    return scenario if scenario.is_exact else replace(scenario, faults=(), rounds=1)


@pytest.mark.slow
def test_replicas_that_keep_the_progress_of_a_dropped_device_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchLearner, "discard_progress", nothing)
    assert found(with_known_mean, first=10) in ("samples count once", "aggregate is the mean")
    assert found(one_is_late) == "samples count once"


def with_shared_model(scenario: Scenario, method: str) -> Scenario:
    """Return a world in which devices share the server-side model, and links are cut repeatedly."""
    cuts = [Fault(1.5 + n, "cut", name, 30.0, n) for n, name in enumerate(scenario.names)]
    plans = dict.fromkeys(scenario.names, Plan(2, 1))
    faults = tuple(sorted((*scenario.faults, *cuts)))
    return replace(
        scenario, method=method, plans=plans, faults=faults, keep_state=False, resume_window_s=2.0, clip_norm=None
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sl", "sfl2"])
def test_a_shared_model_that_keeps_progress_of_lost_devices_is_found(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_turns(scenario: Scenario) -> Scenario:
        return with_shared_model(scenario, method)

    assert [seed for seed in range(3) if simulate(in_turns(draw_scenario(seed))).violation is not None] == []
    if method == "sl":
        monkeypatch.setattr(TorchLearner, "rewind_shared_model", nothing)
    else:
        monkeypatch.setattr(SharedReplica, "partly_trained", lambda *_: {})
    assert found(in_turns) == "aggregate is the mean"


@pytest.mark.slow
def test_rounds_that_are_logged_before_they_are_saved_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(*arguments: Any, has_checkpoints: bool, **options: Any) -> RunFolder:  # noqa: ARG001
        return RunFolder(*arguments, **options)

    monkeypatch.setattr("simulation.server.RunFolder", at_once)
    assert found() == "log is true"


@pytest.mark.slow
def test_late_models_that_count_in_the_next_round_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def abandon(self: Session, epoch: int) -> None:
        self.round.outstanding = 0
        self.channel.post(Message(Kind.ABANDON, epoch))

    def expect(message: Message, kind: Kind, epoch: int) -> None:  # noqa: ARG001
        if message.kind is not kind:
            raise ProtocolError(f"{message} is not {kind}.")

    monkeypatch.setattr(Session, "abandon", abandon)
    monkeypatch.setattr("pipar.server.serving.expect", expect)
    monkeypatch.setattr("pipar.server.device_messages.expect", expect)

    def slow_federated(scenario: Scenario) -> Scenario:
        return replace(one_is_late(scenario), method="fl", plans=dict.fromkeys(scenario.names, Plan(3, 1)))

    assert found(slow_federated) in ("aggregate is the mean", "breaches have a cause")  # it may also break the protocol


@pytest.mark.slow
def test_an_average_that_ignores_the_number_of_samples_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    weighted = TorchLearner.aggregate

    def equally(self: TorchLearner, returned: Sequence[TrainedPart], **options: Any) -> None:
        weighted(self, [replace(back, samples=1) for back in returned], **options)

    monkeypatch.setattr(TorchLearner, "aggregate", equally)
    assert found(with_known_mean) == "aggregate is the mean"


@pytest.mark.slow
def test_messages_that_are_received_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    once = Channel._take

    def take(self: Channel, frame: Frame) -> Message | None:
        received, again = self.received, 0 < frame.sequence <= self.received
        if again:
            self.received = frame.sequence - 1
        try:
            return once(self, frame)
        finally:
            if again:
                self.received = received

    def doubled(scenario: Scenario) -> Scenario:
        twice = [Fault(1.0 + n, "duplicate", name, 0.0, n) for n, name in enumerate(scenario.names)]
        return replace(scenario, faults=tuple(twice), chunk_bytes=1_000_000)

    monkeypatch.setattr(Channel, "_take", take)
    assert found(doubled) == "breaches have a cause"


@pytest.mark.slow
def test_messages_that_are_not_sent_again_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attach = Channel.attach

    def forgetful(self: Channel, transport: Any, acknowledged: int, greeting: Message | None = None) -> None:
        attach(self, transport, acknowledged, greeting)
        self._outbox._numbered.clear()

    monkeypatch.setattr(Channel, "attach", forgetful)
    assert found(first=22) in ("breaches have a cause", "training ends")


@pytest.mark.slow
def test_checkpoints_that_are_written_in_place_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def save(self: Checkpoints, checkpoint: Checkpoint) -> Path:
        path = self.folder / f"round-{checkpoint.round:06d}.pipar"
        self._disk.make_folder(self.folder)
        content = _content(checkpoint)
        try:
            self._write(path, [memoryview(content), *checkpoint.tensors.buffers], len(content))
        except OSError as error:
            raise CheckpointError(str(error)) from None
        return path

    monkeypatch.setattr(Checkpoints, "save", save)
    assert found() == "checkpoint is whole"


@pytest.mark.slow
def test_checkpoints_that_are_renamed_before_they_reach_the_disk_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UnreliableDisk, "sync", nothing)
    assert found() == "checkpoint is whole"


@pytest.mark.slow
def test_checkpoints_of_a_model_that_is_still_being_trained_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = TorchLearner.snapshot

    def trained_on(self: TorchLearner) -> Any:
        body = snapshot(self)
        with torch.no_grad():
            next(self.model.parameters()).add_(1.0)
        return body

    monkeypatch.setattr(TorchLearner, "snapshot", trained_on)
    assert found(with_known_mean) in ("aggregate is the mean", "checkpoint is whole")


@pytest.mark.slow
def test_acknowledged_messages_that_are_kept_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outbox, "acknowledge", nothing)
    monkeypatch.setattr(Session, "owes_acknowledgements", False)
    assert found() == "memory is bounded"


@pytest.mark.slow
def test_partly_received_messages_that_are_kept_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Assembler.feed

    def kept(self: Assembler, frame: Frame) -> Message | None:
        message = feed(self, frame)
        if message is not None and frame.chunks > 1:
            self._begun[-frame.sequence] = _Begun(message, parts=list(message.body.buffers))
        return message

    def reset(self: Assembler) -> None:
        self._begun = {sequence: begun for sequence, begun in self._begun.items() if sequence < 0}

    monkeypatch.setattr(Assembler, "feed", kept)
    monkeypatch.setattr(Assembler, "reset", reset)
    monkeypatch.setattr(Assembler, "_check_room", nothing)
    assert found(lambda scenario: replace(scenario, chunk_bytes=2_500)) == "memory is bounded"


@pytest.mark.slow
def test_a_place_that_is_kept_forever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: Membership, session: Session, error: LinkError) -> None:
        if session.is_over or not session.is_welcome:
            self.end(session, error)
        else:
            self._observe(Away(session.device, math.inf))

    def stays_away(scenario: Scenario) -> Scenario:
        cut = Fault(2.0, "cut", scenario.names[0], 8.0, 0)
        return replace(scenario, faults=(cut,), resume_window_s=2.0, round_deadline_s=None)

    monkeypatch.setattr(Membership, "_lost", keep)
    assert found(stays_away) == "memory is bounded"


@pytest.mark.slow
def test_a_replica_of_a_device_that_has_left_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_long_crashes(scenario: Scenario) -> Scenario:
        """Return a world in which devices crash repeatedly, for a long time."""
        crashes = [Fault(1.0 + 1.3 * n, "crash-device", scenario.names[n % 5], 30.0, 0) for n in range(4)]
        plans = {name: Plan(1, 2) for name in scenario.names}
        return replace(scenario, method="pipar", plans=plans, faults=tuple(crashes), min_devices=1, rounds=8)

    monkeypatch.setattr(Participants, "release_absent", nothing)
    assert found(with_long_crashes) == "memory is bounded"


@pytest.mark.slow
def test_a_server_that_waits_forever_for_a_lost_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def patient(self: Session) -> Message:
        while isinstance(message := await self.inbox.get(), Exception):
            pass
        return message

    monkeypatch.setattr(Session, "next_message", patient)
    assert found(first=17) == "training ends"


@pytest.mark.slow
def test_weights_that_are_not_finite_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for check in ("check_finite", "check_range"):
        monkeypatch.setattr(learner, check, nothing)
    monkeypatch.setattr(UpdateCheck, "check", nothing)
    # In split learning the next device of the round receives them, and fails.
    assert found(with_known_mean, first=20) in ("weights are finite", "breaches have a cause")
    assert found(one_is_poisoned) == "weights are finite"


@pytest.mark.slow
def test_a_server_that_fails_when_a_device_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def drop(self: Serving, session: Session, epoch: int, reason: str) -> None:  # noqa: ARG001
        raise KeyError(session.device)

    monkeypatch.setattr(Serving, "drop", drop)
    assert found() == "programs do not fail"

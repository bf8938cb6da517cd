"""Simulated worlds: every invariant holds in all of them, and each finds the mistake that it is there for."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.waiting import PATIENCE_S

from pipar.errors import CheckpointError, LinkError, ProtocolError
from pipar.events import Away
from pipar.execution.clock import VirtualTimeLoop
from pipar.methods import Plan
from pipar.nn import learner
from pipar.nn.learner import TorchLearner
from pipar.server.membership import Membership
from pipar.server.participants import Participants
from pipar.server.replicas import SharedReplica
from pipar.server.serving import Serving
from pipar.server.session import Session
from pipar.storage.checkpoint import Checkpoint, Checkpoints, Disk, _content
from pipar.storage.run_folder import RunFolder
from pipar.transport.channel import Channel
from pipar.wire.frames import Assembler, Frame, _Begun, cut_message, unpack_frame
from pipar.wire.messages import Kind, Message, json_body
from pipar.wire.orders import TrainedPart
from simulation.campaign import Report, try_seed
from simulation.command import faults
from simulation.disk import UnreliableDisk
from simulation.invariants import Violation, aggregate_is_the_mean
from simulation.network import damage
from simulation.plan import KINDS, Fault, Scenario, draw_scenario
from simulation.world import Outcome, simulate

FAST, CHUNK, CHUNKS = 4, 10, 10
ENOUGH = 40  # worlds in which a mistake has to show


def sentence(outcome: Outcome) -> str:
    """Return why an outcome is no good, with how to see it again."""
    return f"python -m simulation --seed {outcome.seed} --verbose\n" + "\n".join(
        [str(outcome.violation), *outcome.events[-30:]]
    )


# --- every invariant holds


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, FAST))])
def test_every_invariant_holds(seed: int) -> None:
    outcome = simulate(draw_scenario(seed))
    assert outcome.violation is None, sentence(outcome)
    assert outcome.rounds == 5


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.slow
def test_every_invariant_holds_in_many_worlds(chunk: int) -> None:
    for seed in range(FAST + chunk * CHUNK, FAST + (chunk + 1) * CHUNK):
        outcome = simulate(draw_scenario(seed))
        assert outcome.violation is None, sentence(outcome)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_every_invariant_holds_when_one_kind_of_fault_comes_again_and_again(kind: str) -> None:
    scenario = draw_scenario(7)
    names = scenario.names
    faults = [Fault(0.9 + 0.7 * n, kind, names[n % len(names)], 0.4 + n % 3, 4099 * n) for n in range(16)]
    outcome = simulate(replace(scenario, faults=tuple(faults)))
    assert outcome.violation is None, sentence(outcome)


@pytest.mark.slow
def test_worlds_have_in_them_what_they_are_for() -> None:
    names = ("Away", "Back", "Lost", "Dropped", "Resumed", "SaveFailed", "Reconnecting", "Waiting", "Replanned")
    reasons = ("joined anew", "link was lost for more than", "was not ready within", "stops for now", "was damaged")
    missing = {*(f": {name}(" for name in names), *reasons}
    for seed in range(25):
        events = "\n".join(simulate(draw_scenario(seed)).events)
        missing = {text for text in missing if text not in events}
        if not missing:
            break
    assert missing == set()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pipar", "sfl2"])
def test_every_invariant_holds_where_messages_are_half_encoded(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are cut, devices are too late and crash while chunks of what they send or are sent are still to come."""
    seen: Counter[str] = Counter()

    def see(what: str, channel: Channel) -> None:
        sending = [posted.message.body.chunks for posted in channel._outbox._unacknowledged]
        seen[what] += any(chunks is not None and len(chunks.ready) < chunks.count for chunks in sending)

    attach, abandon, fail, post = Channel.attach, Session.abandon, Channel.fail, Channel.post

    def attaching(self: Channel, *arguments: Any, **options: Any) -> None:
        see("attached", self)
        attach(self, *arguments, **options)

    def abandoning(self: Session, epoch: int) -> None:
        see("abandoned", self.channel)
        abandon(self, epoch)

    def failing(self: Channel, reason: Any) -> None:
        see("failed", self)
        fail(self, reason)

    def posting(self: Channel, message: Message) -> None:
        seen[message.body.encoding] += 1
        post(self, message)

    monkeypatch.setattr(Channel, "attach", attaching)
    monkeypatch.setattr(Session, "abandon", abandoning)
    monkeypatch.setattr(Channel, "fail", failing)
    monkeypatch.setattr(Channel, "post", posting)
    kinds = ("cut", "cut", "crash-device", "slow")
    for seed in range(3):
        scenario = draw_scenario(seed)
        names = scenario.names
        faults = [Fault(1.0 + 0.31 * n, kinds[n % 4], names[n % 5], 0.2 + n % 3, 64 * n) for n in range(30)]
        outcome = simulate(
            replace(
                scenario,
                method=method,
                plans=dict.fromkeys(names, Plan(2, 2 if method == "pipar" else 1, 0, "sparse-planes", "sparse-planes")),
                faults=tuple(faults),
                resume_window_s=2.0,
                round_deadline_s=4.0,
                coded_chunk_bytes=300,
                encoding="sparse-planes",
                keep_momentum=False,
                replans=False,
            )
        )
        assert outcome.violation is None, sentence(outcome)
    wanted = {"attached", "failed", "sparse-planes", "changes"} | ({"abandoned"} if method == "pipar" else set())
    assert {what for what in wanted if not seen[what]} == set()


def test_tensors_travel_coded_where_encodings_are_to_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[Kind, str]] = set()
    post = Channel.post

    def posting(self: Channel, message: Message) -> None:
        seen.add((message.kind, message.body.encoding))
        post(self, message)

    monkeypatch.setattr(Channel, "post", posting)
    scenario = draw_scenario(1, devices=2, rounds=2)
    plans = {"device-1": Plan(1, 1), "device-2": Plan(2, 1)}
    quiet = replace(scenario, method="sfl", plans=plans, faults=(), replans=False, coded_chunk_bytes=256 * 1024)
    outcome = simulate(replace(quiet, encoding="auto", rate_bps=200e3, samples=dict.fromkeys(plans, 12)))
    assert outcome.violation is None, sentence(outcome)
    for kind in (Kind.ACTIVATION, Kind.GRADIENT):
        assert {encoding for of, encoding in seen if of is kind} == {"planes", "sparse-planes"}


@pytest.mark.slow
def test_a_device_whose_hello_comes_too_late_may_try_again() -> None:
    scenario = draw_scenario(3)
    late = tuple(Fault(0.0, "delay", name, 15.0, 0) for name in scenario.names)
    outcome = simulate(replace(scenario, faults=late))
    assert outcome.violation is None, sentence(outcome)
    assert any("No hello came within 10 s." in event for event in outcome.events)


@pytest.mark.parametrize("seed", [279, 281])
@pytest.mark.slow
def test_worlds_that_once_failed_hold(seed: int) -> None:
    """279: what came late of an abandoned round was larger than the next plan's; 281: a crash behind the last word."""
    outcome = simulate(draw_scenario(seed))
    assert outcome.violation is None, sentence(outcome)


# --- the same world each time


@pytest.mark.slow
def test_a_seed_gives_the_same_world_event_for_event() -> None:
    first, again = (simulate(draw_scenario(11)) for _ in range(2))
    assert first.events == again.events
    assert first.digest == again.digest
    assert first.digest != simulate(draw_scenario(12)).digest


@pytest.mark.slow
def test_another_process_with_another_order_of_hashes_gives_the_same_worlds() -> None:
    program = "from simulation.campaign import try_seed; print([try_seed(s, 5, 5).digest for s in range(6)])"
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True, env=environment)
    assert done.stdout.strip() == str([try_seed(seed, 5, 5).digest for seed in range(6)])


def test_scenarios_are_drawn_from_the_seed_alone_and_have_all_there_is() -> None:
    scenarios = [draw_scenario(seed) for seed in range(300)]
    assert scenarios[:20] == [draw_scenario(seed) for seed in range(20)]
    assert {scenario.method for scenario in scenarios} == {"pipar", "sfl", "fl", "sfl2", "sl"}
    assert {fault.kind for scenario in scenarios for fault in scenario.faults} == set(KINDS)
    cuts = [
        (f.seconds, s.resume_window_s) for s in scenarios for f in s.faults if f.kind == "cut" and s.resume_window_s
    ]
    shorter = Counter(seconds < window for seconds, window in cuts)
    assert min(shorter[True], shorter[False]) > len(cuts) // 5


def test_a_seed_draws_the_world_that_it_has_always_drawn() -> None:
    scenario = draw_scenario(0)
    assert scenario.method == "sfl2"
    assert str(scenario.faults[0]) == "  1.054 s  one-way device-2 for 3.00 s (choice 54163)"


@pytest.mark.slow
def test_a_world_without_faults_loses_nobody() -> None:
    scenario = replace(draw_scenario(3), faults=(), min_devices=5, round_deadline_s=None)
    outcome = simulate(scenario)
    assert outcome.violation is None
    assert not [event for event in outcome.events if "Lost(" in event or "Dropped(" in event or "Away(" in event]


# --- mistakes are found


def found(change: Callable[[Scenario], Scenario] = lambda scenario: scenario) -> str | None:
    """Return which invariant is violated first in a few dozen worlds."""
    for seed in range(ENOUGH):
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
    return replace(scenario, method="pipar", plans=plans, faults=tuple(late), round_deadline_s=1.5, keep_momentum=False)


def one_is_poisoned(scenario: Scenario) -> Scenario:
    poison = Fault(0.0, "poison", scenario.names[0], 0.0, 0)
    return replace(scenario, method="fl", plans=dict.fromkeys(scenario.names, Plan(3, 1)), faults=(poison,))


def whose_mean_is_known(scenario: Scenario) -> Scenario:
    return scenario if scenario.is_exact else replace(scenario, faults=(), rounds=1)


@pytest.mark.slow
def test_replicas_that_keep_what_a_dropped_device_trained_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchLearner, "discard_progress", nothing)
    assert found(whose_mean_is_known) in ("samples count once", "aggregate is the mean")
    assert found(one_is_late) == "samples count once"


def all_by_one_cut(scenario: Scenario, method: str) -> Scenario:
    """Return a world in which devices share the server-side model, and links are cut again and again."""
    cuts = [Fault(1.5 + n, "cut", name, 30.0, n) for n, name in enumerate(scenario.names)]
    plans = dict.fromkeys(scenario.names, Plan(2, 1))
    faults = tuple(sorted((*scenario.faults, *cuts)))
    return replace(scenario, method=method, plans=plans, faults=faults, keep_momentum=False, resume_window_s=2.0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sl", "sfl2"])
def test_a_shared_model_that_keeps_what_it_may_not_is_found(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_turns(scenario: Scenario) -> Scenario:
        return all_by_one_cut(scenario, method)

    assert [seed for seed in range(3) if simulate(in_turns(draw_scenario(seed))).violation is not None] == []
    if method == "sl":
        monkeypatch.setattr(TorchLearner, "rewind_shared_model", nothing)
    else:
        monkeypatch.setattr(SharedReplica, "partly_trained", lambda *_: {})
    assert found(in_turns) == "aggregate is the mean"


@pytest.mark.slow
def test_rounds_that_are_told_of_before_they_are_saved_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(*arguments: Any, has_checkpoints: bool, **options: Any) -> RunFolder:  # noqa: ARG001
        return RunFolder(*arguments, **options)

    monkeypatch.setattr("simulation.world.RunFolder", at_once)
    assert found() == "log is true"


@pytest.mark.slow
def test_models_that_come_too_late_and_count_in_the_next_round_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
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

    assert found(slow_federated) in ("aggregate is the mean", "breaches have a cause")  # it may be out of place, too


@pytest.mark.slow
def test_an_average_that_ignores_how_many_samples_were_trained_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    weighted = TorchLearner.aggregate

    def equally(self: TorchLearner, returned: Sequence[TrainedPart], **options: Any) -> None:
        weighted(self, [replace(back, samples=1) for back in returned], **options)

    monkeypatch.setattr(TorchLearner, "aggregate", equally)
    assert found(whose_mean_is_known) == "aggregate is the mean"


@pytest.mark.slow
def test_messages_that_are_taken_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert found() in ("breaches have a cause", "training ends")


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
def test_checkpoints_of_a_model_that_is_trained_on_meanwhile_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = TorchLearner.snapshot

    def trained_on(self: TorchLearner) -> Any:
        body = snapshot(self)
        with torch.no_grad():
            next(self.model.parameters()).add_(1.0)
        return body

    monkeypatch.setattr(TorchLearner, "snapshot", trained_on)
    assert found(whose_mean_is_known) in ("aggregate is the mean", "checkpoint is whole")


@pytest.mark.slow
def test_acknowledged_messages_that_are_kept_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Channel, "_forget_acknowledged", nothing)
    monkeypatch.setattr(Session, "owes_acknowledgements", False)
    assert found() == "memory is bounded"


@pytest.mark.slow
def test_half_received_messages_that_are_kept_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_place_that_is_kept_for_ever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
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
    def leaves_behind_a_round(scenario: Scenario) -> Scenario:
        """Return a world that a device leaves for long, again and again."""
        crashes = [Fault(1.0 + 1.3 * n, "crash-device", scenario.names[n % 5], 30.0, 0) for n in range(4)]
        plans = {name: Plan(1, 2) for name in scenario.names}
        return replace(scenario, method="pipar", plans=plans, faults=tuple(crashes), min_devices=1, rounds=8)

    monkeypatch.setattr(Participants, "release_absent", nothing)
    assert found(leaves_behind_a_round) == "memory is bounded"


@pytest.mark.slow
def test_a_server_that_waits_for_ever_for_a_lost_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def patient(self: Session) -> Message:
        while isinstance(message := await self.inbox.get(), Exception):
            pass
        return message

    monkeypatch.setattr(Session, "next_message", patient)
    assert found() == "training ends"


@pytest.mark.slow
def test_weights_that_are_no_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "check_finite", nothing)
    # In split learning they are handed on within the round, and seen in what the next device makes of them.
    assert found(whose_mean_is_known) in ("weights are finite", "breaches have a cause")
    assert found(one_is_poisoned) == "weights are finite"


@pytest.mark.slow
def test_a_server_that_falls_over_a_lost_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def drop(self: Serving, session: Session, epoch: int, reason: str) -> None:  # noqa: ARG001
        raise KeyError(session.device)

    monkeypatch.setattr(Serving, "drop", drop)
    assert found() == "programs do not fail"


# --- the parts


def test_a_mean_that_is_one_bit_off_is_exact_and_one_that_is_a_millionth_off_is_not() -> None:
    state = {"weight": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    near = {"weight": torch.nextafter(state["weight"], torch.zeros(2, dtype=torch.float64))}
    aggregate_is_the_mean(1, near, state)
    for wrong in (state["weight"] + 1e-6, state["weight"] * torch.nan):
        with pytest.raises(Violation, match="the model of round 1"):
            aggregate_is_the_mean(1, {"weight": wrong}, state)


def test_damaged_frames_are_refused_or_read_as_frames() -> None:
    import random

    frame = next(cut_message(Message(Kind.HELLO, body=json_body({"name": "a"})), 1, 0))
    refused = 0
    for seed in range(200):
        try:
            unpack_frame(damage(frame, random.Random(seed)))
        except ProtocolError:
            refused += 1
    assert 40 < refused < 200


def test_a_leap_of_the_clock_makes_timers_late() -> None:
    loop = VirtualTimeLoop()
    fired: list[float] = []
    loop.call_at(1.0, lambda: fired.append(loop.time()))
    loop.call_soon(loop.leap, 5.0)
    loop.call_at(6.0, loop.stop)
    loop.run_forever()
    loop.close()
    assert fired == [5.0]


def test_a_disk_without_power_loses_what_was_not_synced(tmp_path: Path) -> None:
    disk = UnreliableDisk(lambda: None)
    assert isinstance(disk, Disk)
    for name, synced in (("whole", True), ("half", False)):
        with disk.create(tmp_path / name) as file:
            disk.write(file, memoryview(bytes(100)))
            if synced:
                disk.sync(file)
    disk.lose_unsynced()
    assert [(tmp_path / name).stat().st_size for name in ("whole", "half")] == [100, 50]


# --- the command


@pytest.mark.slow
def test_command_tells_that_every_invariant_held() -> None:
    result = CliRunner().invoke(faults, ["--seeds", "1", "--rounds", "1", "--devices", "2"], standalone_mode=False)
    assert result.return_value == 0
    assert "1 worlds" in result.output
    assert "every invariant held" in result.output


def test_command_tells_which_seed_failed_and_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(seed: int, devices: int, rounds: int, *, verbose: bool = False) -> Report:  # noqa: ARG001
        return Report(seed, "fl", "", 1.0, ("a fault",), 0, "weights are finite", "0.weight is not.", "fl", ("last",))

    monkeypatch.setattr("simulation.campaign.try_seed", fails)
    result = CliRunner().invoke(faults, ["--seeds", "2", "--first", "5"], standalone_mode=False)
    assert result.return_value == 1
    assert "Seed 6 violates 'weights are finite': 0.weight is not." in result.output
    assert "python -m simulation --seed 6 --verbose" in result.output
    shown = json.loads(CliRunner().invoke(faults, ["--seed", "5", "--json"], standalone_mode=False).output)
    assert shown["failed"] == [5]


def test_a_verbose_seed_tells_all_events() -> None:
    report = try_seed(1, 2, 1, verbose=True)
    assert report.holds
    assert any("RoundOver" in event for event in report.events)
    assert try_seed(1, 2, 1).events == ()
    assert try_seed(1, 2, 1).digest == report.digest


def test_verbose_needs_a_seed() -> None:
    result = CliRunner().invoke(faults, ["--verbose"])
    assert result.exit_code == 2
    assert "--verbose tells of one world" in result.output

"""Devices join, are lost, resume and join again, and the rounds continue with those that are present."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

import pytest
from support.cutting import Loss
from support.server_world import (
    EPOCH_BY_HAND,
    Outcome,
    ScriptedLearner,
    World,
    activation,
    by_hand,
    end_epoch,
    hello,
    honest,
    model,
    roaming,
    scripted,
    trace,
    train,
    until,
)  # fmt: skip

from pipar.errors import LinkError, TooFewDevicesError, TrainingError, UnusableModelError
from pipar.events import (
    Away,
    Back,
    Dropped,
    Event,
    Joined,
    Left,
    Lost,
    Reconnecting,
    Refused,
    Replanned,
    RoundOver,
    RoundRestarted,
    Waiting,
)
from pipar.methods import METHODS, Plan
from pipar.planner import replanner
from pipar.settings.links import Link
from pipar.transport.channel import Channel
from pipar.wire.messages import Body, Kind, Message, json_body, read_json
from pipar.wire.orders import Orders, TrainedPart

ONE_PIECE = (Kind.ROUND, activation(samples=10), Kind.GRADIENT, end_epoch(), model(), Kind.REPORT, trace())
NO_PIECE = (Kind.ROUND, end_epoch(loss_sum=1.0), model(), Kind.REPORT, trace())
SCRIPTS: dict[str, tuple[Message | Kind, ...]] = {
    "pipar": EPOCH_BY_HAND, "sfl": ONE_PIECE, "sfl2": ONE_PIECE, "sl": ONE_PIECE, "fl": NO_PIECE,
}  # fmt: skip


def dropped(outcome: Outcome) -> list[tuple[str, int]]:
    return [(event.device, event.epoch) for event in outcome.of(Dropped)]


def lost(outcome: Outcome) -> list[str]:
    return [event.device for event in outcome.of(Lost)]


# --- admission


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (hello("c"), "'c' is not a device of this training"),
        (hello("a"), "A device called 'a' has joined already"),
        (Message(Kind.HELLO, body=Body.of(b"{", encoding="json")), "does not carry valid JSON"),
        (Message(Kind.HELLO, body=json_body({})), "HELLO gives the name 'None'; a name has 1 to 64 characters"),
        (hello("x" * 65), "; a name has 1 to 64 characters"),
        (hello("b", samples=0), "'b' reports 0 samples"),
        (hello("b", samples="many"), "'b' reports 'many' samples"),
        (activation(), "The first message has to be HELLO"),
        (None, "No HELLO arrived within 10 s"),
    ],
    ids=["unknown", "twice", "no json", "no name", "long name", "no samples", "text", "no hello", "silent"],
)
def test_a_device_that_may_not_join_gets_the_reason_and_the_others_train(said: Message | None, reason: str) -> None:
    async def stranger(channel: Channel) -> None:
        await asyncio.sleep(1.0)
        if said is not None:
            channel.post(said)
        await until(channel, Kind.STOP)

    outcome = train([honest("a"), scripted(stranger), honest("b", starts_s=20.0)])
    assert outcome.failure is None
    assert outcome.counted == [{"a": 20, "b": 20}]
    assert isinstance(outcome.lives[1], TrainingError)
    assert reason in str(outcome.lives[1])
    assert outcome.left_running == 0
    (refused,) = outcome.of(Refused)
    assert reason.rstrip(".") in refused.reason


def test_a_device_with_another_name_than_its_credential_may_not_join() -> None:
    async def liar(channel: Channel) -> None:
        channel.post(hello("b"))
        await until(channel, Kind.STOP)

    outcome = train([honest("a"), scripted(liar, peer="c"), honest("b", starts_s=1.0)])
    assert outcome.failure is None
    assert "The credential is that of 'c', but the device calls itself 'b'" in str(outcome.lives[1])
    assert [refused.device for refused in outcome.of(Refused)] == ["c"]


def test_a_connection_that_ends_before_its_hello_disturbs_no_device() -> None:
    async def silent(_: Channel) -> None:
        await asyncio.sleep(0.5)

    assert train([scripted(silent), honest("a"), honest("b")]).failure is None


# --- lost devices


@pytest.mark.parametrize("method", SCRIPTS)
def test_the_scripts_keep_the_protocol_to_their_end(method: str) -> None:
    outcome = train([honest("a"), by_hand(*SCRIPTS[method])], method=method)
    assert outcome.failure is None
    assert outcome.counted == [{"a": 20, "b": 10}]


@pytest.mark.parametrize("name", ["b", "A"])
@pytest.mark.parametrize(
    ("method", "place"), [(method, place) for method, script in SCRIPTS.items() for place in range(1, len(script))]
)
def test_the_rounds_continue_without_a_lost_device(method: str, place: int, name: str) -> None:
    script = SCRIPTS[method]  # of a device with the later name or the earlier one, which is the first in split learning
    outcome = train(
        [honest("a"), by_hand(*script[:place], name=name, leaves=True)], devices=("a", name), method=method, epochs=2
    )
    assert outcome.failure is None
    assert lost(outcome) == [name]
    has_returned = place > script.index(model())
    assert outcome.counted == [{"a": 20, name: 10} if has_returned else {"a": 20}, {"a": 20}]
    assert dropped(outcome)[: 1 - has_returned] == ([] if has_returned else [(name, 1)])
    assert [result.samples for result in outcome.results] == [sum(counts.values()) for counts in outcome.counted]
    assert outcome.learner is not None
    averaged = sorted(chain(*outcome.learner.averaged))  # in split learning one after another
    assert averaged == sorted(chain(*outcome.counted))
    assert outcome.lives == [None, None]
    assert outcome.left_running == 0


def test_devices_leave_a_server_that_stops_and_none_is_lost() -> None:
    seen: list[Event] = []

    async def stop(world: World) -> None:
        await asyncio.sleep(5.0)
        await world.server.suspend("The server stops for now.")

    outcome = train([roaming("a", observe=seen.append), roaming("b"), ("the operator", stop)], epochs=3)
    assert outcome.failure is None
    assert sum(map(len, outcome.counted)) == 6
    let_go = [(event.device, event.reason) for event in outcome.of(Left) if event.reason]
    assert let_go == [("a", "The server stops for now."), ("b", "The server stops for now.")]
    assert not outcome.of(Lost)
    (tried,) = [event for event in seen if isinstance(event, Reconnecting)]
    assert tried.is_on_purpose


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pipar", "sl"])
def test_whenever_a_server_is_stopped_its_model_is_that_of_the_last_round_it_reported(method: str) -> None:
    """Also in the middle of the aggregation, and between two turns of split learning."""

    class Scribe:
        """Records which rounds were saved, and the number of aggregations at that time; saving takes a while."""

        def __init__(self) -> None:
            self.saved: dict[int, int] = {}

        async def save_if_due(self, epoch: int, *, last: bool) -> None:
            if epoch > max(self.saved, default=0) and (last or epoch % 2 == 0):
                await asyncio.sleep(1.0)
                self.saved[epoch] = len(learners[-1].averaged)

        async def save_end(self, epoch: int) -> None:
            await self.save_if_due(epoch, last=True)
            await asyncio.sleep(0.5)

    turns, seen = 2 if method == "sl" else 1, set()
    learners: list[ScriptedLearner] = []

    def learner(split_points: dict[str, int], losses: Sequence[float]) -> ScriptedLearner:
        learners.append(ScriptedLearner(split_points, losses))
        return learners[-1]

    for step in range(1, 200):
        checkpointer = Scribe()
        outcome = train(
            [roaming("a", gives_up_s=0.0), roaming("b", gives_up_s=0.0)],
            epochs=3,
            method=method,
            aggregate_s=1.0,
            stops_at_s=0.9 * step,
            checkpointer=checkpointer,
            learner=learner,
        )
        told, saved = len(outcome.counted), max(checkpointer.saved, default=0)
        assert len(learners[-1].averaged) == told * turns, f"stopped after {0.9 * step:g} s"
        assert checkpointer.saved == {epoch: epoch * turns for epoch in checkpointer.saved}
        assert saved == told or (method == "sl" and saved == told - told % 2)
        seen.add(told)
        if not outcome.of(Left)[0].reason:  # it was over before
            break
    assert seen == {0, 1, 2, 3}


def test_a_device_that_leaves_after_stop_is_not_lost() -> None:
    outcome = train([honest("a"), by_hand(*EPOCH_BY_HAND, Kind.STOP, leaves=True)])
    assert outcome.failure is None
    assert sorted(event.device for event in outcome.of(Left)) == ["a", "b"]
    assert not outcome.of(Lost)


def test_a_device_that_gives_up_says_why() -> None:
    fault = Message(Kind.FAULT, body=json_body({"reason": "the disk is full"}))
    outcome = train([honest("a"), by_hand(Kind.ROUND, fault, leaves=True)])
    assert [event.reason for event in outcome.of(Lost)] == ["it ended its session (the disk is full)"]
    assert [event.reason for event in outcome.of(Dropped)] == ["it ended its session (the disk is full)"]


def test_when_all_devices_are_lost_the_same_round_is_trained_again_with_those_that_join() -> None:
    lives = [by_hand(Kind.ROUND, activation(), 2.0, leaves=True, name=name) for name in "ab"]
    outcome = train([*lives, honest("a", starts_s=50.0), honest("b", starts_s=50.0)], epochs=2)
    assert outcome.failure is None
    assert outcome.of(RoundRestarted) == [RoundRestarted(1, None)]
    assert sorted(dropped(outcome)) == [("a", 1), ("b", 1)]
    assert [counts.keys() & {"a"} for counts in outcome.counted] == [{"a"}, {"a"}]
    assert [result.epoch for result in outcome.results] == [1, 2]
    assert outcome.left_running == 0


def test_with_fewer_devices_than_it_needs_the_server_waits_for_more() -> None:
    lives = [honest("a"), by_hand(Kind.ROUND, leaves=True)]
    with pytest.raises(TrainingError, match="Deadlock in virtual time"):
        train(lives, epochs=2, min_devices=2)
    outcome = train([*lives, honest("b", 30, starts_s=1000.0)], epochs=2, min_devices=2)
    assert outcome.counted == [{"a": 20}, {"a": 20, "b": 30}]
    assert [(event.present, event.wanted) for event in outcome.of(Waiting)] == [(1, 2)]


# --- devices that join later


@pytest.mark.parametrize("method", METHODS)
def test_a_device_that_joins_in_the_middle_of_a_round_takes_part_from_the_next_one_on(method: str) -> None:
    for starts_s in (0.1, 2.0, 5.0):
        outcome = train([honest("a"), honest("b", starts_s=starts_s)], method=method, epochs=3, begin_with=1)
        assert outcome.failure is None
        assert outcome.counted == [{"a": 20}, {"a": 20, "b": 20}, {"a": 20, "b": 20}]
        assert outcome.left_running == 0


@pytest.mark.slow
def test_a_device_that_joins_at_any_moment_is_welcome_before_anything_else() -> None:
    for tenths in range(0, 160, 3):
        outcome = train([honest("a"), honest("b", starts_s=tenths / 10)], epochs=2, begin_with=1)
        assert outcome.failure is None
        assert outcome.lives == [None, None]
        assert outcome.left_running == 0


def test_a_device_that_joins_when_the_training_is_over_gets_stop() -> None:
    async def slow_to_leave(channel: Channel) -> None:
        await asyncio.sleep(1.0)
        channel.post(hello("b"))
        await until(channel, Kind.STOP)
        await asyncio.sleep(10.0)

    over_s = train([honest("a")], devices=("a",)).results[0].seconds
    lives = [honest("a"), scripted(slow_to_leave, "b"), honest("c", starts_s=over_s + 5.0)]
    outcome = train(lives, devices=("a", "b", "c"), begin_with=1)
    assert outcome.failure is None
    assert outcome.lives == [None, None, None]
    assert outcome.counted == [{"a": 20}]
    assert outcome.left_running == 0


# --- resuming within the window


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    return train([honest("a"), roaming("b")], epochs=3, resume_window_s=30.0)


@pytest.mark.slow
@pytest.mark.parametrize("loss", Loss)
def test_the_device_resumes_where_it_was_after_a_short_loss_at_any_frame(loss: Loss, undisturbed: Outcome) -> None:
    # After HELLO and WELCOME. A device that got STOP does not resume, so the server would wait forever.
    frames = undisturbed.carried[1] - 2 * (loss is Loss.SILENT)
    for cut in range(3, frames):
        outcome = train([honest("a"), roaming("b", cut, loss=loss)], epochs=3, resume_window_s=30.0)
        assert outcome.failure is None
        assert outcome.counted == undisturbed.counted, cut
        assert outcome.lives == [None, None]
        assert not outcome.of(Dropped)
        assert not outcome.of(Lost)
        if cut < frames - 2 and loss is not Loss.SILENT:
            assert [event.device for event in outcome.of(Away)] == ["b"], cut
            assert [event.away_s for event in outcome.of(Back)] == [pytest.approx(1.0, abs=0.2)]
        assert outcome.left_running == 0


@pytest.mark.parametrize("method", METHODS)
def test_links_may_be_lost_repeatedly_with_every_method(method: str) -> None:
    cuts = (9, 2, 5, 3, 4, 2, 7, 3, 6, 2, 4)
    outcome = train(
        [roaming("a", *cuts, loss=Loss.FRAMES), roaming("b", *cuts[::-1], loss=Loss.SILENT)],
        method=method, epochs=3, resume_window_s=30.0,
    )  # fmt: skip
    assert outcome.failure is None
    assert outcome.counted == [{"a": 20, "b": 20}] * 3
    assert not outcome.of(Lost)
    assert len(outcome.of(Back)) > 4
    assert outcome.left_running == 0


@pytest.mark.slow
def test_a_device_resumes_where_it_was_when_its_link_is_back(undisturbed: Outcome) -> None:
    for cut in (5, 9, 17):
        outcome = train([honest("a"), roaming("b", cut, loss=Loss.FRAMES)], epochs=3, resume_window_s=30.0)
        assert outcome.counted == undisturbed.counted
        assert [event.device for event in (*outcome.of(Away), *outcome.of(Back))] == ["b", "b"]


@pytest.mark.slow
def test_a_device_whose_link_is_lost_with_the_last_message_gets_it_again(undisturbed: Outcome) -> None:
    for cut in range(undisturbed.carried[1] - 4, undisturbed.carried[1] + 1):
        outcome = train([honest("a"), roaming("b", cut, loss=Loss.FRAMES)], epochs=3, resume_window_s=30.0)
        assert outcome.lives == [None, None]
        assert len(outcome.of(Joined)) == 2
        assert outcome.left_running == 0


def test_a_lost_device_discards_no_work_of_another_device_on_a_shared_model() -> None:
    for name, forgotten in (("b", 1), ("A", 2)):  # when it joins; and in the middle of its own turn
        lives = [honest("a"), by_hand(Kind.ROUND, leaves=True, name=name)]
        outcome = train(lives, devices=("a", name), method="sfl2")
        assert outcome.learner is not None
        assert outcome.learner.forgotten.count(name) == forgotten
        assert outcome.counted == [{"a": 20}]


# --- staying away for longer


@pytest.mark.slow
def test_a_device_that_stays_away_for_too_long_joins_again_for_the_next_round() -> None:
    for cut in range(5, 14):  # after ROUND, and before all of the trained model is sent
        outcome = train(
            [honest("a", 200), roaming("b", cut, pause_s=40.0)], epochs=3, resume_window_s=30.0, begin_with=2
        )
        assert outcome.failure is None
        assert outcome.counted[0] == {"a": 200}, cut
        assert outcome.counted[-1] == {"a": 200, "b": 20}
        assert dropped(outcome) == [("b", 1)]
        assert [event.reason for event in outcome.of(Lost)] == ["its link was lost for more than 30 s"]
        assert [event.device for event in outcome.of(Joined)].count("b") == 2
        assert outcome.lives == [None, None]
        assert outcome.left_running == 0


@pytest.mark.parametrize("is_away", [False, True])
def test_a_revoked_device_is_lost_at_once_and_no_round_waits_for_it(is_away: bool) -> None:
    async def revoke(world: World) -> None:
        server = world.server
        while [one.round.epoch for one in server.sessions] != [1, 1]:
            await asyncio.sleep(0.01)
        if is_away:
            server.sessions[1].channel.lose(LinkError("its link is gone"))
            await asyncio.sleep(1.0)
        for name in ("b", "b", "nobody"):
            server.revoke(name)
        assert [one.device for one in server.sessions] == ["a"]

    async def wait(channel: Channel) -> None:
        channel.post(hello("b"))
        with suppress(LinkError, TrainingError):
            await until(channel, Kind.STOP)

    outcome = train([honest("a", 20), scripted(wait, "b"), ("revoker", revoke)], resume_window_s=1000.0, begin_with=2)
    assert outcome.failure is None
    assert [(event.device, event.reason) for event in outcome.of(Lost)] == [("b", "its credential was revoked")]
    assert len(outcome.of(Away)) == is_away
    assert dropped(outcome) == [("b", 1)]
    assert outcome.counted == [{"a": 20}]


def test_until_the_deadline_of_a_round_a_device_may_resume_after_the_window() -> None:
    outcome = train([honest("a"), roaming("b", 8, pause_s=40.0)], epochs=2, resume_window_s=5.0, round_deadline_s=100.0)
    assert outcome.counted == [{"a": 20, "b": 20}] * 2
    assert [event.seconds_allowed > 90.0 for event in outcome.of(Away)] == [True]


def test_a_device_that_asks_for_more_than_was_sent_to_it_keeps_its_place_for_the_window_only() -> None:
    sessions: list[int] = []

    async def miscounts(channel: Channel) -> None:
        channel.post(hello("b"))
        sessions.append(Orders.read(await channel.receive()).session)
        await until(channel, Kind.ROUND)

    async def resumes(channel: Channel) -> None:
        await asyncio.sleep(5.0)
        channel.session, channel.received = sessions[0], 1_000
        channel.post(hello("b"))
        await until(channel, Kind.STOP)

    outcome = train([honest("a"), scripted(miscounts), scripted(resumes)], epochs=2, resume_window_s=30.0)
    assert outcome.failure is None
    assert "but only" in str(outcome.lives[2])
    assert outcome.counted == [{"a": 20}, {"a": 20}]
    assert outcome.left_running == 0


# --- joining again


def test_a_device_with_a_credential_that_joins_again_replaces_its_old_connection() -> None:
    crashed = roaming("b", 8, loss=Loss.SILENT, proved=True, gives_up_s=0.0)  # ends without a word
    outcome = train(
        [honest("a", 100), crashed, roaming("b", proved=True, starts_s=10.0)], epochs=2, resume_window_s=30.0
    )
    assert outcome.failure is None
    assert isinstance(outcome.lives[1], LinkError)
    assert [event.reason for event in outcome.of(Lost)] == ["it was started again, or another device uses its name"]
    assert outcome.counted == [{"a": 100}, {"a": 100, "b": 20}]
    assert outcome.left_running == 0


def test_a_device_without_a_credential_that_joins_again_is_asked_to_retry() -> None:
    said: list[object] = []

    async def comes_anew(channel: Channel) -> None:
        await asyncio.sleep(5.0)
        channel.post(hello("b"))
        said.append(read_json(await channel.receive()))

    outcome = train([honest("a", 100), roaming("b"), scripted(comes_anew)], epochs=2, resume_window_s=30.0)
    assert said == [{"reason": "A device called 'b' has joined already.", "again": True}]
    assert outcome.counted == [{"a": 100, "b": 20}] * 2


def test_a_device_that_joins_again_while_its_place_is_kept_takes_it() -> None:
    crashed = roaming("b", 8, gives_up_s=0.0)
    outcome = train([honest("a", 100), crashed, roaming("b", starts_s=10.0)], epochs=2, resume_window_s=1000.0)
    assert outcome.failure is None
    assert outcome.counted == [{"a": 100}, {"a": 100, "b": 20}]
    assert outcome.left_running == 0


def test_a_device_that_joins_again_finds_nothing_of_its_earlier_work_on_the_server() -> None:
    lives = [honest("a"), by_hand(*EPOCH_BY_HAND, 1.0, leaves=True), honest("b", starts_s=20.0)]
    outcome = train(lives, epochs=6)
    assert outcome.counted[0] == {"a": 20, "b": 10}
    assert outcome.counted[-1] == {"a": 20, "b": 20}
    assert outcome.learner is not None
    assert outcome.learner.forgotten.count("b") >= 2  # when it joined, and when it joined again


def test_the_replica_of_a_device_that_is_gone_is_freed_when_its_last_round_is_over() -> None:
    outcome = train([honest("a"), by_hand(*EPOCH_BY_HAND, leaves=True)], epochs=3)
    assert outcome.counted == [{"a": 20, "b": 10}, {"a": 20}, {"a": 20}]
    assert outcome.learner is not None
    assert outcome.learner.forgotten.count("b") >= 2  # when it joined, and when it was gone
    assert outcome.learner.forgotten.count("a") == 1


# --- the deadline


def test_a_straggler_is_abandoned_and_takes_part_in_the_next_round() -> None:
    async def straggler(channel: Channel) -> None:
        channel.post(hello("b"))
        await until(channel, Kind.ROUND)
        channel.post(activation(n=1))
        await until(channel, Kind.ABANDON)
        for late in (activation(n=2), end_epoch(), model()):
            channel.post(late)
        await until(channel, Kind.MODEL)
        await until(channel, Kind.ROUND)
        for n in (1, 2):
            channel.post(activation(n=n, epoch=2))
        for message in (end_epoch(2), model(2)):
            channel.post(message)
        await until(channel, Kind.REPORT)
        channel.post(trace(2))
        await until(channel, Kind.STOP)

    outcome = train([honest("a"), scripted(straggler)], epochs=2, round_deadline_s=30.0)
    assert outcome.failure is None
    assert outcome.counted == [{"a": 20}, {"a": 20, "b": 10}]
    assert [event.reason for event in outcome.of(Dropped)] == ["it missed the deadline of 30 s"]
    assert not outcome.of(Lost)
    assert outcome.lives == [None, None]
    assert outcome.left_running == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pipar", "sfl", "sfl2", "fl"])
def test_a_slow_device_is_abandoned_at_any_point_and_in_every_round(method: str) -> None:
    alone_s = train([honest("a")], devices=("a",), method=method).results[0].seconds
    for later in range(9):
        outcome = train(
            [honest("a"), honest("b", 30, speed=0.3)],
            method=method, epochs=3, round_deadline_s=alone_s * (1.1 + 0.3 * later),
        )  # fmt: skip
        assert outcome.failure is None
        assert outcome.lives == [None, None]
        assert [counts["a"] for counts in outcome.counted] == [20, 20, 20]
        assert len(dropped(outcome)) == sum("b" not in counts for counts in outcome.counted)
        assert later > 3 or dropped(outcome)
        assert outcome.left_running == 0


def test_a_device_that_holds_up_the_turns_of_all_others_is_excluded_at_the_deadline() -> None:
    stalled = by_hand(Kind.ROUND, activation(samples=10), name="b")  # and not a word more
    outcome = train(
        [honest("a"), stalled, honest("c")], devices=("a", "b", "c"), method="sfl2", epochs=2, round_deadline_s=20.0
    )
    assert outcome.failure is None
    assert outcome.counted == [{"a": 20, "c": 20}] * 2
    assert [event.partly for event in outcome.of(RoundOver)] == [{"b": 10}, {}]
    assert dropped(outcome) == [("b", 1), ("b", 2)]
    assert outcome.left_running == 0


def test_when_all_devices_of_a_shared_model_are_slow_the_last_one_is_waited_for() -> None:
    lives = [honest(name, speed=0.1) for name in "abc"]
    outcome = train(lives, devices=("a", "b", "c"), method="sfl2", epochs=2, round_deadline_s=2.0)
    assert outcome.failure is None
    assert all(outcome.counted)
    assert outcome.left_running == 0


def test_a_round_of_split_learning_for_which_all_are_too_late_starts_over_with_more_time() -> None:
    lives = [roaming("a", speed=0.5), roaming("b", speed=0.5)]
    outcome = train(lives, method="sl", epochs=2, round_deadline_s=4.0, min_devices=2)
    assert outcome.failure is None
    assert outcome.counted == [{"a": 20, "b": 20}] * 2
    assert [(event.epoch, event.deadline_s) for event in outcome.of(RoundRestarted)] == [(1, 8.0), (1, 16.0)]
    assert outcome.left_running == 0


def test_no_device_is_too_late_before_one_has_finished() -> None:
    outcome = train([honest("a"), honest("b")], epochs=2, round_deadline_s=0.1)
    assert [len(counts) for counts in outcome.counted] == [1, 1]
    assert outcome.left_running == 0


def test_a_round_that_starts_over_is_trained_with_the_devices_that_were_too_late_for_it() -> None:
    class Choosy(ScriptedLearner):
        def aggregate(self, returned: Sequence[TrainedPart], *, keep_before: bool = False) -> None:
            if any(back.device == "a" for back in returned):
                raise UnusableModelError("a", "a returned no valid model.")
            super().aggregate(returned, keep_before=keep_before)

    outcome = train([honest("a"), roaming("b", speed=0.2)], epochs=2, round_deadline_s=20.0, learner=Choosy)
    assert outcome.failure is None
    assert outcome.counted == [{"b": 20}, {"b": 20}]
    assert outcome.left_running == 0


# --- other plans


@pytest.fixture
def every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round's links count as changed."""
    monkeypatch.setattr(replanner, "NOTICED", -1.0)


@pytest.mark.slow
@pytest.mark.usefixtures("every_round")
@pytest.mark.parametrize("keep", [True, False])
def test_new_plans_are_adopted_with_a_device_lost_or_late(keep: bool) -> None:
    turns = iter([Plan(2, 1), Plan(1, 2)] * 10)

    async def back_and_forth(links: dict[str, Link]) -> dict[str, Plan]:
        plan = next(turns)
        return dict.fromkeys(links, plan)

    for cut, deadline_s, pause_s in ((8, None, 40.0), (11, None, 40.0), (None, 20.0, 1.0), (9, 20.0, 40.0)):
        outcome = train(
            [honest("a", 40), roaming("b", cut, speed=0.3, pause_s=pause_s)],
            epochs=5, keep_state=keep, replan=back_and_forth, round_deadline_s=deadline_s, resume_window_s=5.0,
        )  # fmt: skip
        assert outcome.failure is None
        assert outcome.lives == [None, None]
        assert dropped(outcome)
        assert len(outcome.of(Replanned)) >= 3  # one is chosen too late if the round ends with a loss
        assert [result.epoch for result in outcome.results] == [1, 2, 3, 4, 5]
        assert outcome.left_running == 0


@pytest.mark.usefixtures("every_round")
def test_a_late_device_is_limited_by_its_new_plan_once_it_has_caught_up() -> None:
    async def into_small_pieces(links: dict[str, Link]) -> dict[str, Plan]:
        return dict.fromkeys(links, Plan(1, 5))

    async def late(channel: Channel) -> None:
        channel.post(hello("b"))
        await until(channel, Kind.ROUND)
        await until(channel, Kind.PLAN)
        channel.post(activation(n=1))  # as large as its plan was: of no use, and no breach
        epoch = (await until(channel, Kind.ROUND)).epoch
        channel.post(activation(n=1, samples=2, epoch=epoch))
        await until(channel, Kind.GRADIENT)
        channel.post(activation(n=2, samples=5, epoch=epoch))
        await until(channel, Kind.STOP)

    lives = [honest("a"), scripted(late)]
    outcome = train(lives, epochs=4, replan=into_small_pieces, round_deadline_s=30.0)
    assert outcome.failure is None
    assert "announces 60 bytes; at most 36 are allowed" in str(outcome.lives[1])


@pytest.mark.usefixtures("every_round")
def test_plans_are_made_for_the_devices_that_are_present() -> None:
    planned_for: list[set[str]] = []

    async def replan(links: dict[str, Link]) -> dict[str, Plan]:
        planned_for.append(set(links))
        return dict.fromkeys(links, Plan(1, 2))

    lives = [honest("a"), by_hand(*EPOCH_BY_HAND, 1.0, leaves=True), honest("b", starts_s=40.0)]
    outcome = train(lives, epochs=8, replan=replan)
    assert outcome.failure is None
    assert [counts.keys() for counts in outcome.counted][-1] == {"a", "b"}
    assert planned_for[0] == planned_for[-1] == {"a", "b"}
    assert {"a"} in planned_for
    assert set().union(*planned_for) == {"a", "b"}


# --- too few for the aggregation


class Choosy(ScriptedLearner):
    """Averages no fewer than two models, as Krum and the trimmed mean have a least number, too."""

    def aggregate(self, returned: Sequence[TrainedPart], *, keep_before: bool = False) -> None:
        if len(returned) < 2:
            raise TooFewDevicesError("Two models are needed.")
        super().aggregate(returned, keep_before=keep_before)


def test_a_round_that_too_few_have_finished_starts_over_when_one_more_is_present() -> None:
    async def late(channel: Channel) -> None:
        await asyncio.sleep(100.0)
        await honest("b")[1](channel)

    outcome = train([honest("a"), ("b", late)], begin_with=1, epochs=2, learner=Choosy)
    assert outcome.failure is None
    assert [event.counted for event in outcome.events if isinstance(event, RoundOver)] == [{"a": 20, "b": 20}] * 2
    assert [event.device for event in outcome.events if isinstance(event, Dropped)] == ["a"]
    assert outcome.left_running == 0


# --- false claims of a device


def test_a_device_counts_with_the_samples_that_it_said_it_has() -> None:
    script = (Kind.ROUND, end_epoch(samples=1_000_000, loss_sum=1.0), model())
    outcome = train([honest("a"), by_hand(*script)], method="fl")
    assert "but the device has 10" in str(outcome.lives[1])
    assert [event.counted for event in outcome.events if isinstance(event, RoundOver)] == [{"a": 20}]


def test_waiting_for_a_trace_that_never_comes_times_out() -> None:
    outcome = train([honest("a"), by_hand(*EPOCH_BY_HAND[:-1])])
    assert outcome.failure is None
    assert [result.devices for result in outcome.results] == [2]


def test_a_device_that_keeps_its_trace_to_itself_is_dismissed_in_the_next_round() -> None:
    second = (Kind.ROUND, *(replace(m, epoch=2) if isinstance(m, Message) else m for m in EPOCH_BY_HAND[1:7]))
    outcome = train([honest("a"), by_hand(*EPOCH_BY_HAND[:-1], *second)], epochs=2)
    assert "arrived before the trace of epoch 1" in str(outcome.lives[1])
    assert [result.epoch for result in outcome.results] == [1, 2]


def test_for_a_device_that_is_late_in_every_round_no_unacknowledged_models_pile_up() -> None:
    outcome = train([honest("a"), honest("b", speed=0.01)], method="fl", epochs=12, round_deadline_s=10.0)
    assert outcome.failure is None
    assert len(outcome.of(Dropped)) > 8
    assert max(outcome.unacknowledged) <= 6  # two rounds' plans, models and calls


def test_for_a_device_that_is_away_for_many_rounds_models_do_not_pile_up() -> None:
    away = roaming("b", 12, pause_s=1000.0, gives_up_s=1000.0)
    outcome = train([honest("a"), away], method="fl", epochs=40, round_deadline_s=10.0, resume_window_s=900.0)
    assert outcome.failure is None
    assert max(outcome.unacknowledged) <= 27
    assert [event.reason for event in outcome.of(Lost)] == ["it has not acknowledged the messages of several rounds"]
    assert len(outcome.counted) == 40

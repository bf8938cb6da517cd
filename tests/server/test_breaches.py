"""A device that breaks the protocol is excluded; no other device is disturbed, and nothing hangs."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.server_world import (
    EPOCH_BY_HAND,
    ScriptedLearner,
    World,
    activation,
    by_hand,
    end_epoch,
    hello,
    honest,
    model,
    roaming,
    trace,
    train,
    until,
)  # fmt: skip

from pipar.errors import TrainingError, UnusableModelError
from pipar.events import Dropped, Lost
from pipar.execution.spans import UPLINK, Recorder
from pipar.server.session import Session
from pipar.transport.channel import Channel
from pipar.transport.interface import Transport
from pipar.transport.limits import RateLimit
from pipar.wire.frames import Frame
from pipar.wire.messages import Body, Kind, Message
from pipar.wire.orders import TrainedPart

AFTER_THE_ROUND = {"a trace of another epoch", "a trace twice", "a trace without lanes"}
BREACHES: dict[str, tuple[tuple[Message | Kind | float, ...], str]] = {
    "a longer frame than measures a link": (
        (Message(Kind.PROBE, body=Body(16_001)),),
        "announces 16001 bytes; at most 16000 are allowed",
    ),
    "another epoch": ((activation(epoch=2),), "instead of micro-batch 1 of iteration 1 of epoch 1,"),
    "a later iteration": ((activation(iteration=2),), "instead of micro-batch 1 of iteration 1"),
    "a later micro-batch": ((activation(n=2),), "instead of micro-batch 1 of iteration 1"),
    "no samples": ((activation(samples=0),), "with 0 of 10 samples"),
    "an empty batch": ((activation(samples=0, batch=0),), "with 0 of 0 samples"),
    "more samples than the batch": ((activation(samples=6, batch=5),), "with 6 of 5 samples"),
    "more bytes than its plan needs": ((activation(samples=11),), "announces 132 bytes; at most 72 are allowed"),
    "pieces longer than the batch": ((activation(), activation(n=2, samples=6)), "after 5 of 10 samples"),
    "another batch in between": ((activation(), activation(n=2, batch=11)), "with 5 of 11 samples"),
    "the next batch too early": ((activation(), activation(iteration=2)), "instead of micro-batch 2 of iteration 1"),
    "too many pieces": (
        (activation(samples=3), activation(n=2, samples=3), Kind.GRADIENT, activation(n=3, samples=4)),
        "a batch has at most 2 micro-batches",
    ),
    "too many outstanding": (
        (activation(n=1), activation(n=2), activation(iteration=2, n=1)),
        "arrived with 2 micro-batches outstanding",
    ),
    "the end within a batch": ((activation(), Kind.GRADIENT, end_epoch(samples=5)), "reports 5 samples, but 5 arrived"),
    "another number of samples": (
        (activation(n=1), activation(n=2), Kind.GRADIENT, end_epoch(samples=11)),
        "reports 11 samples, but 10 arrived",
    ),
    "nothing trained": ((end_epoch(),), "reports 10 samples, but 0 arrived"),
    "no number of samples": ((end_epoch(samples=None),), "carries None samples"),
    "a negative number of samples": ((end_epoch(samples=-1),), "carries -1 samples"),
    "samples as text": ((end_epoch(samples="10"),), "carries '10' samples"),
    "samples as truth": ((end_epoch(samples=True),), "carries True samples"),
    "a loss as text": ((end_epoch(loss_sum="low"),), "the loss 'low'"),
    "bytes as text": ((end_epoch(up_bytes="1", up_s=1.0),), "carries '1' bytes sent in 1.0 s"),
    "bytes below zero": ((end_epoch(up_bytes=-1, up_s=1.0),), "carries -1 bytes"),
    "more bytes than there are": ((end_epoch(up_bytes=1 << 70, up_s=1.0),), "bytes sent in 1.0 s"),
    "bytes as truth": ((end_epoch(up_bytes=True, up_s=1.0),), "carries True bytes"),
    "a time below zero": ((end_epoch(up_bytes=1, up_s=-1.0),), "sent in -1.0 s"),
    "a time that is no number": ((end_epoch(up_bytes=1, up_s=float("nan")),), "sent in nan s"),
    "a time without end": ((end_epoch(up_bytes=1, up_s=float("inf")),), "sent in inf s"),
    "no time": ((end_epoch(up_bytes=1, up_s=None),), "sent in None s"),
    "moments of frames as text": ((end_epoch(ready="soon"),), "carries times of frames that cannot be read"),
    "a moment without a time": ((end_epoch(came=[[1, 0, None]]),), "carries times of frames that cannot be read"),
    "an end of another epoch": ((end_epoch(epoch=2),), "instead of END_EPOCH of epoch 1."),
    "an end without json": ((Message(Kind.END_EPOCH, 1),), "does not carry valid JSON"),
    "a model too early": ((model(),), "instead of END_EPOCH of epoch 1."),
    "a gradient": ((activation(kind=Kind.GRADIENT),), "instead of END_EPOCH of epoch 1."),
    "two models at once": ((activation(), model(), model()), "arrived while 1 of its kind is unread"),
    "momentum that is not kept": (
        (Message(Kind.STATE, 1, body=Body(1_000_020, encoding="safetensors")),),
        "announces 1000020 bytes; at most 1000000 are allowed",
    ),
    "hello again": ((hello("b"),), "arrived in the middle of a session"),
    "no model": (
        (activation(n=1), activation(n=2), Kind.GRADIENT, end_epoch(), 3.0, end_epoch()),
        "instead of MODEL of epoch 1.",
    ),
    "a model of another epoch": (
        (activation(n=1), activation(n=2), Kind.GRADIENT, end_epoch(), model(2)),
        "instead of MODEL of epoch 1.",
    ),
    "a trace that was not requested": ((trace(),), "which was not requested"),
    "a trace that cannot be read": ((Message(Kind.TRACE, 1, body=Body.of(b"?")),), "a trace that cannot be read"),
    "a trace of another epoch": ((*EPOCH_BY_HAND[1:-1], trace(1, says=2)), "epoch 2, which was not requested"),
    "a trace twice": ((*EPOCH_BY_HAND[1:], trace()), "which was not requested"),
    "a trace without lanes": ((*EPOCH_BY_HAND[1:-1], trace(1, "uplink")), "without the device's own lanes"),
}


@pytest.mark.parametrize("case", BREACHES)
def test_a_device_that_breaks_the_protocol_gets_the_reason_and_the_others_train_without_it(case: str) -> None:
    said, reason = BREACHES[case]
    outcome = train([honest("a"), by_hand(Kind.ROUND, *said)], epochs=2)
    assert outcome.failure is None
    assert isinstance(outcome.lives[1], TrainingError)  # the reason in its FAULT
    assert reason in str(outcome.lives[1])
    (lost,) = outcome.of(Lost)
    assert lost.device == "b"
    assert reason in lost.reason
    if case in AFTER_THE_ROUND:
        assert outcome.counted[0] == {"a": 20, "b": 10}
    else:
        assert outcome.counted == [{"a": 20}, {"a": 20}]
        assert [(event.device, event.epoch) for event in outcome.of(Dropped)] == [("b", 1)]
    assert [result.epoch for result in outcome.results] == [1, 2]
    assert outcome.lives[0] is None
    assert outcome.left_running == 0


def test_a_longer_frame_than_measures_a_link_is_refused_before_the_orders_too() -> None:
    outcome = train([honest("a"), by_hand(Message(Kind.PROBE, body=Body(16_001)))], epochs=2)
    assert outcome.counted == [{"a": 20}, {"a": 20}]
    assert "announces 16001 bytes; at most 16000 are allowed" in str(outcome.lives[1])


class Unthankful:
    """A link whose frames acknowledge nothing."""

    def __init__(self, link: Transport) -> None:
        self._link = link
        self.read, self.close = link.read, link.close

    async def write(self, frame: Frame) -> None:
        await self._link.write(replace(frame, acknowledged=0))


def test_a_device_that_acknowledges_nothing_is_ended_before_its_messages_pile_up() -> None:
    async def live(world: World) -> None:
        channel = Channel(Unthankful(world.dial()), Recorder("b"), UPLINK)
        try:
            channel.post(hello("b", samples=1000))
            await until(channel, Kind.ROUND)
            for iteration in range(1, 101):
                for n in (1, 2):
                    channel.post(activation(iteration, n))
                await until(channel, Kind.GRADIENT)
                await until(channel, Kind.GRADIENT)
        finally:
            await channel.close()

    outcome = train([honest("a"), ("b", live)], epochs=2)
    assert outcome.failure is None
    assert outcome.counted == [{"a": 20}, {"a": 20}]
    assert "messages unacknowledged, which is too many" in str(outcome.lives[1])


def test_a_device_that_sends_only_messages_that_are_not_needed_is_dismissed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipar.transport.channel._USELESS", RateLimit(burst=5, per_second=0.1))
    too_late = (Kind.ROUND, Kind.ABANDON, *(activation() for _ in range(7)))
    outcome = train([honest("a"), by_hand(*too_late)], epochs=3, round_deadline_s=10.0)
    assert outcome.failure is None
    assert [counted.keys() for counted in outcome.counted] == [{"a"}] * 3
    assert "is not needed, and neither were 5 frames before it" in str(outcome.lives[1])


LAST_WORDS = {
    "a broken rule": by_hand(Kind.ROUND, activation(), activation(n=2, samples=6)),
    "more than there is room for": by_hand(Kind.ROUND, activation(), activation(n=2), activation(iteration=2)),
    "what cannot be read": by_hand(Kind.ROUND, activation(), Message(Kind.TRACE, 1, body=Body.of(b"?"))),
    "an end that cannot be read": by_hand(Kind.ROUND, Message(Kind.END_EPOCH, 1)),
    "half a model that is of no use": by_hand(*EPOCH_BY_HAND[1:-3], model(2)),
    "nothing": roaming("b", 6, pause_s=5.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("last", LAST_WORDS)
def test_the_session_of_a_lost_device_is_freed_without_garbage_collection(last: str) -> None:
    left: list[Session] = []

    class Looking(ScriptedLearner):
        def aggregate(self, returned: Sequence[TrainedPart], *, keep_before: bool = False) -> None:
            super().aggregate(returned, keep_before=keep_before)
            if len(self.averaged) == 3:
                left.extend(one for one in gc.get_objects() if type(one) is Session and one.is_over)

    gc.collect()
    gc.disable()  # in a program with as many objects as torch has, the collector hardly ever looks at them all
    try:
        outcome = train([honest("a"), LAST_WORDS[last]], epochs=3, resume_window_s=2.0, learner=Looking)
    finally:
        gc.enable()
    assert [event.device for event in outcome.of(Lost)] == ["b"]
    assert outcome.learner is not None
    assert len(outcome.learner.averaged) == 3
    assert not left


def test_an_unusable_model_does_not_count_and_its_device_gets_the_reason() -> None:
    class Choosy(ScriptedLearner):
        def aggregate(self, returned: Sequence[TrainedPart], *, keep_before: bool = False) -> None:
            if any(back.device == "b" for back in returned):
                raise UnusableModelError("b", "b returned no valid model.")
            super().aggregate(returned, keep_before=keep_before)

    outcome = train([honest("a"), honest("b")], epochs=2, learner=Choosy)
    assert outcome.failure is None
    assert outcome.counted == [{"a": 20}, {"a": 20}]
    assert "b returned no valid model" in str(outcome.lives[1])
    assert outcome.left_running == 0


def test_changes_that_cannot_be_decoded_exclude_only_their_own_device() -> None:
    class Choosy(ScriptedLearner):
        def decode(self, device: str, body: Body) -> None:
            assert body.encoding == "changes"
            raise UnusableModelError(device, f"{device} returned no valid model.")

    changes = Message(Kind.MODEL, 1, body=Body(16, encoding="changes"))
    said = (activation(n=1), activation(n=2), Kind.GRADIENT, Kind.GRADIENT, end_epoch(), changes)
    outcome = train([honest("a"), by_hand(Kind.ROUND, *said)], epochs=2, learner=Choosy)
    assert outcome.failure is None
    assert outcome.counted == [{"a": 20}, {"a": 20}]
    assert "b returned no valid model" in str(outcome.lives[1])
    assert outcome.learner is not None
    assert outcome.learner.averaged == [["a"], ["a"]]  # it was known before all others' models were touched
    assert outcome.left_running == 0


def test_a_failure_on_the_server_ends_the_training_instead_of_hanging() -> None:
    class Broken(ScriptedLearner):
        def aggregate(self, returned: Sequence[TrainedPart], *, keep_before: bool = False) -> None:  # noqa: ARG002
            raise TrainingError(f"no memory for {len(returned)} models")

    outcome = train([honest("a"), honest("b")], epochs=2, learner=Broken)
    assert "no memory for 2 models" in str(outcome.failure)
    assert ["no memory for 2 models" in str(life) for life in outcome.lives] == [True, True]
    assert outcome.left_running == 0

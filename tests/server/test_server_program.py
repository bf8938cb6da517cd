"""The server's rounds in virtual time: which devices take part, when the training stops, and with which plans."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from support.server_world import (
    EPOCH_BY_HAND,
    PROFILE,
    Outcome,
    activation,
    by_hand,
    end_epoch,
    hello,
    honest,
    model,
    scripted,
    trace,
    train,
    until,
)  # fmt: skip

from pipar.errors import PlanError, TrainingError, UnusableProfileError
from pipar.events import Dropped, Lost, Replanned
from pipar.methods import METHODS, Plan
from pipar.planner import replanner
from pipar.profiling.profile import Profile
from pipar.settings.links import Link
from pipar.transport.channel import Channel
from pipar.wire.messages import Body, Kind, Message, norm_body


def as_json(profile: Profile) -> object:
    return json.loads(profile.to_json())


OTHER_NETWORK = replace(PROFILE, model="another", layers=(PROFILE.layers[0], replace(PROFILE.layers[1], name="three")))


def test_a_scripted_device_that_keeps_the_protocol_is_trained_with() -> None:
    outcome = train([honest("a"), by_hand(*EPOCH_BY_HAND)])
    assert outcome.failure is None
    assert outcome.lives == [None, None]
    assert [result.samples for result in outcome.results] == [30]
    assert outcome.left_running == 0


# --- rounds


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_every_sample_of_every_epoch(method: str) -> None:
    outcome = train([honest("a", 20), honest("b", 25)], method=method, epochs=3)
    assert outcome.failure is None
    assert [(result.epoch, result.samples) for result in outcome.results] == [(1, 45), (2, 45), (3, 45)]
    assert outcome.left_running == 0


def test_split_learning_lets_one_device_compute_at_a_time() -> None:
    outcome = train([honest("b"), honest("a")], method="sl", epochs=2)
    forwards = sorted((s for s in outcome.spans if s.kind == "fc" and not s.waiting), key=lambda span: span.start)
    turns = [(span.epoch, span.owner) for span in forwards]
    assert list(dict.fromkeys(turns)) == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
    assert turns == sorted(turns)


def test_a_shared_model_is_served_by_iteration_and_then_by_name() -> None:
    outcome = train([honest("b", 30), honest("a", 20)], method="sfl2")
    served = [(span.iteration, span.device) for span in outcome.spans if span.kind == "fs"]
    assert served == [(1, "a"), (1, "b"), (2, "a"), (2, "b"), (3, "b")]


def test_spans_of_devices_that_are_not_traced_are_not_kept_although_they_send_them() -> None:
    outcome = train([honest("a"), honest("b")], keep_spans=frozenset({"a"}))
    assert {span.owner for span in outcome.spans} == {"a", "server"}
    assert outcome.results[0].utilisation["device"] > 0


def test_no_device_has_more_micro_batches_outstanding_than_its_plan_says() -> None:
    outcome = train([honest("a", 30), honest("b", 30)])
    events = []
    for span in outcome.spans:
        if span.owner == "a" and span.kind == "fc" and not span.waiting:
            events.append((span.end, 1))
        if span.device == "a" and span.kind == "encode":
            events.append((span.end, -1))
    most, outstanding = 0, 0
    for _, change in sorted(events):
        outstanding += change
        most = max(most, outstanding)
    assert (most, outstanding) == (2, 0)


# --- validation and early stop

BATCHES = [(50, 50), (50, 50)]


def test_training_stops_when_validation_has_not_improved_for_as_long_as_patience_says() -> None:
    losses = [3.0, 2.0, 2.5, 2.25, 2.125, 1.0, 1.0, 1.0]
    outcome = train([honest("a"), honest("b")], epochs=8, patience=2, validation=BATCHES, losses=losses)
    # The best is epoch 2; at the end of epoch 5 the losses up to epoch 4 are known: two without improvement.
    assert outcome.failure is None
    assert [result.val_loss for result in outcome.results] == losses[:5]


def test_training_continues_while_validation_improves() -> None:
    losses = [4.0, 5.0, 3.0, 5.0, 2.0, 5.0]
    outcome = train([honest("a"), honest("b")], epochs=6, patience=2, validation=BATCHES, losses=losses)
    assert len(outcome.results) == 6


@pytest.mark.parametrize(("done", "rounds"), [([3.0, 2.0, 2.5, 2.5], 0), ([3.0, 2.0, 2.5], 1), ([3.0], 3)])
def test_a_resumed_training_stops_where_it_would_have_without_a_break(done: list[float], rounds: int) -> None:
    losses = [3.0, 2.0, 2.5, 2.5, 1.0][len(done) :]
    more = {"epochs": 9, "patience": 1, "validation": [(10, 10)]}
    outcome = train([honest("a"), honest("b")], done=done, losses=losses, **more)  # type: ignore[arg-type]
    assert outcome.failure is None
    assert len(outcome.counted) == rounds
    assert outcome.lives == [None, None]


def test_without_patience_all_epochs_are_trained() -> None:
    outcome = train([honest("a"), honest("b")], epochs=4, validation=BATCHES, losses=[1.0, 2.0, 3.0, 4.0])
    assert [result.val_loss for result in outcome.results] == [1.0, 2.0, 3.0, 4.0]
    assert {result.val_accuracy for result in outcome.results} == {1.0}


def test_validation_never_delays_a_stage() -> None:
    # Each batch takes 3 s and there are twenty: far longer than an epoch, but none is as long as one.
    # The devices differ in speed: the order of two that arrive at the same moment is not tested here.
    devices = [honest("a"), honest("b", speed=0.9)]
    alone = train(devices, epochs=4)
    beside = train(devices, epochs=4, validation=[(20, 20)] * 20, losses=[1.0] * 4)
    assert alone.results[0].seconds > 3.0
    assert min(result.validation_s for result in beside.results) > max(result.seconds for result in alone.results)

    def timing(outcome: Outcome) -> list[tuple[str, str, str, float, float]]:
        spans = (span for span in outcome.spans if span.kind not in ("validate", "round"))
        return sorted((span.owner, span.lane, span.name, span.start, span.end) for span in spans)

    assert timing(alone) == timing(beside)
    assert [result.seconds for result in alone.results] == [result.seconds for result in beside.results]


def test_a_validation_that_fails_ends_the_training_instead_of_hanging() -> None:
    # The script of losses is too short: the evaluator of epoch 2 raises.
    outcome = train([honest("a"), honest("b")], epochs=3, validation=BATCHES, losses=[1.0])
    assert isinstance(outcome.failure, TrainingError)
    assert "The validation of epoch 2 failed" in str(outcome.failure)


# --- profiles that devices bring with them


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        ({}, "The device's profile cannot be used: "),
        ("fast", "The device's profile cannot be used: "),
        (as_json(OTHER_NETWORK), "is another whose layer 2 is 'three', but that of hand is 'two'"),
    ],
    ids=["empty", "text", "another network"],
)
def test_a_device_with_an_unusable_profile_gets_the_reason_and_may_join_again(profile: object, reason: str) -> None:
    async def first_try(channel: Channel) -> None:
        channel.post(hello("b", profile=profile))
        await until(channel, Kind.STOP)

    second_try = honest("b", profile=PROFILE, starts_s=1.0)
    outcome = train([honest("a"), scripted(first_try), second_try])
    assert outcome.failure is None
    assert reason in str(outcome.lives[1])


def test_plans_are_made_when_the_last_device_has_joined_and_hold_from_the_first_epoch_on() -> None:
    faster = replace(PROFILE, machine="faster")
    given: list[Mapping[str, Profile]] = []

    def plan(profiles: Mapping[str, Profile]) -> Mapping[str, Plan]:
        given.append(profiles)
        return {"a": Plan(1, 2), "b": Plan(2, 1)}

    outcome = train([honest("b", profile=faster), honest("a")], plan_joined=plan, epochs=2)
    assert outcome.failure is None
    assert given == [{"b": faster}]
    assert {span.device for span in outcome.spans if span.kind == "fs"} == {"a"}
    assert [event.epoch for event in outcome.of(Replanned)] == [1]


def test_plans_that_do_not_change_are_not_announced() -> None:
    outcome = train([honest("a", profile=PROFILE), honest("b")], plan_joined=lambda _: dict.fromkeys("ab", Plan(1, 2)))
    assert outcome.failure is None
    assert not outcome.of(Replanned)


def test_devices_that_no_plan_fits_get_the_reason() -> None:
    def plan(_: Mapping[str, Profile]) -> Mapping[str, Plan]:
        raise PlanError("b is too small for any plan.")

    outcome = train([honest("a"), honest("b")], plan_joined=plan)
    assert isinstance(outcome.failure, PlanError)
    assert [str(life) for life in outcome.lives] == ["The server refused this device: b is too small for any plan."] * 2
    assert outcome.left_running == 0


def test_one_device_whose_profile_cannot_be_planned_with_is_dismissed_alone() -> None:
    def plan(profiles: Mapping[str, Profile]) -> Mapping[str, Plan]:
        if profiles["b"].machine == "wild":
            raise UnusableProfileError("b", "No plan can be made from the profile of 'b'.")
        return dict.fromkeys("ab", Plan(1, 2))

    wild = honest("b", profile=replace(PROFILE, machine="wild"))
    again = honest("b", profile=PROFILE, starts_s=1.0)
    outcome = train([honest("a"), wild, again], plan_joined=plan, min_devices=2)
    assert outcome.failure is None
    assert [str(life) for life in outcome.lives] == [
        "None", "The server refused this device: No plan can be made from the profile of 'b'.", "None"
    ]  # fmt: skip
    assert outcome.counted == [{"a": 20, "b": 20}]


# --- other plans between two rounds


async def to_the_whole_network(_: Mapping[str, Link]) -> Mapping[str, Plan]:
    return {"a": Plan(1, 2), "b": Plan(2, 1)}


@pytest.fixture
def every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round's links count as changed."""
    monkeypatch.setattr(replanner, "NOTICED", -1.0)


STATE = Message(Kind.STATE, 1, body=Body(16, encoding="safetensors"))
REPLANNED = (*EPOCH_BY_HAND[:-2], Kind.PLAN, STATE, Kind.REPORT, trace())
SECOND = (Kind.ROUND, end_epoch(2, loss_sum=1.0), model(2), Kind.REPORT, trace(2))


@pytest.mark.usefixtures("every_round")
def test_a_device_that_answers_a_plan_is_trained_with_by_it() -> None:
    outcome = train([honest("a"), by_hand(*REPLANNED, *SECOND)], epochs=2, keep_state=True, replan=to_the_whole_network)
    assert outcome.failure is None
    assert [result.samples for result in outcome.results] == [30, 30]
    assert outcome.left_running == 0


@pytest.mark.usefixtures("every_round")
@pytest.mark.parametrize(
    ("keep", "said", "reason"),
    [
        (True, (end_epoch(2, loss_sum=1.0),), "instead of STATE of epoch 1."),
        (True, (activation(epoch=2),), "instead of STATE of epoch 1."),
        (True, (replace(STATE, epoch=2),), "instead of STATE of epoch 1."),
        (True, (STATE, STATE), "instead of END_EPOCH of epoch 2."),
        (False, (STATE,), "instead of END_EPOCH of epoch 2."),
        (False, (activation(n=1, epoch=2), activation(n=2, epoch=2)), "a batch has at most 0 micro-batches"),
    ],
    ids=["no answer", "an activation instead", "of another epoch", "twice", "not asked for", "by the plan before"],
)
def test_a_device_that_answers_a_plan_wrongly_is_disconnected(
    keep: bool, said: tuple[Message, ...], reason: str
) -> None:
    script = (*EPOCH_BY_HAND[:-2], Kind.PLAN, Kind.REPORT, trace(), Kind.ROUND, *said)
    outcome = train([honest("a"), by_hand(*script)], epochs=2, keep_state=keep, replan=to_the_whole_network)
    assert outcome.failure is None
    assert outcome.counted == [{"a": 20, "b": 10}, {"a": 20}]
    assert [(event.device, event.epoch) for event in outcome.of(Dropped)] == [("b", 2)]
    assert reason in outcome.of(Lost)[0].reason
    assert reason in str(outcome.lives[1])
    assert outcome.left_running == 0


# --- norms of gradients


BATCH_BY_HAND = EPOCH_BY_HAND[:5]


def norm(squared: float = 4.0, iteration: int = 1, epoch: int = 1) -> Message:
    return Message(Kind.NORM, epoch, iteration, body=norm_body(squared))


def test_devices_exchange_the_norms_of_their_gradients_after_each_batch() -> None:
    script = (*BATCH_BY_HAND, Kind.NORM, norm(), *EPOCH_BY_HAND[5:])
    outcome = train([honest("a"), by_hand(*script)], norms=1)
    assert outcome.failure is None
    assert [result.samples for result in outcome.results] == [30]
    assert outcome.left_running == 0


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (end_epoch(), "instead of NORM of epoch 1."),
        (activation(iteration=2), "instead of NORM of epoch 1."),
        (norm(epoch=2), "instead of NORM of epoch 1."),
        (norm(iteration=2), "instead of the norm of iteration 1."),
        (norm(float("nan")), "carries no squared norm from 0 to 1e+36"),
        (norm(float("inf")), "carries no squared norm"),
        (norm(-1.0), "carries no squared norm"),
        (replace(norm(), body=Body.of(b"12")), "carries no squared norm"),
    ],
    ids=["no norm", "the next batch", "epoch", "iteration", "not a number", "infinite", "negative", "short"],
)
def test_a_device_that_answers_a_norm_wrongly_is_disconnected(said: Message, reason: str) -> None:
    outcome = train([honest("a"), by_hand(*BATCH_BY_HAND, Kind.NORM, said)], norms=1)
    assert outcome.failure is None
    assert outcome.counted == [{"a": 20}]
    assert reason in str(outcome.lives[1])
    assert outcome.left_running == 0


def test_a_norm_that_is_not_asked_for_ends_the_session() -> None:
    outcome = train([honest("a"), by_hand(*BATCH_BY_HAND, norm(), *EPOCH_BY_HAND[5:])])
    assert outcome.counted == [{"a": 20}]
    assert "instead of END_EPOCH of epoch 1." in str(outcome.lives[1])


@pytest.mark.usefixtures("every_round")
def test_after_the_last_epoch_no_device_gets_another_plan() -> None:
    outcome = train([honest("a"), honest("b")], epochs=1, replan=to_the_whole_network)
    assert outcome.failure is None
    assert not outcome.of(Replanned)

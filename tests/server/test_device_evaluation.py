"""The server waits for scores between two rounds; a device that does not send them costs no round."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from support.server_world import (
    EPOCH_BY_HAND,
    Outcome,
    ScriptedLearner,
    activation,
    by_hand,
    end_epoch,
    hello,
    honest,
    model,
    scripted,
    trace,
    train,
)

from pipar.errors import LinkError
from pipar.events import Event, Lost, NotEvaluated, Scores
from pipar.launch.sizes_only import SizesOnlyEvaluation
from pipar.server.device_evaluation import DeviceEvaluation
from pipar.server.device_messages import Introduction
from pipar.server.device_scores import mean_over_devices, worst_decile
from pipar.server.expected_scores import ExpectedScores
from pipar.transport.channel import Channel
from pipar.wire.messages import Kind, Message, json_body

TRAINED = EPOCH_BY_HAND[: EPOCH_BY_HAND.index(Kind.REPORT)]
AFTERWARDS = EPOCH_BY_HAND[len(TRAINED) :]


class Scored(SizesOnlyEvaluation):
    """Gives the same scores for every model."""

    def scores(self) -> Scores:
        return Scores(0.5, 0.75)


class Measuring(ScriptedLearner):
    """Knows two values."""

    @property
    def higher_is_better(self) -> dict[str, bool]:
        return {"loss": False, "accuracy": True}


def scores(epoch: int = 1, **content: object) -> Message:
    values = {"samples": 4, "values": {"loss": 2.0, "accuracy": 0.25, "unknown": 1.0}}
    return Message(Kind.SCORES, epoch, body=json_body({**values, **content}))


def trained_with(*after: Message | Kind | float, epochs: int = 1, leaves: bool = False) -> Outcome:
    """Train with an honest device, and one that says this after its round."""
    other = by_hand(*TRAINED, *after, leaves=leaves, evaluation=4)
    lives = [honest("a", evaluation=Scored(5)), other]
    return train(lives, learner=Measuring, epochs=epochs, round_deadline_s=100.0)


def test_scores_of_all_devices_are_in_the_result_of_the_round() -> None:
    outcome = trained_with(Kind.EVALUATE, scores(), *AFTERWARDS)
    (result,) = outcome.results
    assert outcome.failure is None
    assert result.device_metrics["devices"] == {
        "a": {"samples": 5, "loss": 0.5, "accuracy": 0.75},
        "b": {"samples": 4, "loss": 2.0, "accuracy": 0.25},
    }
    assert result.device_metrics["mean"] == {"loss": 1.25, "accuracy": 0.5}
    assert result.device_metrics["worst_decile"] == {"loss": 2.0, "accuracy": 0.25}
    assert result.device_metrics["missing"] == {}


def test_a_device_that_is_lost_during_the_evaluation_says_so_and_costs_no_round() -> None:
    outcome = trained_with(Kind.EVALUATE, leaves=True, epochs=2)
    assert [sorted(counted) for counted in outcome.counted] == [["a", "b"], ["a"]]
    first, second = (result.device_metrics for result in outcome.results)
    assert list(first["devices"]) == ["a"]
    assert first["missing"]["b"].startswith("it was lost during the evaluation")
    assert first["mean"] == {"loss": 0.5, "accuracy": 0.75}
    assert list(second["devices"]) == ["a"]
    assert outcome.of(Lost)


def test_a_device_that_is_too_slow_has_no_values_and_its_late_answer_is_ignored() -> None:
    outcome = trained_with(Kind.EVALUATE, 200.0, scores(), *AFTERWARDS, epochs=2)
    first = outcome.results[0].device_metrics
    assert first["missing"] == {"b": "it did not answer within 100 s"}
    assert 100 <= first["seconds"] < 101
    assert not outcome.of(Lost)


def test_a_device_that_cannot_evaluate_says_why_and_is_not_asked_again() -> None:
    first = (Kind.EVALUATE, scores(refusal="no room"), *AFTERWARDS)
    outcome = trained_with(*first)
    assert outcome.results[0].device_metrics["missing"] == {"b": "no room"}
    assert outcome.results[0].device_metrics["devices"].keys() == {"a"}


def test_nothing_is_evaluated_if_no_device_has_samples_for_it() -> None:
    outcome = train([honest("a"), honest("b")], learner=Measuring)
    assert outcome.results[0].device_metrics == {}


def test_a_device_without_evaluation_samples_is_listed_beside_others() -> None:
    outcome = train([honest("a", evaluation=Scored(5)), honest("b")], learner=Measuring)
    assert outcome.results[0].device_metrics["missing"] == {"b": "it has no samples to evaluate on"}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"samples": 5}, "no values on the device's 4 evaluation samples"),
        ({"values": [1.0]}, "no values on the device's 4 evaluation samples"),
        ({"values": {"loss": "low"}}, "it has to be a number"),
        ({"values": {"loss": True}}, "it has to be a number"),
        ({"values": {"loss": 1.0, "accuracy": 1e300}}, "it has to be a share"),
        ({"values": {"accuracy": -0.5}}, "it has to be a share"),
        ({"values": {str(n): 1.0 for n in range(2000)}}, "no values on the device's 4 evaluation samples"),
    ],
)
def test_wrong_scores_end_the_session_and_not_the_round(content: dict[str, object], why: str) -> None:
    outcome = trained_with(Kind.EVALUATE, scores(**content), Kind.STOP, leaves=True)
    assert sorted(outcome.counted[0]) == ["a", "b"]
    assert why in outcome.results[0].device_metrics["missing"]["b"]
    assert why in str(outcome.lives[1])


def test_scores_that_nobody_asked_for_end_the_session() -> None:
    outcome = train([honest("a"), by_hand(Kind.ROUND, scores(), Kind.STOP)], learner=Measuring)
    assert "the server has sent no such model to evaluate" in str(outcome.lives[1])
    assert sorted(outcome.counted[0]) == ["a"]


def test_devices_that_all_lack_memory_are_listed() -> None:
    lacking = [by_hand(*TRAINED, *AFTERWARDS, name=name, no_evaluation="too small") for name in "ab"]
    outcome = train(lacking, learner=Measuring)
    assert outcome.results[0].device_metrics["missing"] == {"a": "too small", "b": "too small"}


class Failing(Scored):
    """Has a metric that cannot be computed on its samples."""

    def __call__(self, batch: None, /) -> None:  # noqa: ARG002
        raise ValueError("no sample of class 7")


def test_a_device_on_which_the_evaluation_fails_trains_on_and_keeps_the_text_of_the_error() -> None:
    seen: list[Event] = []
    failing = honest("b", evaluation=Failing(4), observe=seen.append)
    outcome = train([honest("a", evaluation=Scored(5)), failing], learner=Measuring, epochs=2)
    assert outcome.failure is None
    assert [sorted(counted) for counted in outcome.counted] == [["a", "b"], ["a", "b"]]
    for result in outcome.results:
        assert result.device_metrics["missing"] == {"b": "the evaluation failed on it: ValueError"}
    assert [event for event in seen if isinstance(event, NotEvaluated)] == [
        NotEvaluated("b", 1, "ValueError: no sample of class 7")
    ]


def test_a_device_that_has_not_answered_in_time_is_not_asked_again_before_it_has() -> None:
    async def refusals() -> list[str | None]:
        waiting = ExpectedScores(Introduction("b", 9, evaluation_samples=4))
        waiting.expect(1)
        waiting.give_up()
        silent = waiting.refusal
        assert not waiting.take(scores())
        return [silent, waiting.refusal]

    assert asyncio.run(refusals()) == ["it has not answered for an earlier model yet", None]


def epochs_asked(outcome: Outcome) -> list[int]:
    """Return the epochs whose models device b was asked to evaluate, or was too late for."""
    rows = [(result.epoch, result.device_metrics) for result in outcome.results]
    return [epoch for epoch, row in rows if "b" in row["devices"] or "did not answer" in row["missing"]["b"]]


def test_a_device_that_is_lost_while_its_model_is_packed_is_not_waited_for() -> None:
    async def answer() -> str:
        session = ExpectedScores(Introduction("b", 9, evaluation_samples=4))
        session.fail(LinkError("no power"))
        return str(session.expect(1).exception())

    assert asyncio.run(answer()) == "it was lost during the evaluation: no power"


def test_a_device_that_is_always_late_holds_up_ever_fewer_rounds() -> None:
    """It answers as soon as it is no longer waited for, and would be asked again for the next model."""

    async def late(channel: Channel) -> None:
        channel.post(hello("b", evaluation=4))
        while (message := await channel.receive()).kind is not Kind.STOP:
            epoch = message.epoch
            if message.kind is Kind.ROUND:
                for n in (1, 2):
                    channel.post(activation(n=n, epoch=epoch))
                channel.post(end_epoch(epoch))
                channel.post(model(epoch))
            elif message.kind is Kind.EVALUATE:
                await asyncio.sleep(150.0)
                channel.post(scores(epoch))
            elif message.kind is Kind.REPORT:
                channel.post(trace(epoch))

    lives = [honest("a", evaluation=Scored(5)), scripted(late, "b")]
    outcome = train(lives, learner=Measuring, epochs=12, round_deadline_s=100.0)
    assert epochs_asked(outcome) == [1, 4, 9, 12]
    assert [sorted(counted) for counted in outcome.counted] == [["a", "b"]] * 12


@pytest.mark.parametrize(("rate_bps", "limit_s"), [(8e6, 72.0), (1e5, 230.0), (1.0, 230.0)])
def test_no_device_makes_the_others_wait_longer_by_taking_its_model_slowly(rate_bps: float, limit_s: float) -> None:
    async def limit() -> float:
        learner: Any = SimpleNamespace(model_bytes=lambda: 1_000_000)
        asked: Any = [SimpleNamespace(channel=SimpleNamespace(rate_bps=lambda _: rate_bps))]
        nothing: Any = None
        training: Any = SimpleNamespace(round_deadline_s=None, epochs=1)
        return DeviceEvaluation(learner, nothing, nothing, training)._limit_s(asked, 1, round_s=2.0)

    assert asyncio.run(limit()) == limit_s


# --- mean and worst decile

WAYS = {"loss": False, "accuracy": True}


@pytest.mark.parametrize(("devices", "tenth"), [(1, 1), (9, 1), (10, 1), (11, 2), (25, 3)])
def test_the_worst_decile_is_the_mean_over_a_tenth_of_the_devices(devices: int, tenth: int) -> None:
    values = {f"d{n:02}": {"loss": float(n), "accuracy": n / 100} for n in range(devices)}
    worst = worst_decile(values, WAYS)
    assert worst["loss"] == sum(range(devices - tenth, devices)) / tenth
    assert worst["accuracy"] == pytest.approx(sum(range(tenth)) / tenth / 100)


def test_values_that_a_device_lacks_are_left_out_but_a_diverged_loss_counts() -> None:
    nan = float("nan")
    values = {"a": {"loss": nan, "accuracy": nan}, "b": {"loss": 1.0, "accuracy": 0.5}, "c": {"loss": 3.0}}
    assert mean_over_devices(values, WAYS) == {"loss": float("inf"), "accuracy": 0.5}
    assert mean_over_devices({}, WAYS) == worst_decile({}, WAYS) == {}

"""A device that joins and then does nothing does not stall the others for ever, with no timeout configured."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from itertools import pairwise

import pytest
from support.server_world import (
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
)

from pipar.events import Away, Back, Dropped, Lost, RoundRestarted, TimeoutsChosen
from pipar.server.learned_timeouts import ChosenTimeouts
from pipar.server.timeouts import Forecast
from pipar.transport.channel import Channel
from pipar.wire.messages import Kind, Message

#: An epoch of an honest device takes about ten seconds.
ROUND_S = 10.0
FOR_EVER_S = 3000.0


def forecasts(names: Collection[str]) -> dict[str, Forecast]:
    return dict.fromkeys(names, Forecast(ROUND_S, 4 * ROUND_S))


CHOSEN = ChosenTimeouts(forecasts=forecasts)


def test_a_device_that_never_answers_is_excluded_by_the_forecast() -> None:
    silent = by_hand(Kind.ROUND, FOR_EVER_S)
    outcome = train([honest("a"), silent], epochs=3, timeouts=CHOSEN)
    assert outcome.counted == [{"a": 20}] * 3
    assert [event.epoch for event in outcome.of(Dropped)] == [1, 2, 3]
    assert "much longer than expected" in outcome.of(Dropped)[0].reason
    assert outcome.left_running == 0


@pytest.mark.slow
def test_a_device_that_never_answers_costs_less_in_every_round() -> None:
    began: list[float] = []

    async def silent(channel: Channel) -> None:
        channel.post(hello("b"))
        while True:
            await until(channel, Kind.ROUND)
            began.append(asyncio.get_running_loop().time())

    outcome = train([honest("a"), scripted(silent)], epochs=5, timeouts=CHOSEN)
    lengths = [after - before for before, after in pairwise(began)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < 3 * ROUND_S
    assert outcome.counted == [{"a": 20}] * 5


def test_a_device_that_claims_to_be_slow_and_never_answers_costs_a_bounded_time() -> None:
    claimed = ChosenTimeouts(forecasts=lambda names: dict.fromkeys(names, Forecast(18_000.0, 20_000.0)))
    outcome = train([honest("a"), by_hand(Kind.ROUND)], epochs=3, timeouts=claimed)
    lengths = [result.seconds for result in outcome.results]
    assert lengths[0] < 26 * ROUND_S
    assert lengths[2] < lengths[1] < lengths[0]
    assert outcome.counted == [{"a": 20}] * 3
    window_s = outcome.of(TimeoutsChosen)[-1].resume_s
    assert window_s is not None
    assert window_s < 2 * ROUND_S, "time wasted on a lost device does not count"


def test_devices_that_differ_twentyfold_are_not_excluded() -> None:
    outcome = train([honest("a"), honest("b", speed=0.05)], epochs=3, timeouts=CHOSEN)
    assert outcome.counted == [{"a": 20, "b": 20}] * 3
    assert outcome.of(Dropped) == []


def test_devices_that_train_in_turn_have_one_report_of_their_timeouts_in_a_round() -> None:
    outcome = train([honest("a"), honest("b", speed=0.2)], method="sl", epochs=6, timeouts=CHOSEN)
    assert 1 <= len(outcome.of(TimeoutsChosen)) <= 3


@pytest.mark.parametrize("method", ["sl", "sfl2"])
def test_a_device_that_never_answers_does_not_keep_a_shared_model(method: str) -> None:
    outcome = train([honest("a"), by_hand(Kind.ROUND, FOR_EVER_S)], method=method, epochs=2, timeouts=CHOSEN)
    assert outcome.counted == [{"a": 20}] * 2
    assert {event.device for event in outcome.of(Dropped)} == {"b"}


@pytest.mark.slow
def test_a_device_that_shows_life_but_no_progress_is_excluded() -> None:
    async def hung(channel: Channel) -> None:
        channel.post(hello("b"))
        await until(channel, Kind.ROUND)
        for _ in range(2000):
            channel.post(Message(Kind.ALIVE))
            await asyncio.sleep(0.5)

    outcome = train([honest("a"), scripted(hung)], epochs=2, timeouts=CHOSEN)
    assert outcome.counted == [{"a": 20}] * 2
    assert outcome.of(Lost) == [], "it is alive"


def test_a_device_that_trickles_is_excluded_in_the_end() -> None:
    async def trickles(channel: Channel) -> None:
        channel.post(hello("b", samples=1000))
        await until(channel, Kind.ROUND)
        for iteration in range(1, 101):
            for number in (1, 2):
                channel.post(activation(iteration, number))
            await until(channel, Kind.GRADIENT)
            await asyncio.sleep(60.0)

    outcome = train([honest("a"), scripted(trickles)], epochs=1, timeouts=CHOSEN)
    (dropped,) = outcome.of(Dropped)
    assert dropped.device == "b"
    assert outcome.counted == [{"a": 20}]


def test_a_device_that_shows_life_and_then_dies_is_lost_within_two_rounds() -> None:
    async def dies(channel: Channel) -> None:
        channel.post(hello("b"))
        for epoch in (1, 2):
            await until(channel, Kind.ROUND)
            for message in (Message(Kind.ALIVE), activation(1, 1, epoch=epoch), activation(1, 2, epoch=epoch)):
                channel.post(message)
            for _ in range(2):
                await until(channel, Kind.GRADIENT)
            channel.post(end_epoch(epoch))
            channel.post(model(epoch))
            await until(channel, Kind.REPORT)
            channel.post(trace(epoch))
        await asyncio.sleep(FOR_EVER_S)

    outcome = train([honest("a"), scripted(dies)], epochs=4, timeouts=CHOSEN)
    (lost,) = outcome.of(Lost)
    assert lost.device == "b"
    assert lost.reason.startswith("nothing was heard from it for ")
    assert outcome.counted == [{"a": 20, "b": 10}] * 2 + [{"a": 20}] * 2
    assert float(lost.reason.split()[-2]) < 2 * outcome.results[1].seconds


@pytest.mark.parametrize("cut", [8, 14])
def test_a_broken_connection_is_resumed_and_changes_nothing(cut: int) -> None:
    undisturbed = train([honest("a"), roaming("b")], epochs=3, timeouts=CHOSEN)
    outcome = train([honest("a"), roaming("b", cut)], epochs=3, timeouts=CHOSEN)
    assert len(outcome.of(Away)) == len(outcome.of(Back)) == 1
    assert outcome.counted == undisturbed.counted == [{"a": 20, "b": 20}] * 3


def test_a_device_that_is_too_slow_alone_is_not_excluded() -> None:
    outcome = train([honest("a", speed=0.01)], devices=("a",), epochs=1, timeouts=CHOSEN)
    assert outcome.counted == [{"a": 20}]
    assert outcome.of(Dropped) == []


@pytest.mark.slow
def test_devices_of_split_learning_that_are_all_too_slow_get_more_time() -> None:
    short = ChosenTimeouts(forecasts=lambda names: dict.fromkeys(names, Forecast(0.1, 0.2)))
    lives = [roaming("a", speed=0.08), roaming("b", speed=0.08)]
    outcome = train(lives, method="sl", epochs=1, timeouts=short, min_devices=2)
    assert outcome.of(RoundRestarted), "all were too late at first"
    assert outcome.counted == [{"a": 20, "b": 20}]

"""Numbers of a peer have a range: what is outside costs its sender the session, and other devices nothing."""

from __future__ import annotations

import json

import pytest
from support.hostile import says
from support.roaming import C, roam, same
from support.server_world import (
    EPOCH_BY_HAND,
    PROFILE,
    Named,
    activation,
    by_hand,
    end_epoch,
    hello,
    honest,
    model,
    scripted,
    train,
    until,
)  # fmt: skip
from support.training import Case

from pipar.errors import ProtocolError, TrainingError
from pipar.events import Lost
from pipar.execution.spans import COMPUTE, IO, EpochTrace, Totals, pack_trace
from pipar.methods import Plan
from pipar.privacy.budget import UpdateNoise
from pipar.transport.channel import Channel
from pipar.wire.messages import Body, Kind, Message, json_body
from pipar.wire.orders import Orders

#: As many digits as Python reads; one more than it can print, if anything is added.
ENDLESS = int("9" * 4300)
HELLOS: dict[str, dict[str, object]] = {
    "a count of updates": {"releases": ENDLESS, "spent": 1.0},
    "a count that cannot be printed when one is added": {"releases": 10**39, "spent": 1.0},
    "a cost": {"releases": 1, "spent": ENDLESS},
    "a cost that overflows when one is added": {"releases": 1, "spent": 1.7e308},
    "samples": {"samples": ENDLESS},
    "samples of all the world": {"samples": 10**30},
    "a format of a profile": {"profile": {"format": ENDLESS}},
    "a time in a profile": {"profile": {**json.loads(PROFILE.to_json()), "load_s": ENDLESS}},
}


def claims(**content: object) -> Named:
    async def live(channel: Channel) -> None:
        channel.post(hello("b", **content))
        await until(channel, Kind.STOP)

    return scripted(live, "b")


@pytest.mark.parametrize("case", HELLOS)
@pytest.mark.parametrize("terms", [None, UpdateNoise(1.0, 4.0, 1e-5)], ids=["plain", "private"])
def test_a_number_in_hello_costs_only_the_device_that_says_it(case: str, terms: UpdateNoise | None) -> None:
    outcome = train([claims(**HELLOS[case]), honest("a")], begin_with=1, epochs=2, terms=terms)
    assert outcome.failure is None
    assert isinstance(outcome.lives[0], TrainingError)
    assert len(str(outcome.lives[0])) < 1000
    assert outcome.counted == [{"a": 20}, {"a": 20}]
    assert outcome.left_running == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a count that cannot be printed when one is added", "samples of all the world"])
def test_the_weights_are_those_of_a_training_without_the_device_that_says_it(case: str) -> None:
    small = Case("pipar", sizes=(100, 60, 57), encoding="raw")
    expected = roam(small, {}, absent={C})
    trained = roam(small, {}, tampers={C: says(Kind.HELLO, **HELLOS[case])}, begins_with=2)
    assert C in trained.endings
    assert trained.counted == expected.counted
    assert same(trained.state, expected.state)


ENDS: dict[str, dict[str, object]] = {
    "samples": {"samples": ENDLESS},
    "bytes": {"up_bytes": ENDLESS, "up_s": 1.0},
    "seconds": {"up_bytes": 1, "up_s": ENDLESS},
    "a loss": {"loss_sum": 1e300},
    "an error": {"error": [1e308, 1e308]},
    "the number of a frame": {"ready": [[ENDLESS, 0, 1.0]]},
    "the chunk of a frame": {"came": [[1, -1, 1.0]]},
}


@pytest.mark.parametrize("case", ENDS)
def test_a_number_at_the_end_of_an_epoch_costs_only_the_device_that_says_it(case: str) -> None:
    said = (activation(n=1), activation(n=2), Kind.GRADIENT, Kind.GRADIENT, end_epoch(**ENDS[case]), model())
    outcome = train([honest("a"), by_hand(Kind.ROUND, *said)], epochs=2)
    assert outcome.failure is None
    assert outcome.counted == [{"a": 20}, {"a": 20}]
    assert len(str(outcome.lives[1])) < 1000


TRACES = {
    "a start before all time": {IO: Totals(1.0, 0.0, -1e308, 1.0), COMPUTE: Totals(1.0, 0.0, 0.0, 1.0)},
    "no start of a busy lane": {IO: Totals(1.0, 0.0, float("inf"), 1.0), COMPUTE: Totals(1.0, 0.0, 0.0, 1.0)},
    "a start after its end": {IO: Totals(1.0, 0.0, 9e9, 1.0), COMPUTE: Totals(1.0, 0.0, 0.0, 1.0)},
    "a lane with a name of a megabyte": {"x" * 900_000: Totals(), IO: Totals(), COMPUTE: Totals()},
    "a thousand lanes": {**{f"lane {n}": Totals() for n in range(1000)}, IO: Totals(), COMPUTE: Totals()},
}


@pytest.mark.parametrize("case", TRACES)
def test_a_number_in_a_trace_costs_only_the_device_that_says_it(case: str) -> None:
    said = Message(Kind.TRACE, 1, body=Body.of(pack_trace(EpochTrace("b", 1, TRACES[case])), encoding="trace"))
    outcome = train([honest("a"), by_hand(*EPOCH_BY_HAND[:-1], said)], epochs=2)
    assert outcome.failure is None
    assert [event.device for event in outcome.of(Lost)] == ["b"]
    assert 0 <= outcome.results[0].seconds < 1000
    assert outcome.counted == [{"a": 20, "b": 10}, {"a": 20}]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("micro_batches", 10**9),
        ("batch_size", 10**30),
        ("window", 10**9),
        ("session", 2**40),
        ("layers", 10**9),
        ("split_point", ENDLESS),
        ("releases", ENDLESS),
        ("budget", 1e308),
        ("changes_below_bps", float("inf")),
    ],
)
def test_a_device_refuses_orders_with_a_number_out_of_range(key: str, value: float) -> None:
    orders = Orders(1, Plan(1, 2), 2, 10, batch_statistics=False, keep_state=False)
    content = {name: one for name, one in orders.__dict__.items() if name != "plan"} | dict(orders.plan.__dict__)
    with pytest.raises(ProtocolError) as refused:
        Orders.read(Message(Kind.WELCOME, body=json_body({**content, key: value})))
    assert len(str(refused.value)) < 1000

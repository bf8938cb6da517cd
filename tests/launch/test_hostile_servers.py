"""A device that first meets a server which sends it too much trains as if it had not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from support.roaming import A, roam, same
from support.training import Case

from pipar.errors import LinkError
from pipar.execution.spans import DOWNLINK, Recorder
from pipar.methods import Plan
from pipar.transport.channel import Channel
from pipar.transport.interface import Transport
from pipar.wire.messages import Body, Kind, Message, json_body, read_json
from pipar.wire.orders import Orders

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 5  # of the case's network
HUGE = Body(2_400_000_000, encoding="safetensors")
ORDERS = Orders(session=3, plan=Plan(1, 2), layers=LAYERS, batch_size=10, batch_statistics=False, keep_state=False)
WELCOME = Message(Kind.WELCOME, body=ORDERS.to_body())


def with_number(key: str, value: int) -> Message:
    return Message(Kind.WELCOME, body=json_body(read_json(WELCOME) | {key: value}))


OVERREACHING = {
    "a model of 2.4 GB": [WELCOME, Message(Kind.MODEL, 0, body=HUGE)],
    "momentum of 2.4 GB": [WELCOME, Message(Kind.STATE, 0, body=HUGE)],
    "a welcome of 2.4 GB": [Message(Kind.WELCOME, body=HUGE)],
    "a session that no header can name": [with_number("session", 2**40)],
    "a split point beyond the network": [with_number("split_point", 10**9)],
    "batches beyond all limits": [with_number("batch_size", 10**12)],
}


def hostile(messages: list[Message], reasons: list[str]) -> Callable[[Transport], Awaitable[None]]:
    """A server that sends these messages, and keeps the reason with which the device leaves."""

    async def answer(transport: Transport) -> None:
        channel = Channel(transport, Recorder("stranger"), DOWNLINK)
        try:
            assert (await channel.receive()).kind is Kind.HELLO
            for message in messages:
                channel.post(message)
            while True:
                if (told := await channel.receive()).kind is Kind.FAULT:
                    reasons.append(read_json(told)["reason"])
        except LinkError:
            pass
        finally:
            await channel.close()

    return answer


@pytest.mark.slow
def test_a_device_leaves_a_server_that_sends_too_much_and_trains_the_same_weights_with_its_own() -> None:
    case = Case("pipar", (1, 3, 4), (7, 3, 2), momentum="keep")
    reasons: list[str] = []
    strangers = [hostile(messages, reasons) for messages in OVERREACHING.values()]
    met, alone = roam(case, {}, strangers={A: strangers}), roam(case, {})
    assert same(met.state, alone.state)
    assert met.counted == alone.counted
    assert any("announces 2400000000 bytes" in reason for reason in reasons)
    assert not any("\n" in reason for reason in reasons)

"""A device limits what it takes from its server: orders that it agreed to, in messages of the sizes that they need."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from pipar.device.intake import Terms
from pipar.device.interfaces import DeviceLanes, Equipment
from pipar.device.program import Device
from pipar.errors import OrdersError, PiparError, ProtocolError
from pipar.execution.clock import run_virtually
from pipar.execution.lanes import VirtualLanes
from pipar.execution.spans import DOWNLINK, UPLINK, Recorder
from pipar.launch.sizes_only import SizesOnlyDevicePart, SizesOnlySamples
from pipar.methods import Plan
from pipar.planner.costs import Costs
from pipar.profiling.memory import BASE_BYTES
from pipar.profiling.profile import LayerProfile, Profile
from pipar.transport.channel import Channel
from pipar.transport.in_memory import MemoryTransport, memory_pair
from pipar.wire.frames import Frame, cut_message
from pipar.wire.messages import Body, Kind, Message, json_body, read_json
from pipar.wire.orders import Orders, plan_body

# A batch of 10 takes the device 10 s forward and 20 s backward; a sample's activation has 400,000 bytes.
PROFILE = Profile(
    "hand",
    "float32",
    (10,),
    (
        LayerProfile("one", (10.0,), (20.0,), 400_000, 16, saved_bytes=1_000_000),
        LayerProfile("two", (1.0,), (1.0,), 4, 20_000_000),
    ),
)
PART_BYTES = (16, 20_000_016)
TERMS = Terms(PART_BYTES)
ORDERS = Orders(
    session=1, plan=Plan(1, 5), layers=2, batch_size=10, batch_statistics=False, keep_state=False
)  # fmt: skip
MODEL = Message(Kind.MODEL, 0, body=Body(16, encoding="safetensors"))
Script = Callable[[MemoryTransport], Awaitable[None]]


class Outcome:
    """How a device ended that met a scripted server, and how many bytes it read."""

    def __init__(self) -> None:
        self.failure: PiparError | None = None
        self.read_bytes = 0

    @property
    def reason(self) -> str:
        return str(self.failure)


class _CountedTransport:
    """Counts the bytes that a device reads."""

    def __init__(self, transport: MemoryTransport, outcome: Outcome) -> None:
        self._transport, self._outcome = transport, outcome

    async def write(self, frame: Frame) -> None:
        await self._transport.write(frame)

    async def read(self) -> Frame:
        frame = await self._transport.read()
        self._outcome.read_bytes += frame.size_bytes
        return frame

    async def close(self) -> None:
        await self._transport.close()


def meet(script: Script, *, terms: Terms | None = TERMS, samples: int = 20, for_s: float = 1000.0) -> Outcome:
    """Run a device against a scripted server in virtual time, for at most `for_s`."""
    outcome = Outcome()

    async def main() -> None:
        near, far = memory_pair()
        recorder = Recorder("pi")
        channel = Channel(_CountedTransport(near, outcome), recorder, UPLINK)
        costs = Costs(PROFILE)
        equipment = Equipment(
            SizesOnlySamples(samples),
            lambda orders: SizesOnlyDevicePart(PROFILE, orders.plan.split_point),
            lambda names, recorder: VirtualLanes(names, recorder, costs.seconds),
            terms=terms,
        )
        device = Device("pi", equipment, DeviceLanes.of(equipment, recorder), channel, recorder)
        playing = asyncio.create_task(script(far))
        try:
            async with asyncio.timeout(for_s):
                await device.train()
        except PiparError as error:
            outcome.failure = error
        except TimeoutError:
            pass
        finally:
            await channel.close()
        await asyncio.gather(playing, return_exceptions=True)

    run_virtually(main())
    return outcome


class _Says:
    """A server that sends some messages and answers nothing."""

    def __init__(self, messages: tuple[Message, ...]) -> None:
        self.heard: list[Message] = []
        self._messages = messages

    async def __call__(self, far: MemoryTransport) -> None:
        channel = Channel(far, Recorder("server"), DOWNLINK)
        assert (await channel.receive()).kind is Kind.HELLO
        for message in self._messages:
            channel.post(message)
        while True:
            self.heard.append(await channel.receive())


def says(*messages: Message) -> _Says:
    return _Says(messages)


def welcome(orders: Orders = ORDERS) -> Message:
    return Message(Kind.WELCOME, body=orders.to_body())


def plan(split_point: int) -> Message:
    return Message(Kind.PLAN, 1, body=plan_body(Plan(split_point, 5)))


# --- sizes


@pytest.mark.parametrize("encoding", ["safetensors", "changes"])
def test_a_model_that_is_larger_than_the_devices_part_is_refused_with_one_sentence(encoding: str) -> None:
    huge = Message(Kind.MODEL, 1, body=Body(2_400_000_000, encoding=encoding))
    outcome = meet(says(welcome(), MODEL, huge))
    assert isinstance(outcome.failure, ProtocolError)
    assert outcome.reason == f"{huge} announces 2400000000 bytes; at most 1000016 are allowed."
    assert outcome.read_bytes < 2_000_000, "nothing more is read of it than its first frame"


OVERSIZED = {
    "a welcome": [Message(Kind.WELCOME, body=Body(2_000_000))],
    "the model of a part that it does not have": [welcome(), Message(Kind.MODEL, 0, body=Body(20_000_016))],
    "a model before a plan for it": [welcome(), MODEL, Message(Kind.MODEL, 0, body=Body(20_000_016)), plan(2)],
    "optimiser state": [
        welcome(replace(ORDERS, keep_state=True)), MODEL, plan(2), Message(Kind.STATE, 1, body=Body(22_000_000)),
    ],
    "optimiser state that is not kept": [welcome(), MODEL, plan(2), Message(Kind.STATE, 1, body=Body(20_000_000))],
    "a gradient": [
        welcome(), MODEL, Message(Kind.ROUND, 1),
        Message(Kind.GRADIENT, 1, 1, 1, 2, 10, Body(900_000_000, dtype="float32")),
    ],
    "a model to evaluate, which it has not offered": [
        welcome(), MODEL, Message(Kind.EVALUATE, 1, body=Body(20_000_000)),
    ],
    "a command": [welcome(), MODEL, Message(Kind.ROUND, 1, body=Body(2_000_000))],
}  # fmt: skip


@pytest.mark.parametrize("case", OVERSIZED)
def test_no_message_is_larger_than_its_orders_need(case: str) -> None:
    outcome = meet(says(*OVERSIZED[case]))
    assert isinstance(outcome.failure, ProtocolError)
    assert "are allowed" in outcome.reason
    assert outcome.read_bytes < 3_000_000


@pytest.mark.parametrize(("copies", "is_taken"), [(1.0, False), (2.0, True)])
def test_the_optimiser_of_a_device_says_how_much_state_its_server_may_send(copies: float, is_taken: bool) -> None:
    state = Message(Kind.STATE, 1, body=Body(41_000_000))  # two values for each weight
    script = says(welcome(replace(ORDERS, keep_state=True)), MODEL, plan(2), state, Message(Kind.STOP))
    outcome = meet(script, terms=replace(TERMS, profile=replace(PROFILE, state_copies=copies), memory_bytes=2**40))
    assert ("announces 41000000 bytes" in outcome.reason) is not is_taken


def test_the_model_of_a_new_plan_may_arrive_before_the_device_has_followed_the_plan() -> None:
    server = says(welcome(), MODEL, plan(2), Message(Kind.MODEL, 1, body=Body(20_000_016)), Message(Kind.STOP))
    assert meet(server).failure is None
    assert Kind.STOP in {message.kind for message in server.heard}


def test_a_device_tells_its_server_why_it_leaves() -> None:
    server = says(welcome(replace(ORDERS, layers=3)))
    meet(server)
    (fault,) = [message for message in server.heard if message.kind is Kind.FAULT]
    assert "network of 2 layers" in read_json(fault)["reason"]


# --- numbers


def test_unread_commands_take_a_bounded_amount_of_memory() -> None:
    flood = [Message(Kind.MODEL, number, body=Body(1_000_000)) for number in range(500)]
    outcome = meet(says(welcome(), MODEL, Message(Kind.ROUND, 1), *flood), for_s=5.0)  # during its first forward
    assert outcome.failure is None
    assert outcome.read_bytes < 10_000_000


def test_a_server_that_acknowledges_nothing_is_left() -> None:
    async def script(far: MemoryTransport) -> None:
        await far.read()
        for message, number in [(welcome(), 0), (MODEL, 1)]:
            await far.write(next(cut_message(message, 1, number)))
        for number in range(2, 100_000):
            (frame,) = cut_message(Message(Kind.ABANDON, number), 1, number, acknowledged=0)
            await far.write(frame)
            await far.read()  # its answer, which the server has to acknowledge

    outcome = meet(script)
    assert isinstance(outcome.failure, ProtocolError)
    assert "has not acknowledged 150 messages" in outcome.reason


# --- orders

TOO_MUCH: dict[str, tuple[Terms, Orders, str]] = {
    "another network": (
        TERMS,
        replace(ORDERS, layers=3),
        "a network of 3 layers, but this device's network of 2 layers",
    ),
    "layers that do not fit": (
        Terms(PART_BYTES, replace(PROFILE, layers=PROFILE.layers[:1], total_layers=2), 400 * 2**20),
        replace(ORDERS, plan=Plan(2, 1)),
        "only the first 1 of its layers",
    ),
    "a batch that does not fit": (
        Terms(PART_BYTES, PROFILE, BASE_BYTES + 100_000_000, samples=10**6),
        replace(ORDERS, plan=Plan(1, 1), batch_size=10**6),
        "batches of 1000000 samples, which take about 1",
    ),
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_orders_that_a_device_did_not_agree_to_are_refused_with_one_sentence(case: str) -> None:
    terms, orders, sentence = TOO_MUCH[case]
    outcome = meet(says(welcome(orders)), terms=terms)
    assert isinstance(outcome.failure, OrdersError)
    assert sentence in outcome.reason
    assert "\n" not in outcome.reason


def test_a_new_plan_has_to_fit_as_well() -> None:
    only_first = Terms(PART_BYTES, replace(PROFILE, layers=PROFILE.layers[:1], total_layers=2), 400 * 2**20)
    outcome = meet(says(welcome(), MODEL, plan(2)), terms=only_first)
    assert isinstance(outcome.failure, OrdersError)


def test_a_batch_takes_no_more_memory_than_the_devices_own_samples() -> None:
    terms = Terms(PART_BYTES, PROFILE, BASE_BYTES + 100_000_000, samples=20)
    outcome = meet(
        says(welcome(replace(ORDERS, plan=Plan(1, 1), batch_size=10**6)), MODEL, Message(Kind.STOP)), terms=terms
    )
    assert outcome.failure is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("session", 2**32), ("session", -1), ("session", 0), ("layers", 10**9), ("batch_size", 10**7),
        ("micro_batches", 10**7), ("window", 10**7), ("releases", 10**400), ("split_point", 3),
    ],
)  # fmt: skip
def test_every_number_of_a_welcome_has_a_range(key: str, value: int) -> None:
    content = read_json(Message(Kind.WELCOME, body=ORDERS.to_body())) | {key: value}
    with pytest.raises(ProtocolError, match=r"it has to be|does not fit a network of 2 layers"):
        Orders.read(Message(Kind.WELCOME, body=json_body(content)))


@pytest.mark.parametrize(("micro_batches", "window"), [(10**7, 0), (5, 10**7), (10**400, 0)])
def test_every_number_of_a_plan_has_a_range(micro_batches: int, window: int) -> None:
    with pytest.raises(ProtocolError, match="does not fit"):
        ORDERS.changed_by(Message(Kind.PLAN, 1, body=plan_body(Plan(1, micro_batches, window))))

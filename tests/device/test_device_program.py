"""The device's program in virtual time, with a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pipar.device.interfaces import DeviceLanes, Equipment, MakeLanes
from pipar.device.program import Device
from pipar.errors import LinkError, PiparError, ProtocolError, SessionOverError, TrainingError
from pipar.execution.clock import run_virtually
from pipar.execution.lanes import VirtualLanes
from pipar.execution.spans import COMPUTE, DOWNLINK, UPLINK, EpochTrace, Recorder, Span, unpack_trace
from pipar.launch.sizes_only import SizesOnlyDevicePart, SizesOnlySamples
from pipar.methods import Plan
from pipar.planner.costs import Costs
from pipar.profiling.profile import LayerProfile, Profile
from pipar.transport.channel import Channel
from pipar.transport.in_memory import memory_pair
from pipar.wire.messages import Body, Kind, Message, json_body, norm_body, read_json
from pipar.wire.orders import Orders, plan_body

# A batch of 10 takes the device 10 s forward and 20 s backward.
PROFILE = Profile(
    "hand",
    "float32",
    (10,),
    (LayerProfile("one", (10.0,), (20.0,), 8, 16), LayerProfile("two", (1.0,), (1.0,), 4, 16)),
)
ORDERS = Orders(
    session=1,
    plan=Plan(1, 5),
    layers=2,
    batch_size=10,
    batch_statistics=False,
    keep_state=False,
)
MODEL = Message(Kind.MODEL, 0, body=Body(16, encoding="safetensors"))
Script = Callable[[Channel], Awaitable[None]]


class CountingPart(SizesOnlyDevicePart):
    """Counts the activations that it holds, and remembers the order of its work."""

    def __init__(self) -> None:
        super().__init__(PROFILE, 1)
        self.held, self.most, self.log = 0, 0, []

    def forward(self, micro_batch: int, piece: Any) -> Any:
        self.held += 1
        self.most = max(self.most, self.held)
        self.log.append(f"fc{micro_batch}")
        return super().forward(micro_batch, piece)

    def backward(self, micro_batch: int, gradient: Any) -> None:  # noqa: ARG002
        self.held -= 1
        self.log.append(f"bc{micro_batch}")


@dataclass
class Outcome:
    failure: PiparError | None = None
    part: CountingPart = field(default_factory=CountingPart)
    received: list[Message] = field(default_factory=list)
    left_running: int = 0
    trace: EpochTrace | None = None

    def spans(self, kind: str) -> list[Span]:
        assert self.trace is not None
        return [span for span in self.trace.spans if span.kind == kind and not span.waiting and span.lane == COMPUTE]


def lanes_by(costs: Costs) -> MakeLanes:
    return lambda names, recorder: VirtualLanes(names, recorder, costs.seconds)


def live(script: Script, *, samples: int = 20, profile: Profile | None = None, into: Outcome | None = None) -> Outcome:
    """Run a device against a scripted server in virtual time."""
    outcome = into or Outcome()

    async def main() -> None:
        near, far = memory_pair()
        recorder = Recorder("pi")
        device_channel, server_channel = Channel(near, recorder, UPLINK), Channel(far, Recorder("server"), DOWNLINK)
        costs = Costs(PROFILE)
        equipment = Equipment(SizesOnlySamples(samples), lambda _: outcome.part, lanes_by(costs), profile)
        device = Device("pi", equipment, DeviceLanes.of(equipment, recorder), device_channel, recorder)

        async def server() -> None:
            await script(server_channel)
            await server_channel.close()

        playing = asyncio.create_task(server())
        try:
            await device.train()
        except PiparError as error:
            outcome.failure = error
        finally:
            await device_channel.close()
        await playing
        outcome.left_running = len(asyncio.all_tasks()) - 1

    run_virtually(main())
    return outcome


def welcome(orders: Orders = ORDERS) -> Message:
    return Message(Kind.WELCOME, body=orders.to_body())


def gradient(of: Message) -> Message:
    return replace(of, kind=Kind.GRADIENT, body=Body(8 * of.samples, dtype="float32"))


def serve_at_once(outcome_trace: list[EpochTrace], orders: Orders = ORDERS) -> Script:
    """A server that answers every activation as soon as it arrives, for one epoch."""

    async def script(channel: Channel) -> None:
        assert (await channel.receive()).kind is Kind.HELLO
        channel.post(welcome(orders))
        channel.post(MODEL)
        channel.post(Message(Kind.ROUND, 1))
        while (message := await channel.receive()).kind is Kind.ACTIVATION:
            channel.post(gradient(message))
        assert message.kind is Kind.END_EPOCH
        assert (await channel.receive()).kind is Kind.MODEL
        channel.post(replace(MODEL, epoch=1))
        channel.post(Message(Kind.REPORT, 1))
        message = await channel.receive()
        outcome_trace.append(unpack_trace(message.body.contiguous(), owner="pi"))
        channel.post(Message(Kind.STOP, 1))

    return script


def served_at_once(orders: Orders = ORDERS, samples: int = 20) -> Outcome:
    traces: list[EpochTrace] = []
    outcome = live(serve_at_once(traces, orders), samples=samples)
    assert outcome.failure is None
    assert outcome.left_running == 0
    outcome.trace = traces[0]
    return outcome


def test_first_backward_waits_for_last_forward_even_if_its_gradient_came_early() -> None:
    outcome = served_at_once(samples=10)
    forwards, backwards = outcome.spans("fc"), outcome.spans("bc")
    # Five micro-batches of 2 s forward; the first gradient is back at 2 s.
    assert [span.end for span in forwards] == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert backwards[0].start == 10.0
    assert [span.end for span in backwards] == [14.0, 18.0, 22.0, 26.0, 30.0]


def test_all_forwards_come_before_all_backwards_in_every_iteration() -> None:
    one = [f"fc{n}" for n in range(1, 6)] + [f"bc{n}" for n in range(1, 6)]
    assert served_at_once(samples=20).part.log == one * 2


@pytest.mark.parametrize("window", [1, 2, 3, 5, 9])
def test_one_forward_one_backward_holds_at_most_a_window_of_activations(window: int) -> None:
    outcome = served_at_once(replace(ORDERS, plan=Plan(1, 5, window)))
    assert outcome.part.most == min(window, 5)
    assert outcome.part.held == 0


def test_one_forward_one_backward_alternates_after_its_window() -> None:
    outcome = served_at_once(replace(ORDERS, plan=Plan(1, 5, 2)), samples=10)
    assert outcome.part.log == ["fc1", "fc2", "bc1", "fc3", "bc2", "fc4", "bc3", "fc5", "bc4", "bc5"]


def test_every_sample_is_sent_once_in_pieces_that_add_up_to_their_batch() -> None:
    sent: list[Message] = []

    async def script(channel: Channel) -> None:
        await channel.receive()
        for message in (welcome(), MODEL, Message(Kind.ROUND, 1)):
            channel.post(message)
        while (message := await channel.receive()).kind is Kind.ACTIVATION:
            sent.append(message)
            channel.post(gradient(message))
        sent.append(message)
        channel.post(Message(Kind.STOP, 1))

    live(script, samples=23)
    *activations, end = sent
    counts = [(m.iteration, m.micro_batch, m.samples, m.batch_samples) for m in activations]
    # 10, 10 and 3 samples; the three left over make three pieces.
    assert counts == [(i, n, 2, 10) for i in (1, 2) for n in range(1, 6)] + [(3, n, 1, 3) for n in (1, 2, 3)]
    # 8 bytes of activation and 4 of label per sample, 49 of header per message; without a limit they take no time.
    uplink = {"up_bytes": 23 * 12 + 13 * 49, "up_s": 0.0}
    assert read_json(end) == {"samples": 23, "loss_sum": None, **uplink}


def test_a_device_uses_the_rate_of_its_uplink_that_the_server_measured() -> None:
    ends: list[Message] = []

    async def script(channel: Channel) -> None:
        await channel.receive()
        told = json_body({"up_bytes": 100_000, "up_s": 2.5})
        for message in (welcome(), MODEL, Message(Kind.ROUND, 1, body=told)):
            channel.post(message)
        while (message := await channel.receive()).kind is Kind.ACTIVATION:
            channel.post(gradient(message))
        ends.append(message)
        channel.post(Message(Kind.STOP, 1))

    live(script)
    # Its own 20 samples are too few bytes to measure a rate.
    assert (read_json(ends[0])["up_bytes"], read_json(ends[0])["up_s"]) == (100_000, 2.5)


@pytest.mark.parametrize("window", [0, 5])
def test_a_device_without_answers_sends_no_more_than_its_plans_micro_batches(window: int) -> None:
    arrived: list[int] = []

    async def script(channel: Channel) -> None:
        await channel.receive()
        orders = replace(ORDERS, plan=Plan(1, 5, window))
        for message in (welcome(orders), MODEL, Message(Kind.ROUND, 1)):
            channel.post(message)
        for _ in range(2):
            held = []
            try:
                while True:
                    async with asyncio.timeout(10_000):
                        held.append(await channel.receive())
            except TimeoutError:  # nothing more arrives
                arrived.append(len(held))
            for message in held:
                channel.post(gradient(message))
        channel.post(Message(Kind.FAULT, body=json_body({"reason": "seen enough"})))

    outcome = live(script, samples=20)
    assert arrived == [5, 5]
    assert "seen enough" in str(outcome.failure)


@pytest.mark.parametrize("keep", [True, False])
def test_a_device_answers_a_plan_that_moves_layers_with_their_momentum_if_it_is_kept(keep: bool) -> None:
    received: list[Message] = []

    async def script(channel: Channel) -> None:
        await channel.receive()
        plan = Message(Kind.PLAN, 1, body=plan_body(Plan(2, 3)))
        channel.post(welcome(replace(ORDERS, keep_state=keep)))
        for message in (MODEL, plan, plan):  # the second one moves nothing
            channel.post(message)
        if keep:
            channel.post(Message(Kind.STATE, 1, body=Body(16, encoding="safetensors")))
        channel.post(replace(MODEL, epoch=1))
        channel.post(Message(Kind.ROUND, 2))
        while not received or received[-1].kind is not Kind.MODEL:
            received.append(await channel.receive())
        channel.post(Message(Kind.STOP, 2))

    outcome = live(script, samples=10)
    assert outcome.failure is None
    answers = [Kind.STATE] if keep else []
    assert [message.kind for message in received] == [*answers, Kind.END_EPOCH, Kind.MODEL]  # P = Q: no activations
    assert outcome.part.log == ["fc1", "fc2", "fc3", "bc1", "bc2", "bc3"]


@pytest.mark.parametrize(
    ("norms", "sentence"),
    [
        ([Message(Kind.NORM, 1, 2, body=norm_body(1.0))], "but no step waits for it"),
        ([Message(Kind.NORM, 1, 1, body=norm_body(1.0))] * 2, "but no step waits for it"),
        ([Message(Kind.NORM, 1, 1, body=norm_body(math.nan))], "carries no squared norm"),
        ([Message(Kind.NORM, 1, 1, body=norm_body(1.0))], None),
    ],
    ids=["of another batch", "twice", "not a number", "right"],
)
def test_a_device_exchanges_norms_once_a_batch(norms: list[Message], sentence: str | None) -> None:
    received: list[Message] = []

    async def script(channel: Channel) -> None:
        await channel.receive()
        for message in (welcome(replace(ORDERS, norms=1)), MODEL, Message(Kind.ROUND, 1)):
            channel.post(message)
        while (message := await channel.receive()).kind is Kind.ACTIVATION:
            channel.post(gradient(message))
            if message.micro_batch == 5:
                for norm in norms:
                    channel.post(norm)
        received.append(message)
        if message.kind is not Kind.FAULT:
            received.append(await channel.receive())
            channel.post(Message(Kind.STOP, 1))

    outcome = live(script, samples=10)
    if sentence is None:
        assert outcome.failure is None
        assert [message.kind for message in received] == [Kind.NORM, Kind.END_EPOCH]
        assert (received[0].epoch, received[0].iteration) == (1, 1)
    else:
        assert sentence in str(outcome.failure)
    assert outcome.left_running == 0


def test_a_device_with_its_own_profile_sends_it() -> None:
    said: list[Message] = []

    async def script(channel: Channel) -> None:
        said.append(await channel.receive())
        channel.post(fault("seen enough"))

    live(script, profile=PROFILE)
    assert Profile.from_json(json.dumps(read_json(said[0])["profile"])) == PROFILE
    live(script)
    assert "profile" not in read_json(said[1])


def test_the_trace_covers_the_compute_lane_without_a_gap() -> None:
    outcome = served_at_once()
    assert outcome.trace is not None
    spans = sorted((s for s in outcome.trace.spans if s.lane == COMPUTE), key=lambda span: (span.start, span.end))
    assert all(one.end == other.start for one, other in itertools.pairwise(spans))


# --- rounds that end without the device


@pytest.mark.parametrize("after_s", [0.0, 1.0, 9.0, 10.5, 25.0, 100.0])
def test_an_abandoned_epoch_is_discarded_at_any_point(after_s: float) -> None:
    received: list[Message] = []
    discarded: list[float] = []

    async def script(channel: Channel) -> None:
        outcomes[0].part.discard = lambda: discarded.append(asyncio.get_running_loop().time())  # type: ignore[method-assign]
        await channel.receive()
        for message in (welcome(), MODEL, Message(Kind.ROUND, 1)):
            channel.post(message)
        answering = asyncio.create_task(answer(channel))
        await asyncio.sleep(after_s)
        for message in (Message(Kind.ABANDON, 1), replace(MODEL, epoch=1), Message(Kind.ROUND, 2)):
            channel.post(message)
        await answering
        channel.post(Message(Kind.REPORT, 2))
        trace = await channel.receive()
        outcomes[0].trace = unpack_trace(trace.body.contiguous(), owner="pi")
        channel.post(Message(Kind.STOP, 2))

    async def answer(channel: Channel) -> None:
        while not received or (received[-1].kind, received[-1].epoch) != (Kind.MODEL, 2):
            received.append(await channel.receive())
            if received[-1].kind is Kind.ACTIVATION:
                channel.post(gradient(received[-1]))

    outcomes = [Outcome()]
    outcome = live(script, samples=20, into=outcomes[0])
    assert outcome.failure is None
    assert outcome.left_running == 0
    assert len(discarded) == 1
    second = [message for message in received if message.epoch == 2]
    assert [message.kind for message in second] == [Kind.ACTIVATION] * 10 + [Kind.END_EPOCH, Kind.MODEL]
    assert outcome.part.log[-20:] == ([f"fc{n}" for n in range(1, 6)] + [f"bc{n}" for n in range(1, 6)]) * 2
    assert outcome.trace is not None
    assert outcome.trace.epoch == 2
    # Work that was running on the lane when the epoch ended is not interrupted: discarding waits for it.
    assert discarded[0] <= outcome.spans("fc")[0].start


def test_a_device_that_joins_when_the_training_is_over_ends() -> None:
    outcome = live(says(Message(Kind.STOP, 5)))
    assert outcome.failure is None
    assert outcome.left_running == 0


def test_a_fault_with_again_ends_only_the_session() -> None:
    again = Message(Kind.FAULT, body=json_body({"reason": "not now", "again": True}))
    for said in ([again], [welcome(), MODEL, again]):
        assert isinstance(live(says(*said)).failure, SessionOverError)


def test_a_device_answers_stop_before_it_leaves() -> None:
    script = says(welcome(), MODEL, Message(Kind.STOP, 3))
    assert live(script).failure is None
    assert [(message.kind, message.epoch) for message in script.faults] == [(Kind.STOP, 3)]  # type: ignore[attr-defined]


# --- breaches by the server


def says(*messages: Message) -> Script:
    async def script(channel: Channel) -> None:
        await channel.receive()
        for message in messages:
            if message.kind is Kind.FAULT:  # which would overtake the others
                await channel.drain()
                await asyncio.sleep(5.0)
            channel.post(message)
        with contextlib.suppress(LinkError):  # until the device has gone
            while True:
                faults.append(await channel.receive())

    faults: list[Message] = []
    script.faults = faults  # type: ignore[attr-defined]
    return script


def fault(reason: str) -> Message:
    return Message(Kind.FAULT, body=json_body({"reason": reason}))


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ([fault("'pi' is unknown")], "The server refused this device: 'pi' is unknown"),
        ([Message(Kind.FAULT, body=json_body({}))], "The server refused this device: no reason"),
        ([welcome(), MODEL, Message(Kind.ROUND, 1), fault("b was lost")], "ended the session: b was lost"),
    ],
    ids=["refused", "no reason", "in an epoch"],
)
def test_a_fault_ends_the_device_with_the_servers_reason(said: list[Message], sentence: str) -> None:
    outcome = live(says(*said))
    assert isinstance(outcome.failure, TrainingError)
    assert sentence in str(outcome.failure)
    assert outcome.left_running == 0


BREACHES: dict[str, tuple[list[Message], str]] = {
    "no welcome": ([MODEL], "not with a welcome"),
    "a welcome without orders": (
        [Message(Kind.WELCOME, body=json_body({}))],
        "does not have the fields of this pipar version",
    ),
    "a gradient that is not awaited": (
        [welcome(), MODEL, Message(Kind.GRADIENT, 1, 1, 1, 2, 10, Body(16, dtype="float32"))],
        "no micro-batch waits for it",
    ),
    "changes of no model": (
        [welcome(), Message(Kind.MODEL, 0, body=Body(16, encoding="changes"))],
        "changes of a model that it has not sent",
    ),
    "a round before any model": ([welcome(), Message(Kind.ROUND, 1)], "before any model to train"),
    "a round before the model of a new plan": (
        [welcome(), MODEL, Message(Kind.PLAN, 1, body=plan_body(Plan(2, 1))), Message(Kind.ROUND, 2)],
        "before any model to train",
    ),
    "a command for servers": ([welcome(), MODEL, Message(Kind.HELLO)], "which devices do not accept"),
    "a plan without numbers": (
        [welcome(), Message(Kind.PLAN, 1, body=json_body({}))],
        "does not have the fields of a plan",
    ),
    "a plan beyond the last layer": (
        [welcome(), Message(Kind.PLAN, 1, body=plan_body(Plan(3, 1)))],
        "has the plan P=3",
    ),
    "momentum that is not awaited": ([welcome(), Message(Kind.STATE, 1)], "no layers have moved"),
    "momentum twice": (
        [
            welcome(replace(ORDERS, keep_state=True)),
            MODEL,
            Message(Kind.PLAN, 1, body=plan_body(Plan(2, 1))),
            Message(Kind.STATE, 1),
            Message(Kind.STATE, 1),
        ],
        "no layers have moved",
    ),
    "momentum that is not kept": (
        [welcome(), Message(Kind.PLAN, 1, body=plan_body(Plan(2, 1))), Message(Kind.STATE, 1)],
        "no layers have moved",
    ),
    "a fault without json": ([welcome(), Message(Kind.FAULT)], "valid JSON"),
}


@pytest.mark.parametrize("case", BREACHES)
def test_a_breach_of_the_protocol_ends_the_device(case: str) -> None:
    said, sentence = BREACHES[case]
    outcome = live(says(*said))
    assert isinstance(outcome.failure, ProtocolError)
    assert sentence in str(outcome.failure)
    assert outcome.left_running == 0


def test_a_device_sends_the_server_the_reason_why_it_gives_up() -> None:
    script = says(*BREACHES["a command for servers"][0])
    live(script)
    (message,) = script.faults  # type: ignore[attr-defined]
    assert message.kind is Kind.FAULT
    assert "which devices do not accept" in read_json(message)["reason"]


@pytest.mark.parametrize("messages", [0, 1, 2, 3])
def test_a_lost_server_is_a_link_error_in_every_phase_of_the_device(messages: int) -> None:
    said = [welcome(), MODEL, Message(Kind.ROUND, 1)][:messages]

    async def script(channel: Channel) -> None:
        await channel.receive()
        for message in said:
            channel.post(message)
        await channel.drain()
        await asyncio.sleep(1.0)

    outcome = live(script)
    assert isinstance(outcome.failure, LinkError)
    assert outcome.left_running == 0


def test_a_device_that_is_cancelled_leaves_nothing_running() -> None:
    async def main() -> int:
        near, far = memory_pair()
        recorder = Recorder("pi")
        channel, server = Channel(near, recorder, UPLINK), Channel(far, Recorder("server"), DOWNLINK)
        costs = Costs(PROFILE)
        equipment = Equipment(SizesOnlySamples(20), lambda _: CountingPart(), lanes_by(costs))
        device = Device("pi", equipment, DeviceLanes.of(equipment, recorder), channel, recorder)
        training = asyncio.create_task(device.train())
        for message in (welcome(), MODEL, Message(Kind.ROUND, 1)):
            server.post(message)
        await asyncio.sleep(7.0)  # in the middle of a forward
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        await channel.close()
        await server.close()
        return len(asyncio.all_tasks()) - 1

    assert run_virtually(main()) == 0

"""The server's program in virtual time: who is admitted, what is refused, when it stops, and that it never hangs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pipar import replanning
from pipar.clock import run_virtually
from pipar.compute import VirtualCompute
from pipar.config import Link
from pipar.device import Device
from pipar.errors import PiparError, PlanError, TrainingError
from pipar.events import EpochResult, Event, Replanned
from pipar.hollow import HollowDevicePart, HollowLearner, HollowSamples
from pipar.ledger import Bounds, Ledger
from pipar.link.channel import Channel
from pipar.link.memory import memory_pair
from pipar.methods import METHODS, Plan
from pipar.planner.costs import Costs
from pipar.planner.profile import LayerProfile, Profile
from pipar.protocol.messages import Body, Kind, Message, json_body, read_json
from pipar.protocol.orders import Orders
from pipar.replanning import Choose, Replanner
from pipar.server import PlanJoined, Server, Training
from pipar.trace import COMPUTE, IO, SERVER, UPLINK, EpochTrace, Recorder, Span, Totals, pack_trace

# A batch of 10: on the device 1 s forward and 2 s backward, on the server 0.5 s each.
PROFILE = Profile(
    "hand",
    "float32",
    (10,),
    (LayerProfile("one", (1.0,), (2.0,), 8, 16), LayerProfile("two", (0.5,), (0.5,), 4, 16)),
)
LINK = Link(up_bps=8000.0, down_bps=8000.0, latency_s=0.01)
Life = Callable[[Channel], Awaitable[None]]


class ScriptedLearner(HollowLearner):
    """A hollow model whose validation losses are written down beforehand."""

    def __init__(self, split_points: dict[str, int], losses: Sequence[float]) -> None:
        super().__init__(PROFILE, split_points)
        self._losses = iter(losses)

    def evaluator(self) -> Callable[[Any], tuple[float, int]]:
        loss = next(self._losses)
        return lambda samples: (loss * samples, samples)


@dataclass
class Outcome:
    """What came of a training: of the server's program, and of each connection in the order they were made."""

    failure: BaseException | None = None
    lives: list[BaseException | None] = field(default_factory=list)
    results: list[EpochResult] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    left_running: int = 0


def train(
    lives: Sequence[tuple[str, Life]],
    *,
    devices: Sequence[str] = ("a", "b"),
    method: str = "pipar",
    epochs: int = 1,
    patience: int | None = None,
    validation: Sequence[tuple[int, Any]] = (),
    losses: Sequence[float] = (),
    keep_momentum: bool = False,
    plan_joined: PlanJoined | None = None,
    choose: Choose | None = None,
) -> Outcome:
    """Run the server with these connections in virtual time."""
    outcome = Outcome()
    plan = Plan(2 if method == "fl" else 1, 2 if METHODS[method].pipelines else 1)
    orders = {name: Orders(n, plan, 2, 10, False, keep_momentum) for n, name in enumerate(devices, start=1)}

    def emit(result: EpochResult, spans: list[Span]) -> None:
        outcome.results.append(result)
        outcome.spans += spans

    async def main() -> None:
        recorder, beside = Recorder(SERVER), Recorder(SERVER)
        links = dict.fromkeys(devices, LINK)
        ledger = Ledger(
            links, Bounds(dict.fromkeys(devices, 1.0), 1.0), 1, recorder=recorder, background=beside, emit=emit
        )
        costs = Costs(PROFILE)
        server = Server(
            Training(METHODS[method], epochs, patience, orders, links, validation, PROFILE),
            ScriptedLearner(dict.fromkeys(devices, plan.split_point), losses),
            pool=VirtualCompute(["core 0"], recorder, costs.seconds),
            background=VirtualCompute(["validation"], beside, costs.seconds),
            recorder=recorder,
            ledger=ledger,
            plan_joined=plan_joined,
            replanner=Replanner(links, choose) if choose is not None else None,
            observe=outcome.events.append,
        )
        tasks = []
        for _, live in lives:
            near, far = memory_pair()
            channel = Channel(near, Recorder("x"), UPLINK)
            channel.shape(LINK.up_bps, LINK.latency_s)
            tasks.append((asyncio.create_task(_live(live, channel)), asyncio.create_task(server.admit(far))))
        try:
            await server.train()
            await server.farewell()
        except PiparError as error:
            outcome.failure = error
        for life, admission in tasks:
            outcome.lives.append(await life)
            await admission
        outcome.left_running = len(asyncio.all_tasks()) - 1

    run_virtually(main())
    return outcome


async def _live(live: Life, channel: Channel) -> BaseException | None:
    try:
        await live(channel)
    except PiparError as error:
        return error
    finally:
        await channel.close()
    return None


def honest(name: str, samples: int = 20, speed: float = 1.0, profile: Profile | None = None) -> tuple[str, Life]:
    """The program that devices really run."""

    async def live(channel: Channel) -> None:
        recorder = Recorder(name)
        channel.record_on(recorder)
        costs = Costs(PROFILE, speed)
        device = Device(
            name,
            HollowSamples(samples),
            lambda orders: HollowDevicePart(PROFILE, orders.plan.split_point),
            channel=channel,
            compute=VirtualCompute([COMPUTE], recorder, costs.seconds),
            io=VirtualCompute([IO], recorder, costs.seconds),
            recorder=recorder,
            profile=profile,
        )
        await device.train()

    return name, live


# --- devices that are played by hand


def hello(name: str, **more: object) -> Message:
    return Message(Kind.HELLO, body=json_body({"name": name, "samples": 10, **more}))


async def until(channel: Channel, kind: Kind) -> Message:
    """Receive until a message of this kind comes."""
    while (message := await channel.receive()).kind is not kind:
        if message.kind is Kind.FAULT:
            raise TrainingError(str(read_json(message)["reason"]))
    return message


def activation(
    iteration: int = 1, n: int = 1, samples: int = 5, batch: int = 10, epoch: int = 1, kind: Kind = Kind.ACTIVATION
) -> Message:
    return Message(kind, epoch, iteration, n, samples, batch, Body(12 * samples, dtype="float32"))


def end_epoch(epoch: int = 1, **content: object) -> Message:
    return Message(Kind.END_EPOCH, epoch, body=json_body({"samples": 10, "loss_sum": None, **content}))


def model(epoch: int = 1) -> Message:
    return Message(Kind.MODEL, epoch, body=Body(16, encoding="safetensors"))


def trace(epoch: int = 1, *lanes: str, says: int | None = None) -> Message:
    totals = {lane: Totals(1.0, 0.0, 0.0, 1.0) for lane in lanes or (COMPUTE, IO)}
    packed = pack_trace(EpochTrace("b", epoch if says is None else says, totals))
    return Message(Kind.TRACE, epoch, body=Body.of(packed, encoding="trace"))


def by_hand(*said: Message | Kind, name: str = "b", leaves: bool = False) -> tuple[str, Life]:
    """A device that joins, then says these messages; a kind among them is what it first waits for."""

    async def live(channel: Channel) -> None:
        channel.post(hello(name))
        for item in said:
            if isinstance(item, Message):
                channel.post(item)
            else:
                await until(channel, item)
        if not leaves:
            await until(channel, Kind.STOP)

    return name, live


def as_json(profile: Profile) -> object:
    return json.loads(profile.to_json())


OTHER_NETWORK = replace(PROFILE, model="another", layers=(PROFILE.layers[0], replace(PROFILE.layers[1], name="three")))
EPOCH_BY_HAND = (
    Kind.ROUND, activation(n=1), activation(n=2), Kind.GRADIENT, Kind.GRADIENT,
    end_epoch(), model(), Kind.REPORT, trace(),
)  # fmt: skip


def test_a_device_played_by_hand_that_keeps_the_protocol_is_trained_with() -> None:
    outcome = train([honest("a"), by_hand(*EPOCH_BY_HAND)])
    assert outcome.failure is None
    assert outcome.lives == [None, None]
    assert [result.samples for result in outcome.results] == [30]
    assert outcome.left_running == 0


# --- who is admitted


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (hello("c"), "'c' is not a device of this training"),
        (hello("a"), "A device called 'a' has joined already"),
        (Message(Kind.HELLO, body=Body.of(b"{", encoding="json")), "does not carry readable JSON"),
        (Message(Kind.HELLO, body=json_body({})), "'None' is not a device"),
        (activation(), "'' is not a device"),
    ],
    ids=["unknown", "twice", "no json", "no name", "no hello"],
)
def test_who_may_not_join_is_told_why_and_the_others_train_on(said: Message, reason: str) -> None:
    async def stranger(channel: Channel) -> None:
        await asyncio.sleep(1.0)
        channel.post(said)
        await until(channel, Kind.STOP)

    outcome = train([honest("a"), ("stranger", stranger), honest("b")])
    assert outcome.failure is None
    assert len(outcome.results) == 1
    assert isinstance(outcome.lives[1], TrainingError)
    assert reason in str(outcome.lives[1])


def test_a_connection_that_ends_before_its_hello_disturbs_nobody() -> None:
    async def silent(_: Channel) -> None:
        await asyncio.sleep(0.5)

    assert train([("silent", silent), honest("a"), honest("b")]).failure is None


# --- who is lost

ONE_PIECE = (Kind.ROUND, activation(samples=10), Kind.GRADIENT, end_epoch(), model(), Kind.REPORT, trace())
NO_PIECE = (Kind.ROUND, end_epoch(loss_sum=1.0), model(), Kind.REPORT, trace())
SCRIPTS: dict[str, tuple[Message | Kind, ...]] = {
    "pipar": EPOCH_BY_HAND, "sfl": ONE_PIECE, "sfl2": ONE_PIECE, "sl": ONE_PIECE, "fl": NO_PIECE,
}  # fmt: skip


@pytest.mark.parametrize("method", SCRIPTS)
def test_the_scripts_keep_the_protocol_to_their_end(method: str) -> None:
    assert train([honest("a"), by_hand(*SCRIPTS[method])], method=method).failure is None


@pytest.mark.parametrize(
    ("method", "place"), [(method, place) for method, script in SCRIPTS.items() for place in range(len(script))]
)
def test_a_device_that_is_lost_ends_the_training_with_its_name(method: str, place: int) -> None:
    script = SCRIPTS[method]
    outcome = train([honest("a"), by_hand(*script[:place], leaves=True)], method=method)
    assert isinstance(outcome.failure, TrainingError)
    assert "b was lost" in str(outcome.failure)
    assert outcome.left_running == 0
    if place < len(script) - 2:  # behind the round, the other device has been told to stop already
        assert "b was lost" in str(outcome.lives[0])


def test_a_device_that_leaves_behind_stop_and_its_trace_is_not_lost() -> None:
    assert train([honest("a"), by_hand(*EPOCH_BY_HAND, Kind.STOP, leaves=True)]).failure is None


# --- who breaks the protocol

BREACHES: dict[str, tuple[tuple[Message | Kind, ...], str]] = {
    "another epoch": ((activation(epoch=2),), "where micro-batch 1 of iteration 1 of epoch 1 belongs"),
    "a later iteration": ((activation(iteration=2),), "where micro-batch 1 of iteration 1"),
    "a later micro-batch": ((activation(n=2),), "where micro-batch 1 of iteration 1"),
    "no samples": ((activation(samples=0),), "with 0 of 10 samples"),
    "an empty batch": ((activation(samples=0, batch=0),), "with 0 of 0 samples"),
    "more samples than the batch": ((activation(samples=11),), "with 11 of 10 samples"),
    "pieces longer than the batch": ((activation(), activation(n=2, samples=6)), "behind 5 of 10 samples"),
    "another batch in between": ((activation(), activation(n=2, batch=11)), "with 5 of 11 samples"),
    "the next batch too early": ((activation(), activation(iteration=2)), "where micro-batch 2 of iteration 1"),
    "too many pieces": (
        (activation(samples=3), activation(n=2, samples=3), Kind.GRADIENT, activation(n=3, samples=4)),
        "at most 2 make a batch",
    ),
    "too many outstanding": (
        (activation(n=1), activation(n=2), activation(iteration=2, n=1)),
        "came with 2 micro-batches outstanding",
    ),
    "the end within a batch": ((activation(), Kind.GRADIENT, end_epoch(samples=5)), "says 5 samples, but 5 came"),
    "another number of samples": (
        (activation(n=1), activation(n=2), Kind.GRADIENT, end_epoch(samples=11)),
        "says 11 samples, but 10 came",
    ),
    "nothing trained": ((end_epoch(),), "says 10 samples, but 0 came"),
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
    "an end of another epoch": ((end_epoch(epoch=2),), "where END_EPOCH of epoch 1 belongs"),
    "an end without json": ((Message(Kind.END_EPOCH, 1),), "does not carry readable JSON"),
    "a model too early": ((model(),), "where END_EPOCH of epoch 1 belongs"),
    "a gradient": ((activation(kind=Kind.GRADIENT),), "where END_EPOCH of epoch 1 belongs"),
    "hello again": ((hello("b"),), "where END_EPOCH of epoch 1 belongs"),
    "no model": (
        (activation(n=1), activation(n=2), Kind.GRADIENT, end_epoch(), end_epoch()),
        "where MODEL of epoch 1 belongs",
    ),
    "a model of another epoch": (
        (activation(n=1), activation(n=2), Kind.GRADIENT, end_epoch(), model(2)),
        "where MODEL of epoch 1 belongs",
    ),
    "a trace that nobody asked for": ((trace(),), "which was not asked for"),
    "a trace that cannot be read": ((Message(Kind.TRACE, 1, body=Body.of(b"?")),), "a trace that cannot be read"),
    "a trace of another epoch": ((*EPOCH_BY_HAND[1:-1], trace(1, says=2)), "epoch 2, which was not asked for"),
    "a trace twice": ((*EPOCH_BY_HAND[1:], trace()), "which was not asked for"),
    "a trace without lanes": ((*EPOCH_BY_HAND[1:-1], trace(1, "uplink")), "without the device's own lanes"),
}


@pytest.mark.parametrize("case", BREACHES)
def test_a_device_is_disconnected_with_the_reason_and_named_for(case: str) -> None:
    said, reason = BREACHES[case]
    outcome = train([honest("a"), by_hand(Kind.ROUND, *said)], epochs=2)
    assert isinstance(outcome.failure, TrainingError)
    assert str(outcome.failure).startswith("b ")
    assert reason in str(outcome.failure)
    assert isinstance(outcome.lives[1], TrainingError)  # what its FAULT said
    assert reason in str(outcome.lives[1])
    assert "b " in str(outcome.lives[0])  # the other device knows whose fault it is
    assert outcome.left_running == 0


def test_a_device_that_gives_up_says_why() -> None:
    fault = Message(Kind.FAULT, body=json_body({"reason": "the disk is full"}))
    outcome = train([honest("a"), by_hand(Kind.ROUND, fault, leaves=True)])
    assert "b was lost: it gave up: the disk is full" in str(outcome.failure)


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


def test_nobody_has_more_micro_batches_outstanding_than_its_plan_says() -> None:
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


def test_training_goes_on_while_validation_improves() -> None:
    losses = [4.0, 5.0, 3.0, 5.0, 2.0, 5.0]
    outcome = train([honest("a"), honest("b")], epochs=6, patience=2, validation=BATCHES, losses=losses)
    assert len(outcome.results) == 6


def test_without_patience_all_epochs_are_trained() -> None:
    outcome = train([honest("a"), honest("b")], epochs=4, validation=BATCHES, losses=[1.0, 2.0, 3.0, 4.0])
    assert [result.val_loss for result in outcome.results] == [1.0, 2.0, 3.0, 4.0]
    assert {result.val_accuracy for result in outcome.results} == {1.0}


def test_validation_never_delays_a_stage() -> None:
    # Each batch takes 3 s and there are twenty: far longer than an epoch, but none is as long as one.
    # The devices differ in speed: which of two that arrive at the very same moment comes first is not told here.
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
        (as_json(OTHER_NETWORK), "is of another whose layer 2 is 'three', but that of hand is 'two'"),
    ],
    ids=["empty", "text", "another network"],
)
def test_a_device_with_a_profile_of_no_use_is_told_so_and_may_come_again(profile: object, reason: str) -> None:
    async def first_try(channel: Channel) -> None:
        channel.post(hello("b", profile=profile))
        await until(channel, Kind.STOP)

    async def second_try(channel: Channel) -> None:
        await asyncio.sleep(1.0)
        await honest("b", profile=PROFILE)[1](channel)

    outcome = train([honest("a"), ("b", first_try), ("b", second_try)])
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
    assert [event.epoch for event in outcome.events if isinstance(event, Replanned)] == [1]


def test_plans_that_turn_out_as_before_are_no_news() -> None:
    outcome = train([honest("a", profile=PROFILE), honest("b")], plan_joined=lambda _: dict.fromkeys("ab", Plan(1, 2)))
    assert outcome.failure is None
    assert not [event for event in outcome.events if isinstance(event, Replanned)]


def test_devices_that_no_plan_fits_are_told_so() -> None:
    def plan(_: Mapping[str, Profile]) -> Mapping[str, Plan]:
        raise PlanError("b is too small for any plan.")

    outcome = train([honest("a"), honest("b")], plan_joined=plan)
    assert isinstance(outcome.failure, PlanError)
    assert [str(life) for life in outcome.lives] == ["The server refused this device: b is too small for any plan."] * 2
    assert outcome.left_running == 0


# --- other plans between two rounds


async def to_the_whole_network(_: Mapping[str, Link]) -> Mapping[str, Plan]:
    return {"a": Plan(1, 2), "b": Plan(2, 1)}


@pytest.fixture
def every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round's links count as changed."""
    monkeypatch.setattr(replanning, "NOTICED", -1.0)


STATE = Message(Kind.STATE, 1, body=Body(16, encoding="safetensors"))
REPLANNED = (*EPOCH_BY_HAND[:-2], Kind.PLAN, STATE, Kind.REPORT, trace())
SECOND = (Kind.ROUND, end_epoch(2, loss_sum=1.0), model(2), Kind.REPORT, trace(2))


@pytest.mark.usefixtures("every_round")
def test_a_device_that_answers_a_plan_is_trained_with_by_it() -> None:
    outcome = train(
        [honest("a"), by_hand(*REPLANNED, *SECOND)], epochs=2, keep_momentum=True, choose=to_the_whole_network
    )
    assert outcome.failure is None
    assert [result.samples for result in outcome.results] == [30, 30]
    assert outcome.left_running == 0


@pytest.mark.usefixtures("every_round")
@pytest.mark.parametrize(
    ("keep", "said", "reason"),
    [
        (True, (end_epoch(2, loss_sum=1.0),), "where STATE of epoch 1 belongs"),
        (True, (activation(epoch=2),), "where STATE of epoch 1 belongs"),
        (True, (replace(STATE, epoch=2),), "where STATE of epoch 1 belongs"),
        (True, (STATE, STATE), "where END_EPOCH of epoch 2 belongs"),
        (False, (STATE,), "where END_EPOCH of epoch 2 belongs"),
        (False, (activation(n=1, epoch=2), activation(n=2, epoch=2)), "at most 0 make a batch"),
    ],
    ids=["no answer", "an activation instead", "of another epoch", "twice", "not asked for", "by the plan before"],
)
def test_a_device_that_answers_a_plan_wrongly_is_disconnected(
    keep: bool, said: tuple[Message, ...], reason: str
) -> None:
    script = (*EPOCH_BY_HAND[:-2], Kind.PLAN, Kind.REPORT, trace(), Kind.ROUND, *said)
    outcome = train([honest("a"), by_hand(*script)], epochs=2, keep_momentum=keep, choose=to_the_whole_network)
    assert isinstance(outcome.failure, TrainingError)
    assert str(outcome.failure).startswith("b ")
    assert reason in str(outcome.failure)
    assert reason in str(outcome.lives[1])
    assert outcome.left_running == 0


@pytest.mark.usefixtures("every_round")
def test_behind_the_last_epoch_nobody_is_given_another_plan() -> None:
    outcome = train([honest("a"), honest("b")], epochs=1, choose=to_the_whole_network)
    assert outcome.failure is None
    assert not [event for event in outcome.events if isinstance(event, Replanned)]

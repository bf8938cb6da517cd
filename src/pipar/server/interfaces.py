"""What a server is given: the model that it trains, the devices that may join, and where it saves and reports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipar.events import Observer, Scores, ignore
from pipar.execution.lanes import Lanes
from pipar.execution.schedule import StepCount
from pipar.execution.spans import Recorder
from pipar.execution.work import Place
from pipar.methods import Method, Plan
from pipar.planner.replanner import Replanner
from pipar.privacy.budget import PrivacyAccountant
from pipar.profiling.profile import Profile
from pipar.server.device_messages import Expected, Introduction
from pipar.server.epoch_results import ResultCollector
from pipar.server.learned_timeouts import ChosenTimeouts
from pipar.server.sampling import Draw
from pipar.server.session import Session
from pipar.settings.links import Link
from pipar.wire.messages import LABELS, Body, Message, TargetSize
from pipar.wire.orders import Orders, TrainedPart


class ServerPart(Protocol):
    """M^s_k, the server-side model of one device."""

    def decode(self, message: Message, encoding: str) -> Any: ...
    def forward(self, decoded: Any) -> Any: ...
    def backward(self, forwarded: Any) -> Any: ...
    def begin_batch_at_once(self) -> None: ...  # whose micro-batches may be computed at the same time, with these:
    def forward_at_once(self, decoded: Any) -> Any: ...
    def backward_at_once(self, micro_batch: int, forwarded: Any) -> Any: ...
    def chunk_bytes(self, message: Message, encoding: str) -> Sequence[int]: ...  # of its gradient, chunk by chunk
    def encode(self, gradient: Any, encoding: str, place: Place) -> Body: ...  # its first chunk, at least
    def measure_gradient(self) -> float: ...  # the squared norm of what a step will apply
    def step(self, at: StepCount, others: float = 0.0) -> None: ...  # with that of the other side
    def take_loss(self) -> float | None: ...
    def take_encoding_error(
        self,
    ) -> tuple[float, float] | None: ...  # squared errors and values; None if exact
    def receive_state(self, body: Body) -> None: ...


class Kept(Protocol):
    """Activations that devices have sent and need not send again; a device can refer to its own only."""

    @property
    def limit_bytes(self) -> int: ...  # of each device; 0: nothing is kept
    def epoch_of(self, device: str, session: int) -> int | None: ...  # in which it has sent them all
    def begin(self, device: str, session: int, epoch: int, samples: int) -> None: ...  # what it sends is kept now
    def add(self, device: str, decoded: Any) -> Any: ...  # returns the same
    def refusal(self, device: str) -> str | None: ...  # why there is no room for what it sends
    def recall(self, device: str, message: Message) -> Any: ...  # what a message refers to, decoded


class Evaluator(Protocol):
    """Evaluates a copy of a model on one held-out batch after another."""

    def __call__(self, batch: Any, /) -> None: ...
    def scores(self) -> Scores: ...  # over all batches so far


class Learner(Protocol):
    """The global model M and its replicas M^s_k."""

    @property
    def kept(self) -> Kept: ...

    def replica(self, device: str) -> ServerPart: ...
    def pack(self, device: str, *, changes: bool = False, frozen: bool = True) -> Body: ...
    def part_bytes(self, device: str, *, frozen: bool = True) -> int: ...  # with or without what is not trained
    def model_bytes(self, *, frozen: bool = True) -> int: ...
    def decode(self, device: str, body: Body) -> Any: ...  # of the part that the device returns
    def aggregate(self, returned: Sequence[TrainedPart], *, keep_before: bool = False) -> None: ...
    def discard_progress(self, device: str) -> None: ...  # what it has trained since the last aggregation
    def keep_replicas_of(self, devices: Collection[str]) -> None: ...  # their replicas, or the one that all share
    def rewind_shared_model(self) -> None: ...  # a shared model to the last aggregation
    def restore_point(
        self,
    ) -> Callable[[], None]: ...  # of the global model: call the result to restore
    def move_cuts(self, split_points: Mapping[str, int]) -> Mapping[str, Body]: ...
    def evaluator(self) -> Evaluator: ...
    def packed_state(self) -> Body: ...  # the global model, as a safetensors file
    def pack_to_evaluate(self, device: str, *, has_part: bool, frozen: bool) -> Body: ...  # what the device lacks of it
    @property
    def higher_is_better(self) -> Mapping[str, bool]: ...  # by the names of scores


class Checkpointer(Protocol):
    """Saves the training, so that another server can resume it."""

    async def save_if_due(self, epoch: int, *, last: bool) -> None:
        """Save the state after a round; returns when it is copied."""

    async def save_end(self, epoch: int) -> None:
        """Return when the training after its last round is saved."""


class ModelKeeper(Protocol):
    """Keeps the best global model."""

    def offer(self, number: int, loss: float, model: Body) -> None:
        """Keep the model of a round if its validation loss is the lowest so far."""


class AdmissionPolicy(Protocol):
    """Knows which devices may join."""

    def check(self, introduction: Introduction) -> None:
        """Raise ProtocolError if the device may not join."""

    def link(self, name: str) -> Link:
        """Return the link of a device."""


class Enrolment(AdmissionPolicy, Protocol):
    """Knows which devices may join, and gives them their orders."""

    async def begin(self, introductions: Sequence[Introduction]) -> Mapping[str, Orders]:
        """Return the first orders of all devices that begin the training together."""

    def measured(self, links: Mapping[str, Link]) -> None:
        """Plan for links as they were measured when devices joined."""

    def link_to_plan(self, name: str) -> Link:
        """Return the link of a device that plans are made for: the measured one, if it was measured."""

    def join(self, introduction: Introduction) -> Orders:
        """Return the orders of a device that joins later; one that took part before keeps its plan."""


class Deadline(Protocol):
    """Knows which devices are too late. With own replicas, none is before another one has finished."""

    @property
    def seconds(self) -> float | None: ...  # None: not the same for all, or none at all
    def begin(self, group: Collection[Session]) -> None: ...  # a round, or a turn, begins now
    def timeout_s(self, waiting: Collection[Session], *, any_finished: bool) -> float | None: ...
    def late(self, waiting: Collection[Session], *, any_finished: bool) -> dict[Session, str]: ...  # and why
    def restart(self, waiting: Collection[Session], *, any_late: bool) -> None: ...  # without those that were late
    def lengthen(self, *, one_at_a_time: bool) -> None: ...  # all devices were too late, and would be again


@dataclass(frozen=True)
class Training:
    """The settings that the server follows."""

    method: Method
    epochs: int
    patience: int | None = None  # epochs without a better validation loss after which the training stops
    plans: Mapping[str, Plan] = field(default_factory=dict)  # as made before any device joined
    min_devices: int = 1
    round_deadline_s: float | None = None  # devices that have not finished by then are excluded, if any has
    validation: Sequence[tuple[int, Any]] = ()  # held-out batches: number of samples, and the evaluator's argument
    deadline: Deadline | None = None  # of each round, if neither a fixed one nor one that the server learns
    should_stop: Callable[[], bool] = lambda: False  # whether the caller wants no further round
    local_epochs: int = 1  # passes over a device's samples in each epoch
    draw: Draw = field(default_factory=Draw)  # which devices take part in a round
    #: Micro-batches of a device with a plan that are computed at the same time, by the number of devices that train.
    at_once: Callable[[Plan, int], int] = lambda _plan, _devices: 1


@dataclass(frozen=True)
class SessionSettings:
    """How sessions are made and kept."""

    network: Profile | None = None  # of the network that is trained; a device's own profile has to match it
    resume_window_s: float = 0.0  # a device whose link is lost may resume its session for this long
    numbers: Iterable[int] | None = None  # of sessions; 1, 2, 3 ... if None
    real_links: bool = False  # their rates are measured, not configured
    keep_spans: Container[str] | None = None  # devices whose spans are kept; None: all
    timeouts: ChosenTimeouts | None = None  # those that the server chooses by itself; None: it chooses none
    targets: TargetSize = LABELS  # of the targets that devices send with activations
    inputs: str = ""  # what a device's samples have to be, if it is known
    method: str = ""  # of the training

    @property
    def expected(self) -> Expected:
        """What a device has to have when it joins."""
        return Expected(self.network, self.inputs, self.targets, self.method)


@dataclass(frozen=True)
class ServerLanes:
    """Where the server computes, and the recorder of its spans."""

    pool: Lanes  # serves devices, first come first served
    background: Lanes  # validates, at the lowest priority
    recorder: Recorder
    evaluation: Lanes | None = None  # packs models that devices evaluate; None: the pool does


@dataclass(frozen=True)
class Services:
    """The parts with which a server reports, saves and plans."""

    results: ResultCollector
    accountant: PrivacyAccountant = field(default_factory=lambda: PrivacyAccountant(None))
    replanner: Replanner | None = None
    checkpointer: Checkpointer | None = None
    observe: Observer = ignore
    best: ModelKeeper | None = None

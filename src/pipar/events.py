"""What the two programs tell whoever watches them: progress while it happens, and a record of each epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Progress:
    """How far one side has come; `busy_s` counts each of its lanes since the start, `at_s` is its clock."""

    owner: str
    epoch: int
    iteration: int
    samples: int
    loss: float | None
    at_s: float
    busy_s: dict[str, float] = field(default_factory=dict)
    served: dict[str, tuple[int, int]] = field(default_factory=dict)  # the server's: epoch and iteration by device


@dataclass(frozen=True)
class EpochResult:
    """One epoch as result.json and metrics.jsonl show it."""

    epoch: int
    seconds: float
    samples: int
    train_loss: float | None
    val_loss: float | None
    val_accuracy: float | None
    bytes_up: int
    bytes_down: int
    server_idle_s: float
    device_idle_s: float
    bound_s: float
    efficiency: float
    validation_s: float
    utilisation: dict[str, float] = field(default_factory=dict)  # of the four lanes: device, uplink, server, downlink
    predicted_s: float | None = None  # `seconds` as expected when the epoch began
    devices: int = 0  # that took part
    error_up: float | None = None  # of lossily coded activations, relative to their norm
    error_down: float | None = None  # of gradients, likewise
    epsilon: float | None = None  # of the device that has spent most, where updates have noise
    device_bytes: dict[str, list[int]] = field(default_factory=dict)  # by device: up, down

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Pictured:
    """What the lanes did in an epoch that is over, as much of it as a picture shows; for who asked for pictures."""

    epoch: int
    spans: tuple[Any, ...]  # of pipar.execution.spans.Span
    is_whole: bool  # nothing of the epoch is left out
    left_out: int = 0  # spans that were too many between the picture's beginning and its end


@dataclass(frozen=True)
class Starting:
    """A command has begun, and what it imports, reads and measures first takes some seconds."""

    program: str  # "server", "device", "run" or "compare"
    what: str  # is trained, and by whom
    where: str = ""  # the server is to listen, or a device to find it


@dataclass(frozen=True)
class Preparing:
    """Something before the training takes a while; `share` of it is done."""

    what: str
    share: float


@dataclass(frozen=True)
class Started:
    """Everything is prepared and the run's folder is there: the training begins."""

    folder: str
    method: str
    epochs: int
    cores: int  # of the server
    plans: dict[str, str]  # by device: "P=2 N=3"
    samples: dict[str, int]  # by device
    iterations: dict[str, int]  # of one epoch, by device
    world: str = "real"
    is_private: bool = False  # updates have noise, and each has its price
    leakage: str = ""  # which cuts privacy.max_leakage rules out, in words


@dataclass(frozen=True)
class Listening:
    """The server can be reached."""

    address: str


@dataclass(frozen=True)
class Barred:
    """The server cannot check credentials, so nobody is let in until what it names is mended."""

    reason: str


@dataclass(frozen=True)
class Joined:
    """A device has joined."""

    device: str
    devices: int


@dataclass(frozen=True)
class Replanned:
    """The devices go on by these plans, from this epoch on: all of them, also those that keep theirs."""

    epoch: int
    plans: dict[str, dict[str, Any]]  # by device: the fields of its Plan
    reason: str = ""  # what has changed since the plans before; nothing if there were none


@dataclass(frozen=True)
class ReplanFailed:
    """New plans could not be chosen; the training goes on by those that it has."""

    reason: str


@dataclass(frozen=True)
class Waiting:
    """The training begins, or goes on, when enough devices are there."""

    present: int
    wanted: int


@dataclass(frozen=True)
class RoundOver:
    """A round is over; these devices count in it, each with so many samples. Its EpochResult follows later.

    It outlives a crash of the server when it is Saved.
    """

    epoch: int
    counted: dict[str, int]  # samples by device
    partly: dict[str, int] = field(default_factory=dict)  # of who does not count, but has taught a shared model (sfl2)
    epsilon: dict[str, float] = field(default_factory=dict)  # by device, up to now, where updates have noise


@dataclass(frozen=True)
class BegunAnew:
    """None of its devices counts in a round: the model is that of the round before, and the round is trained again."""

    epoch: int
    deadline_s: float | None  # within which it is to be ended now


@dataclass(frozen=True)
class BudgetSpent:
    """The training ends behind an epoch, because in the next one a device would exceed its privacy budget."""

    epoch: int
    device: str
    epsilon: float  # that it would come to
    target: float

    @property
    def reason(self) -> str:
        return (
            f"Training ends behind epoch {self.epoch}: one more would bring {self.device} to epsilon "
            f"{self.epsilon:.4g}, and privacy.target_epsilon is {self.target:g}."
        )


@dataclass(frozen=True)
class Dropped:
    """A device's round does not count; the others' does."""

    device: str
    epoch: int
    reason: str


@dataclass(frozen=True)
class Away:
    """The link to a device is lost; its place is kept for so long."""

    device: str
    seconds_allowed: float


@dataclass(frozen=True)
class Back:
    """A device that was away goes on where it was."""

    device: str
    away_s: float


@dataclass(frozen=True)
class Silent:
    """A device has to say something and has not for so long; its connection is not known to be lost."""

    device: str
    seconds: float


@dataclass(frozen=True)
class Heard:
    """A device that was silent for so long has said something."""

    device: str
    seconds: float


@dataclass(frozen=True)
class Lost:
    """A device is gone, and its place is no longer kept; it may join anew."""

    device: str
    reason: str


@dataclass(frozen=True)
class Left:
    """A device has said goodbye, or the server, in good order and for this reason, to the device."""

    device: str
    reason: str = ""


@dataclass(frozen=True)
class Saved:
    """The training can be resumed from this checkpoint."""

    epoch: int
    path: str


@dataclass(frozen=True)
class SaveFailed:
    """A checkpoint could not be written; the training goes on, and the one before it is still there."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class Resumed:
    """The training goes on from a checkpoint; this epoch was the last one in it, and so many behind it were over."""

    epoch: int
    again: int = 0  # rounds that are trained once more


@dataclass(frozen=True)
class ReportWritten:
    """A page about the run is there."""

    path: str


@dataclass(frozen=True)
class ReportFailed:
    """The page about the run could not be made; the run itself is complete."""

    reason: str


@dataclass(frozen=True)
class Welcomed:
    """This device takes part in a training, by this plan."""

    device: str
    plan: str


@dataclass(frozen=True)
class Trained:
    """This device has trained its part of a round and sent it."""

    device: str
    epoch: int
    samples: int
    epsilon: float | None = None  # that it has spent by all its updates, where they have noise and it can tell
    target: float | None = None  # that it has to spend, if there is a limit


@dataclass(frozen=True)
class Connecting:
    """A device looks for its server, for the first time."""

    address: str


@dataclass(frozen=True)
class Connected:
    """A device has reached its server; it is Welcomed when a training begins or goes on."""

    address: str


@dataclass(frozen=True)
class Reconnecting:
    """A device has no connection to its server and tries again in `wait_s` seconds; attempts count from 1."""

    address: str
    attempt: int
    wait_s: float
    reason: str
    is_on_purpose: bool = False  # the server said that it stops


@dataclass(frozen=True)
class TrackerFailed:
    """A tracker is told nothing more of this run; the training goes on without it."""

    tracker: str
    reason: str


@dataclass(frozen=True)
class Stopping:
    """The program was asked to end, or has come to its end, and puts everything away."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """The program cannot go on and ends."""

    reason: str


Event = (
    Progress
    | EpochResult
    | Pictured
    | Starting
    | Preparing
    | Started
    | Listening
    | Barred
    | Joined
    | Replanned
    | ReplanFailed
    | Waiting
    | RoundOver
    | BegunAnew
    | BudgetSpent
    | Dropped
    | Away
    | Back
    | Silent
    | Heard
    | Lost
    | Left
    | Saved
    | SaveFailed
    | Resumed
    | ReportWritten
    | ReportFailed
    | Welcomed
    | Trained
    | Connecting
    | Connected
    | Reconnecting
    | TrackerFailed
    | Stopping
    | Failed
)
Observer = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Watch nothing."""


def tell_all(*observers: Observer) -> Observer:
    """Return an observer that passes every event on to all of these, in this order."""

    def observe(event: Event) -> None:
        for observer in observers:
            observer(event)

    return observe

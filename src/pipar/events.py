"""Events that the two programs report to observers: progress, and a record of each epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from pipar.monitored_metric import Monitor


@dataclass(frozen=True)
class Progress:
    """The progress of one side; `busy_s` sums each of its lanes since the start, `at_s` is the time on its clock."""

    owner: str
    epoch: int
    iteration: int
    samples: int
    loss: float | None
    at_s: float
    busy_s: dict[str, float] = field(default_factory=dict)
    served: dict[str, tuple[int, int]] = field(default_factory=dict)  # the server's: epoch and iteration by device


@dataclass(frozen=True)
class DeviceScores:
    """How good a model is on each device's own samples, in result.json and metrics.jsonl."""

    epoch: int  # of the global model
    devices: dict[str, dict[str, float]] = field(default_factory=dict)  # by device: samples, loss, and other values
    mean: dict[str, float] = field(default_factory=dict)  # over devices, each counts once
    worst_decile: dict[str, float] = field(default_factory=dict)  # the mean over the tenth with the worst values
    missing: dict[str, str] = field(default_factory=dict)  # devices without values, and why
    higher_is_better: dict[str, bool] = field(default_factory=dict)  # by the names of values
    seconds: float = 0.0  # from the first message to the last answer
    bytes_up: int = 0
    bytes_down: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Scores:
    """How good a model is on a held-out set."""

    loss: float | None = None
    accuracy: float | None = None  # None if the task has no classes
    metrics: dict[str, float] = field(default_factory=dict)  # by name
    monitor: Monitor = field(default_factory=Monitor)
    devices: DeviceScores | None = None  # on the samples of devices

    @property
    def compared(self) -> float | None:
        """What the best model goes by; lower is better."""
        return self.monitor.of(self.loss, self.metrics, {} if self.devices is None else self.devices.mean)


@dataclass(frozen=True)
class EpochResult:
    """One epoch, as in result.json and metrics.jsonl."""

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
    epsilon: float | None = None  # the largest of all devices, if updates have noise
    device_bytes: dict[str, list[int]] = field(default_factory=dict)  # by device: up, down
    device_rates: dict[str, list[float | None]] = field(default_factory=dict)  # likewise, measured bits per second
    val_metrics: dict[str, float] = field(default_factory=dict)  # by name
    device_metrics: dict[str, Any] = field(default_factory=dict)  # of `DeviceScores`; empty if no device evaluates

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def compared(self, monitor: Monitor) -> float | None:
        """What the best model goes by; lower is better."""
        return monitor.of(self.val_loss, self.val_metrics, self.device_metrics.get("mean"))


@dataclass(frozen=True)
class Pictured:
    """The spans of a finished epoch that a picture shows; reported only if pictures were asked for."""

    epoch: int
    spans: tuple[Any, ...]  # of pipar.execution.spans.Span
    is_whole: bool  # no span of the epoch is left out
    left_out: int = 0  # spans within the picture's time that did not fit


@dataclass(frozen=True)
class Starting:
    """A command has started; importing, reading and measuring take some seconds first."""

    program: str  # "server", "device", "run", "compare", "plan" or "profile"
    what: str  # the model, the data and the devices
    where: str = ""  # the address that the server listens on or the device connects to


#: The first step of most commands, which takes seconds.
LOADING = "Loading torch and the network"


@dataclass(frozen=True)
class Preparing:
    """A step before the training takes a while; `share` of it is done."""

    what: str
    share: float


@dataclass(frozen=True)
class MeasuredBusy:
    """The network was measured on this machine while other programs kept it busy: predicted times may be wrong."""

    reason: str


@dataclass(frozen=True)
class TimedByPrograms:
    """The programs time a training, because the simulator does not cover it; that takes longer."""

    reason: str


@dataclass(frozen=True)
class Started:
    """Everything is prepared and the run's folder exists: the training begins."""

    folder: str
    method: str
    epochs: int
    cores: int  # of the server
    plans: dict[str, str]  # by device: "P=2 N=3"
    samples: dict[str, int]  # by device
    iterations: dict[str, int]  # of one epoch, by device
    world: str = "real"
    is_private: bool = False  # updates have noise
    metric: str = ""  # the first one, which a line of an epoch shows
    leakage: str = ""  # which cuts privacy.max_leakage rules out, in words
    equivalence_reasons: tuple[str, ...] = ()  # why the weights will not be exact; see pipar.job.equivalence
    local_epochs: int = 1  # passes over each device's samples in one epoch
    layers: int | None = None  # the paper's Q; 1 if the network is not cut anywhere
    threads: dict[str, int] = field(default_factory=dict)  # that compute one stage, by device


@dataclass(frozen=True)
class Listening:
    """The server can be reached, by a limited number of connections at a time if the limit of open files is low."""

    address: str
    most_connections: int | None = None


@dataclass(frozen=True)
class Barred:
    """The server cannot check credentials, and refuses all devices until the named problem is fixed."""

    reason: str


@dataclass(frozen=True)
class Reloaded:
    """A file of credentials or of allowed devices has changed, and this program uses the new content."""

    what: str


@dataclass(frozen=True)
class ReloadFailed:
    """A changed file of credentials cannot be used; the server continues with what it has loaded before."""

    reason: str


@dataclass(frozen=True)
class Expiring:
    """A certificate of this program expires soon, or has expired; connections fail from then on."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """A device may not join, for this reason; `again` if it may try again. Repetitions are reported once a minute."""

    device: str  # as its credential names it, or as it names itself; empty if neither does
    reason: str
    again: bool = False


@dataclass(frozen=True)
class Joined:
    """A device has joined."""

    device: str
    devices: int
    threads: int = 1  # that compute one of its stages


@dataclass(frozen=True)
class Replanned:
    """The plans of all devices from this epoch on, including those that did not change."""

    epoch: int
    plans: dict[str, dict[str, Any]]  # by device: the fields of its Plan
    reason: str = ""  # why the plans changed; empty for the first ones


@dataclass(frozen=True)
class ReplanFailed:
    """New plans could not be chosen; the training continues with the current ones."""

    reason: str


@dataclass(frozen=True)
class NotKept:
    """The server cannot keep a device's activations, which are the same in every epoch: they are sent in each."""

    device: str
    reason: str


@dataclass(frozen=True)
class Waiting:
    """The training starts or continues when enough devices have joined."""

    present: int
    wanted: int


@dataclass(frozen=True)
class TimeoutsChosen:
    """How long the server waits for a device, chosen by itself; None where the configuration says it, or nothing does.

    Those of the device that is waited for longest, at the first round and whenever one has changed by a factor of two.
    """

    silent_s: float | None  # without a sign of life, it is lost
    resume_s: float | None  # it keeps its place after its connection broke
    limit_s: float | None  # for its round, unless it makes progress
    reason: str


@dataclass(frozen=True)
class RoundOver:
    """A round is over; these devices count in it, with their samples. Its EpochResult follows later.

    It survives a crash of the server once it is Saved.
    """

    epoch: int
    counted: dict[str, int]  # samples by device
    partly: dict[str, int] = field(
        default_factory=dict
    )  # of devices that do not count but have trained a shared model (sfl2)
    epsilon: dict[str, float] = field(default_factory=dict)  # by device, so far, if updates have noise


@dataclass(frozen=True)
class EquivalenceChanged:
    """The plans or the devices of a round have changed why the weights are not exact; without reasons, they are."""

    epoch: int
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Drawn:
    """These of the devices that are present take part in a round; the others are idle until they are drawn."""

    epoch: int
    devices: tuple[str, ...]
    present: int
    counts: dict[str, int] = field(default_factory=dict)  # what the next draw depends on, by device


@dataclass(frozen=True)
class DevicesEvaluated:
    """All devices that are here have evaluated the final model; only some devices take part in a round."""

    epoch: int
    scores: dict[str, Any]  # of `DeviceScores`


@dataclass(frozen=True)
class NotEvaluated:
    """The evaluation of a model failed on a device, for example in a metric of the user's; it has no values."""

    device: str
    epoch: int
    reason: str


@dataclass(frozen=True)
class RoundRestarted:
    """No device counts in a round: the model of the previous round is restored, and the round is trained again."""

    epoch: int
    deadline_s: float | None  # of the new attempt


@dataclass(frozen=True)
class BudgetSpent:
    """The training ends after an epoch, because a device would exceed its privacy budget in the next one."""

    epoch: int
    device: str
    epsilon: float  # after one more epoch
    target: float

    @property
    def reason(self) -> str:
        return (
            f"Training ended after epoch {self.epoch}: one more would bring {self.device} to epsilon "
            f"{self.epsilon:.4g}, and privacy.target_epsilon is {self.target:g}."
        )


@dataclass(frozen=True)
class EndedByCallback:
    """The training ends after an epoch, because a function of the caller has asked for it or has failed."""

    epoch: int

    @property
    def reason(self) -> str:
        return f"Training ended after epoch {self.epoch}: a callback ended it."


@dataclass(frozen=True)
class Dropped:
    """A device's round does not count; those of the others do."""

    device: str
    epoch: int
    reason: str


@dataclass(frozen=True)
class Away:
    """The link to a device is lost; its place is kept for `seconds_allowed`."""

    device: str
    seconds_allowed: float


@dataclass(frozen=True)
class Back:
    """A device that was away has resumed its session."""

    device: str
    away_s: float


@dataclass(frozen=True)
class Silent:
    """A device should have sent something but has not for `seconds`; its connection may still exist."""

    device: str
    seconds: float


@dataclass(frozen=True)
class Heard:
    """A device that was silent for `seconds` has sent something."""

    device: str
    seconds: float


@dataclass(frozen=True)
class Lost:
    """A device is gone and its place is no longer kept; it may join again."""

    device: str
    reason: str


@dataclass(frozen=True)
class Left:
    """A device has left the training in an orderly way, or the server has asked it to, for this reason."""

    device: str
    reason: str = ""


@dataclass(frozen=True)
class Saved:
    """The training can be resumed from this checkpoint."""

    epoch: int
    path: str


@dataclass(frozen=True)
class SaveFailed:
    """A checkpoint could not be written; the training continues, and the previous checkpoint still exists."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class Resumed:
    """The training resumes from a checkpoint, of which this epoch is the last; `again` later rounds were lost."""

    epoch: int
    again: int = 0  # rounds that are trained again


@dataclass(frozen=True)
class ReportWritten:
    """The report of the run was written."""

    path: str


@dataclass(frozen=True)
class ReportFailed:
    """The report could not be written; the run itself is complete."""

    reason: str


@dataclass(frozen=True)
class Welcomed:
    """This device takes part in a training with this plan."""

    device: str
    plan: str


@dataclass(frozen=True)
class Trained:
    """This device has trained its part of a round and sent it."""

    device: str
    epoch: int
    samples: int
    epsilon: float | None = None  # of all its updates, if they have noise and it can be computed
    target: float | None = None  # the largest epsilon allowed, if there is a limit


@dataclass(frozen=True)
class Connecting:
    """A device connects to its server for the first time."""

    address: str


@dataclass(frozen=True)
class Connected:
    """A device has reached its server; it is Welcomed when a training starts or continues."""

    address: str


@dataclass(frozen=True)
class Reconnecting:
    """A device has no connection to its server and tries again in `wait_s` seconds; attempts count from 1."""

    address: str
    attempt: int
    wait_s: float
    reason: str
    is_on_purpose: bool = False  # the server has said that it is stopping


@dataclass(frozen=True)
class TrackerFailed:
    """A tracker has failed and gets no more data of this run; the training continues."""

    tracker: str
    reason: str


@dataclass(frozen=True)
class Stopping:
    """The program was asked to stop, or has finished, and cleans up."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """The program cannot continue, and ends."""

    reason: str


Event = (
    Progress
    | EpochResult
    | Pictured
    | Starting
    | Preparing
    | Started
    | MeasuredBusy
    | TimedByPrograms
    | Listening
    | Barred
    | Reloaded
    | ReloadFailed
    | Expiring
    | Refused
    | Joined
    | Replanned
    | ReplanFailed
    | NotKept
    | Waiting
    | TimeoutsChosen
    | RoundOver
    | Drawn
    | DevicesEvaluated
    | NotEvaluated
    | EquivalenceChanged
    | RoundRestarted
    | BudgetSpent
    | EndedByCallback
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
    """Ignore an event."""


def tell_all(*observers: Observer) -> Observer:
    """Return an observer that passes every event to all of these, in this order."""

    def observe(event: Event) -> None:
        for observer in observers:
            observer(event)

    return observe

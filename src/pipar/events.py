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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


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


@dataclass(frozen=True)
class Listening:
    """The server can be reached."""

    address: str


@dataclass(frozen=True)
class Joined:
    """A device has joined."""

    device: str
    devices: int


@dataclass(frozen=True)
class Replanned:
    """The devices go on by these plans, from this epoch on: all of them, also those that keep theirs."""

    epoch: int
    plans: dict[str, dict[str, int]]  # by device: split_point, micro_batches, window


@dataclass(frozen=True)
class ReplanFailed:
    """New plans could not be chosen; the training goes on by those that it has."""

    reason: str


Event = Progress | EpochResult | Preparing | Started | Listening | Joined | Replanned | ReplanFailed
Observer = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Watch nothing."""

"""What a device is given: its data, its part of the network, its lanes, and its guard over privacy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pipar.device.intake import Terms
from pipar.events import Scores
from pipar.execution.lanes import Lanes
from pipar.execution.schedule import StepCount
from pipar.execution.spans import COMPUTE, EVALUATION, IO, NOISE, Recorder
from pipar.execution.work import Place
from pipar.privacy.budget import PrivacyGuard
from pipar.profiling.profile import Profile
from pipar.wire.messages import Body, Message, Reference
from pipar.wire.orders import Orders

if TYPE_CHECKING:  # it imports numpy
    from pipar.privacy.mechanisms import NoiseSource

#: Makes lanes of these names that leave their spans with this recorder.
MakeLanes = Callable[[Sequence[str], Recorder], Lanes]


class DevicePart(Protocol):
    """M^c_k, the device-side model."""

    @property
    def last_loss(self) -> float | None: ...  # mean over the last batch, if the device computes it
    @property
    def frozen_bytes(self) -> int: ...  # of the parameters that only the first model has

    def forward(self, micro_batch: int, piece: Any) -> Any: ...
    def backward(self, micro_batch: int, gradient: Any) -> None: ...
    def release(self, micro_batch: int) -> None: ...  # what its backward would need: there is none
    def measure_gradient(self) -> float: ...  # the squared norm of what a step will apply
    def step(self, at: StepCount, others: float = 0.0) -> None: ...  # with that of the other side
    def discard(self) -> None: ...
    def take_loss(self) -> float | None: ...
    def take_encoding_error(self) -> tuple[float, float] | None: ...  # squared errors and values; None if exact
    def chunk_bytes(self, activation: Any, encoding: str) -> Sequence[int]: ...  # before encoding, chunk by chunk
    def encode(self, activation: Any, piece: Any, encoding: str, place: Place) -> Body: ...  # its first chunk, at least
    def decode(self, message: Message, encoding: str) -> Any: ...
    def protect(self, noise: NoiseSource, *, clip: float, multiplier: float) -> None: ...  # the update of this round
    def pack(self, *, changes: bool = False) -> Body: ...  # the whole part, or its changes since it was installed
    def unpack_and_install(self, body: Body, *, keep_state: bool) -> None: ...
    def carry_state_from(self, before: Any) -> Body: ...
    def receive_state(self, body: Body) -> None: ...


class Samples(Protocol):
    """D^k, the device's data: its size, its order in an epoch, and its batches cut into micro-batches."""

    def __len__(self) -> int: ...
    def order(self, epoch: int) -> Any: ...
    def micro_batches(self, epoch: int, positions: Any, sizes: list[int]) -> list[Any]: ...
    def with_noise(self, epoch: int, positions: Any, pieces: list[Any]) -> list[Any]: ...  # pieces of any sizes
    def references(self, kept: int, positions: Any, sizes: list[int]) -> list[Reference]: ...  # to an earlier epoch
    @property
    def varies(self) -> bool: ...  # a sample differs between epochs
    @property
    def noised_bytes(self) -> int: ...  # of one sample, if noise is added to inputs; otherwise 0


class Evaluator(Protocol):
    """Evaluates a model on one batch after another."""

    def __call__(self, batch: Any, /) -> None: ...
    def scores(self) -> Scores: ...  # over all batches so far


class EvaluationSamples(Protocol):
    """Samples of the device that it evaluates the global model on and never trains on."""

    def __len__(self) -> int: ...
    def batches(self, size: int) -> Sequence[tuple[int, Any]]: ...  # number of samples, and the evaluator's argument
    def evaluator(self, part: Any, body: Body) -> Evaluator: ...  # of the installed part and the layers in the body
    def lack_of_memory(self, orders: Orders | None) -> str | None: ...  # with these orders, or with any; None: it fits


@dataclass(frozen=True)
class Equipment:
    """What a device brings to a training."""

    samples: Samples
    build_part: Callable[[Orders], DevicePart]
    make_lanes: MakeLanes
    profile: Profile | None = None  # of the network on this machine
    guard: PrivacyGuard = field(default_factory=PrivacyGuard)  # the same one for all of the device's sessions
    terms: Terms | None = None  # what it agrees to; None: anything that the server orders
    evaluation: EvaluationSamples | None = None
    machine: str = ""  # of a deployed device: an identifier that only programs of the same machine share
    inputs: str = ""  # of a deployed device: what its samples are
    target_bytes: int | None = None  # likewise: of the targets of one sample, as it sends them
    method: str = ""  # likewise: of its own configuration


@dataclass(frozen=True)
class DeviceLanes:
    """Where a device computes."""

    compute: Lanes  # forwards, backwards, steps
    io: Lanes  # loading, encoding, decoding
    noise: Lanes  # noise on inputs
    evaluation: Lanes  # between two rounds

    @classmethod
    def of(cls, equipment: Equipment, recorder: Recorder) -> DeviceLanes:
        """Return lanes that leave their spans with a recorder."""
        return cls(*(equipment.make_lanes([lane], recorder) for lane in (COMPUTE, IO, NOISE, EVALUATION)))

    def close(self) -> None:
        for lane in (self.compute, self.io, self.noise, self.evaluation):
            lane.close()

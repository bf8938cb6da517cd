"""Networks and data that have sizes but no content: what a timing-only run trains. Sizes come from a profile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipar.events import Scores
from pipar.execution.schedule import StepCount
from pipar.execution.work import Place
from pipar.profiling.memory import Memory
from pipar.profiling.profile import Profile
from pipar.wire.messages import (
    EMPTY,
    ITEM_BYTES,
    LABELS,
    NUMBER_BYTES,
    SEVERAL,
    Body,
    Chunks,
    Message,
    Payload,
    Reference,
    TargetSize,
    TensorPart,
)
from pipar.wire.orders import Orders

if TYPE_CHECKING:  # it imports numpy
    from pipar.privacy.mechanisms import NoiseSource


@dataclass(frozen=True, slots=True)
class SizesOnlyPiece:
    """A micro-batch of which only the number of samples is known."""

    samples: int
    batch_samples: int


class _Cut:
    """The sizes of tensors that cross the cut: bytes per sample, and the share of them that an encoding leaves."""

    def __init__(self, profile: Profile, split_point: int, direction: str) -> None:
        self._profile = profile
        self._split_point = split_point
        self._direction = direction
        of = profile.gradient_bytes if direction == "down" else profile.output_bytes
        self._sample_bytes = of(split_point)
        self._several = profile.crossing_bytes(split_point, direction)

    def chunk_bytes(self, samples: int, encoding: str) -> list[int]:
        return self._profile.chunk_bytes(self._split_point, samples, encoding, self._direction)

    def body(self, samples: int, encoding: str, labels: int = 0, share: float | None = None) -> Body:
        """Return a tensor of this size; `share` is that of its bytes which the encoding leaves, if not as profiled."""
        size, dtype = samples * self._sample_bytes + labels, self._profile.dtype
        if encoding == "raw" and not self._several:
            return Body(size, dtype=dtype)
        sizes = self._profile.coded_bytes(self._split_point, samples, self._direction, encoding, share)
        sizes[-1] += labels
        chunks = Chunks(len(sizes), lambda number: Payload(sizes[number]))
        chunks.add(chunks.encode_next())
        if self._several:
            parts = tuple(TensorPart((samples, each), "uint8") for each in self._several)
            return Body(size, encoding=SEVERAL, chunks=chunks, parts=parts)
        shape = (samples, self._sample_bytes // ITEM_BYTES[dtype])
        return Body(size, (), dtype, shape, encoding, chunks)


class SizesOnlySamples:
    """A device's data, of which only the number of samples is known."""

    def __init__(self, count: int, noised_bytes: int = 0, targets: TargetSize = LABELS) -> None:
        self._count = count
        self._counted_bytes = targets.message_bytes
        self.noised_bytes = noised_bytes

    def __len__(self) -> int:
        return self._count

    def order(self, epoch: int) -> Sequence[int]:  # noqa: ARG002
        return range(self._count)

    def micro_batches(self, epoch: int, positions: Sequence[int], sizes: list[int]) -> list[SizesOnlyPiece]:  # noqa: ARG002
        return [SizesOnlyPiece(size, len(positions)) for size in sizes]

    def references(self, kept: int, positions: Sequence[int], sizes: list[int]) -> list[Reference]:  # noqa: ARG002
        every = [(size, size * NUMBER_BYTES + self._counted_bytes) for size in sizes]
        return [Reference(size, len(positions), Body(size_bytes, encoding="kept")) for size, size_bytes in every]

    @property
    def varies(self) -> bool:
        return self.noised_bytes > 0

    def with_noise(self, epoch: int, positions: Sequence[int], pieces: list[SizesOnlyPiece]) -> list[SizesOnlyPiece]:  # noqa: ARG002
        return pieces


class SizesOnlyEvaluation:
    """A device's evaluation samples, of which only the number is known; it has no scores."""

    def __init__(self, count: int, memory: Memory | None = None) -> None:
        self._count = count
        self._memory = memory or Memory()

    def __len__(self) -> int:
        return self._count

    def batches(self, size: int) -> list[tuple[int, None]]:
        return [(min(size, self._count - start), None) for start in range(0, self._count, size)]

    def evaluator(self, part: SizesOnlyDevicePart, body: Body) -> SizesOnlyEvaluation:  # noqa: ARG002
        return self

    def __call__(self, batch: None, /) -> None:
        pass

    def scores(self) -> Scores:
        return Scores()

    def lack_of_memory(self, orders: Orders | None) -> str | None:
        return self._memory.lack(self._count, orders)


class SizesOnlyDevicePart:
    """Layers 1..P: activations and weights have sizes only."""

    last_loss: float | None = None

    def __init__(
        self,
        profile: Profile,
        split_point: int,
        changes_share: float = 1.0,
        share_at: Callable[[Place], float | None] = lambda _: None,
        targets: TargetSize = LABELS,
    ) -> None:
        self._cut = _Cut(profile, split_point, "up")
        self._targets = targets
        self._share_at = share_at
        changing = profile.changing_bytes(1, split_point)
        self.frozen_bytes = profile.parameter_bytes(1, split_point) - changing
        self._weights = Body(changing, encoding="safetensors")
        self._changes = Body(round(self._weights.size_bytes * changes_share), encoding="changes")
        self._state_copies = profile.state_copies

    def forward(self, micro_batch: int, piece: SizesOnlyPiece) -> SizesOnlyPiece:  # noqa: ARG002
        return piece

    def backward(self, micro_batch: int, gradient: Any) -> None:
        pass

    def release(self, micro_batch: int) -> None:
        pass

    def measure_gradient(self) -> float:
        return 0.0

    def step(self, at: StepCount, others: float = 0.0) -> None:
        pass

    def discard(self) -> None:
        pass

    def take_loss(self) -> None:
        return None

    def take_encoding_error(self) -> None:
        return None

    def chunk_bytes(self, activation: SizesOnlyPiece, encoding: str) -> list[int]:
        return self._cut.chunk_bytes(activation.samples, encoding)

    def encode(self, activation: SizesOnlyPiece, piece: SizesOnlyPiece, encoding: str, place: Place) -> Body:
        return self._cut.body(activation.samples, encoding, self._targets.of(piece.samples), self._share_at(place))

    def decode(self, message: Message, encoding: str) -> None:  # noqa: ARG002
        return None

    def protect(self, noise: NoiseSource, *, clip: float, multiplier: float) -> None:
        pass

    def pack(self, *, changes: bool = False) -> Body:
        return self._changes if changes else self._weights

    def unpack_and_install(self, body: Body, *, keep_state: bool) -> None:
        pass

    def carry_state_from(self, before: SizesOnlyDevicePart) -> Body:
        leaving = max(0, before._weights.size_bytes - self._weights.size_bytes)
        return Body(round(self._state_copies * leaving), encoding="safetensors")

    def receive_state(self, body: Body) -> None:
        pass


class SizesOnlyServerPart:
    """Layers P+1..Q: activations and gradients have sizes only."""

    def __init__(
        self, profile: Profile, split_point: int, share_at: Callable[[Place], float | None] = lambda _: None
    ) -> None:
        self._returns_gradients = split_point > profile.frozen_layers
        self._cut = _Cut(profile, split_point, "down")
        self._share_at = share_at

    def decode(self, message: Message, encoding: str) -> int:  # noqa: ARG002
        return message.samples

    def forward(self, samples: int) -> int:
        return samples

    def backward(self, samples: int) -> int:
        return samples

    def begin_batch_at_once(self) -> None:
        pass

    def forward_at_once(self, samples: int) -> int:
        return samples

    def backward_at_once(self, micro_batch: int, samples: int) -> int:  # noqa: ARG002
        return samples

    def chunk_bytes(self, message: Message, encoding: str) -> list[int]:
        return self._cut.chunk_bytes(message.samples, encoding)

    def encode(self, samples: int, encoding: str, place: Place) -> Body:
        return self._cut.body(samples, encoding, share=self._share_at(place)) if self._returns_gradients else EMPTY

    def measure_gradient(self) -> float:
        return 0.0

    def step(self, at: StepCount, others: float = 0.0) -> None:
        pass

    def take_loss(self) -> None:
        return None

    def take_encoding_error(self) -> None:
        return None

    def receive_state(self, body: Body) -> None:
        pass


class SizesOnlyActivations:
    """Which devices' activations are kept, by size."""

    def __init__(self, limit_bytes: int, sample_bytes: Callable[[str], int], split_point: Callable[[str], int]) -> None:
        self.limit_bytes = limit_bytes
        self._sample_bytes = sample_bytes
        self._split_point = split_point
        self._devices: dict[str, tuple[int, int, int, int]] = {}  # session, epoch, split point, samples missing

    def epoch_of(self, device: str, session: int) -> int | None:
        known, epoch, split_point, missing = self._devices.get(device, (0, 0, 0, 1))
        is_whole = not missing and (known, split_point) == (session, self._split_point(device))
        return epoch if is_whole else None

    def begin(self, device: str, session: int, epoch: int, samples: int) -> None:
        fits = samples * self._sample_bytes(device) <= self.limit_bytes
        self._devices[device] = (session, epoch, self._split_point(device), samples if fits else -1)

    def add(self, device: str, decoded: int) -> int:
        if device in self._devices:
            session, epoch, split_point, missing = self._devices[device]
            if missing > 0:  # only the first pass over a device's samples is kept
                self._devices[device] = (session, epoch, split_point, missing - decoded)
        return decoded

    def refusal(self, device: str) -> str | None:
        return "they are larger than allowed" if self._devices.get(device, (0, 0, 0, 0))[3] < 0 else None

    def recall(self, device: str, message: Message) -> int:  # noqa: ARG002
        return message.samples

    def forget_unfinished(self, device: str) -> None:
        if self._devices.get(device, (0, 0, 0, 0))[3]:
            del self._devices[device]


class SizesOnlyLearner:
    """A global model that has a size only."""

    def __init__(
        self,
        profile: Profile,
        split_points: Mapping[str, int],
        share_at: Callable[[Place], float | None] = lambda _: None,
        cache_bytes: int = 0,
        targets: TargetSize = LABELS,
    ) -> None:
        self._profile = profile
        self._share_at = share_at
        self._split_points = dict(split_points)
        cut, of_target = self._split_points.__getitem__, targets.sample_bytes
        self.kept = SizesOnlyActivations(cache_bytes, lambda device: profile.output_bytes(cut(device)) + of_target, cut)
        self._parts: dict[int, SizesOnlyServerPart] = {}

    def replica(self, device: str) -> SizesOnlyServerPart:
        split_point = self._split_points[device]
        if split_point not in self._parts:
            self._parts[split_point] = SizesOnlyServerPart(self._profile, split_point, self._share_at)
        return self._parts[split_point]

    def move_cuts(self, split_points: Mapping[str, int]) -> dict[str, Body]:
        before = {
            device: self.part_bytes(device, frozen=False) for device in split_points if device in self._split_points
        }
        self._split_points.update(split_points)
        sizes = {device: max(0, self.part_bytes(device, frozen=False) - size) for device, size in before.items()}
        copies = self._profile.state_copies
        return {device: Body(round(copies * size), encoding="safetensors") for device, size in sizes.items()}

    def discard_progress(self, device: str) -> None:
        pass

    def keep_replicas_of(self, devices: Collection[str]) -> None:
        pass

    def rewind_shared_model(self) -> None:
        pass

    def restore_point(self) -> Callable[[], None]:
        return lambda: None

    def pack(self, device: str, *, changes: bool = False, frozen: bool = True) -> Body:
        if frozen and not changes:
            return Body(self.part_bytes(device), encoding="safetensors")
        size = self._profile.exchanged_bytes(self._split_points[device], changes=changes)
        return Body(size, encoding="changes" if changes else "safetensors")

    def part_bytes(self, device: str, *, frozen: bool = True) -> int:
        of = self._profile.parameter_bytes if frozen else self._profile.changing_bytes
        return of(1, self._split_points[device])

    def model_bytes(self, *, frozen: bool = True) -> int:
        of = self._profile.parameter_bytes if frozen else self._profile.changing_bytes
        return of(1, len(self._profile.layers))

    def decode(self, device: str, body: Body) -> None:
        pass

    def aggregate(self, returned: Sequence[Any], *, keep_before: bool = False) -> None:
        pass

    def packed_state(self) -> Body:
        return Body(self.model_bytes(), encoding="safetensors")

    def pack_to_evaluate(self, device: str, *, has_part: bool, frozen: bool) -> Body:
        size = self.model_bytes(frozen=frozen) - (self.part_bytes(device, frozen=frozen) if has_part else 0)
        return Body(size, encoding="safetensors")

    @property
    def higher_is_better(self) -> dict[str, bool]:
        return {}

    def evaluator(self) -> Any:
        raise AssertionError("a sizes-only model has nothing to evaluate")

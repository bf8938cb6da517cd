"""Networks and data that have sizes but no content: what a timing-only run trains. Sizes come from a profile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipar.execution.work import Place
from pipar.profiling.profile import Profile
from pipar.wire.messages import ITEM_BYTES, LABEL_BYTES, Body, Chunks, Message, Payload

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
        self._sample_bytes = profile.output_bytes(split_point)

    def chunk_bytes(self, samples: int, encoding: str) -> list[int]:
        return self._profile.chunk_bytes(self._split_point, samples, encoding)

    def body(self, samples: int, encoding: str, labels: int = 0) -> Body:
        size, dtype = samples * self._sample_bytes + labels, self._profile.dtype
        if encoding == "raw":
            return Body(size, dtype=dtype)
        sizes = self._profile.coded_bytes(self._split_point, samples, self._direction, encoding)
        sizes[-1] += labels
        chunks = Chunks(len(sizes), lambda number: Payload(sizes[number]))
        chunks.add(chunks.encode_next())
        shape = (samples, self._sample_bytes // ITEM_BYTES[dtype])
        return Body(size, (), dtype, shape, encoding, chunks)


class SizesOnlySamples:
    """A device's data, of which only the number of samples is known."""

    def __init__(self, count: int, noised_bytes: int = 0) -> None:
        self._count = count
        self.noised_bytes = noised_bytes

    def __len__(self) -> int:
        return self._count

    def order(self, epoch: int) -> Sequence[int]:  # noqa: ARG002
        return range(self._count)

    def micro_batches(self, epoch: int, positions: Sequence[int], sizes: list[int]) -> list[SizesOnlyPiece]:  # noqa: ARG002
        return [SizesOnlyPiece(size, len(positions)) for size in sizes]

    def with_noise(self, epoch: int, positions: Sequence[int], pieces: list[SizesOnlyPiece]) -> list[SizesOnlyPiece]:  # noqa: ARG002
        return pieces


class SizesOnlyDevicePart:
    """Layers 1..P: activations and weights have sizes only."""

    last_loss: float | None = None

    def __init__(self, profile: Profile, split_point: int, changes_share: float = 1.0) -> None:
        self._cut = _Cut(profile, split_point, "up")
        self._weights = Body(profile.parameter_bytes(1, split_point), encoding="safetensors")
        self._changes = Body(round(self._weights.size_bytes * changes_share), encoding="changes")

    def forward(self, micro_batch: int, piece: SizesOnlyPiece) -> SizesOnlyPiece:  # noqa: ARG002
        return piece

    def backward(self, micro_batch: int, gradient: Any) -> None:
        pass

    def step(self) -> None:
        pass

    def discard(self) -> None:
        pass

    def take_loss(self) -> None:
        return None

    def take_encoding_error(self) -> None:
        return None

    def chunk_bytes(self, activation: SizesOnlyPiece, encoding: str) -> list[int]:
        return self._cut.chunk_bytes(activation.samples, encoding)

    def encode(self, activation: SizesOnlyPiece, piece: SizesOnlyPiece, encoding: str, place: Place) -> Body:  # noqa: ARG002
        return self._cut.body(activation.samples, encoding, piece.samples * LABEL_BYTES)

    def decode(self, message: Message, encoding: str) -> None:  # noqa: ARG002
        return None

    def protect(self, noise: NoiseSource, *, clip: float, multiplier: float) -> None:
        pass

    def pack(self, *, changes: bool = False) -> Body:
        return self._changes if changes else self._weights

    def unpack_and_install(self, body: Body, *, keep_momentum: bool) -> None:
        pass

    def carry_momentum_from(self, before: SizesOnlyDevicePart) -> Body:
        return Body(max(0, before._weights.size_bytes - self._weights.size_bytes), encoding="safetensors")

    def receive_momentum(self, body: Body) -> None:
        pass


class SizesOnlyServerPart:
    """Layers P+1..Q: activations and gradients have sizes only."""

    def __init__(self, profile: Profile, split_point: int) -> None:
        self._cut = _Cut(profile, split_point, "down")

    def decode(self, message: Message, encoding: str) -> int:  # noqa: ARG002
        return message.samples

    def forward(self, samples: int) -> int:
        return samples

    def backward(self, samples: int) -> int:
        return samples

    def chunk_bytes(self, message: Message, encoding: str) -> list[int]:
        return self._cut.chunk_bytes(message.samples, encoding)

    def encode(self, samples: int, encoding: str, place: Place) -> Body:  # noqa: ARG002
        return self._cut.body(samples, encoding)

    def step(self) -> None:
        pass

    def take_loss(self) -> None:
        return None

    def take_encoding_error(self) -> None:
        return None

    def receive_momentum(self, body: Body) -> None:
        pass


class SizesOnlyLearner:
    """A global model that has a size only."""

    def __init__(self, profile: Profile, split_points: Mapping[str, int]) -> None:
        self._profile = profile
        self._split_points = dict(split_points)
        self._parts: dict[int, SizesOnlyServerPart] = {}

    def replica(self, device: str) -> SizesOnlyServerPart:
        split_point = self._split_points[device]
        if split_point not in self._parts:
            self._parts[split_point] = SizesOnlyServerPart(self._profile, split_point)
        return self._parts[split_point]

    def move_cuts(self, split_points: Mapping[str, int]) -> dict[str, Body]:
        before = {device: self.part_bytes(device) for device in split_points if device in self._split_points}
        self._split_points.update(split_points)
        sizes = {device: max(0, self.part_bytes(device) - size) for device, size in before.items()}
        return {device: Body(size, encoding="safetensors") for device, size in sizes.items()}

    def discard_progress(self, device: str) -> None:
        pass

    def keep_replicas_of(self, devices: Collection[str]) -> None:
        pass

    def rewind_shared_model(self) -> None:
        pass

    def restore_point(self) -> Callable[[], None]:
        return lambda: None

    def pack(self, device: str, *, changes: bool = False) -> Body:
        size = self._profile.exchanged_bytes(self._split_points[device], changes=changes)
        return Body(size, encoding="changes" if changes else "safetensors")

    def part_bytes(self, device: str) -> int:
        return self._profile.parameter_bytes(1, self._split_points[device])

    def model_bytes(self) -> int:
        return self._profile.parameter_bytes(1, len(self._profile.layers))

    def decode(self, device: str, body: Body) -> None:
        pass

    def aggregate(self, returned: Sequence[Any], *, keep_before: bool = False) -> None:
        pass

    def evaluator(self) -> Callable[[Any], tuple[float, int]]:
        raise AssertionError("a sizes-only model has nothing to evaluate")

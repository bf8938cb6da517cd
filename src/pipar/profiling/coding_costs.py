"""What encodings cost at each cut of a network: the share of bytes that they leave, and their time on this machine.

Both depend on the values, so these are from a real training pass: activations up, gradients down. A few chunks of each
cut are kept, which show as much as all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from statistics import mean, median
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipar.profiling.measurement_task import Batch
from pipar.profiling.profile import CodingTimes
from pipar.tensors.crossing import part_of
from pipar.tensors.inputs import Inputs, call, tensors_of, with_gradient
from pipar.wire import encodings
from pipar.wire.bitpacking import not_zero
from pipar.wire.encodings import chunk_sizes, row_values
from pipar.wire.messages import TensorPart
from pipar.wire.model_changes import decode_changes, encode_changes
from pipar.wire.tensor_codec import decode, encode

T = TypeVar("T")
Values = NDArray[Any]

#: Chunks of a cut that are kept: half a megabyte.
_CHUNKS = 2
#: Times are measured on chunks of the size that large tensors are cut into, and on small ones.
_LARGE_BYTES, _SMALL_BYTES = 256 * 1024, 16 * 1024
_REPETITIONS = 3
_MODEL_BYTES = 8_000_000
#: How far a weight moves in five steps along one gradient, with the learning rate 0.01 and the momentum 0.9.
_FIVE_STEPS = 0.01 * sum((1 - 0.9**step) / 0.1 for step in range(1, 6))


@dataclass
class CrossingTensor:
    """Some chunks of a tensor that crosses a cut, both ways; `row` is the number of values in a row, for codecs."""

    row: int
    size_bytes: int
    part: TensorPart | None = None  # what it is, if it is one of several
    up: list[Values] = field(default_factory=list)
    down: list[Values] = field(default_factory=list)

    def coded_share(self, encoding: str, gradients: list[Values] | None) -> float:
        """Return the share of bytes that an encoding leaves of the activation, or of its gradient."""
        own = encoding if self.part is None else self.part.encoding_for(encoding)
        if own == "raw":
            return 1.0
        raw = coded = 0
        for number, activation in enumerate(self.up):
            sent = activation if gradients is None else gradients[number]
            kept = _kept(activation, own) if gradients is not None else None
            raw += sent.nbytes
            coded += sum(len(part) for part in encode(sent, own, kept=kept, row=self.row))
        return min(1.0, coded / raw)


@dataclass
class Crossing:
    """The tensors that cross one cut."""

    tensors: list[CrossingTensor]

    @property
    def largest(self) -> CrossingTensor | None:
        """The largest tensor that crosses both ways, on which encodings are timed; None if there is none."""
        both = [one for one in self.tensors if one.up and one.down]
        return max(both, key=lambda one: one.size_bytes, default=None)

    def shares(self, *, rectified: bool, names: Sequence[str] = encodings.CODED) -> dict[str, tuple[float, float]]:
        """Return the share of bytes that each encoding leaves, up and down; sparse ones only at cuts after a ReLU."""
        allowed = [name for name in names if rectified or not encodings.is_sparse(name)]
        back = [one for one in self.tensors if one.down]
        if not back:
            return {}
        return {name: (_mean_share(self.tensors, name), _mean_share(back, name, back=True)) for name in allowed}


def _mean_share(tensors: Sequence[CrossingTensor], encoding: str, *, back: bool = False) -> float:
    """Return the share of the bytes of all tensors, each with its own."""
    coded = sum(one.size_bytes * one.coded_share(encoding, one.down if back else None) for one in tensors)
    return min(1.0, coded / sum(one.size_bytes for one in tensors))


def run_through(model: nn.Sequential, batch: Batch, *, with_loss: bool) -> list[Crossing]:
    """Return what crosses the cuts of a network in one training pass over some samples.

    Without `with_loss`, the gradient of the last output is random. The gradients of the weights are kept.
    """
    crossings: list[Crossing] = []
    output: Any = batch.inputs
    cuts = len(model) - 1 if with_loss else len(model)
    for place, layer in enumerate(model, start=1):
        output = call(layer, output)
        if place <= cuts:
            crossings.append(Crossing([_crossing(one, output) for one in tensors_of(output)]))
    loss = batch.loss(output) if with_loss else output
    if ends := with_gradient(loss):
        given = None if with_loss else [torch.randn_like(end) / len(batch) for end in ends]
        torch.autograd.backward(ends, given)
    for crossing in crossings:
        if not any(one.down for one in crossing.tensors):  # after frozen layers no gradient crosses
            for one in crossing.tensors:
                one.down = one.up if one.part is None or one.part.is_floating_point else []
    return crossings


def _crossing(tensor: Tensor, output: Inputs) -> CrossingTensor:
    part = None if isinstance(output, Tensor) else part_of(tensor)
    crossing = CrossingTensor(row_values(tuple(tensor.shape)), tensor.nbytes, part)
    crossing.up = _some_chunks(tensor)  # copies: the next layer may overwrite it
    if tensor.requires_grad:
        tensor.register_hook(partial(_keep, crossing))  # type: ignore[no-untyped-call]
    return crossing


def changes_in_a_round(model: nn.Module) -> tuple[float, CodingTimes]:
    """Return the share of a model's bytes that a round's changes have, and the times to find and to apply them.

    A round is five steps along the current gradients, with the default learning rate and momentum; of a large model,
    only the first megabytes are measured.
    """
    before, after, size = {}, {}, 0
    for name, weight in model.named_parameters():
        if weight.grad is None or size > _MODEL_BYTES:
            continue
        before[name] = weight.detach().numpy()
        after[name] = (weight.detach() - _FIVE_STEPS * weight.grad).numpy()
        size += weight.nbytes
    if not size:
        return 1.0, CodingTimes()
    encode_s, buffers = _timed(lambda: encode_changes(after, before))
    payload = memoryview(b"".join(buffers))
    decode_s, _ = _timed(lambda: decode_changes(payload, before))
    share = min(1.0, payload.nbytes / size)
    return share, CodingTimes(encode_s_per_byte=encode_s / size, decode_s_per_byte=decode_s / size)


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return the CPU time of the second run of some work, and its result."""
    work()
    start = time.thread_time()
    result = work()
    return time.thread_time() - start, result


def _keep(crossing: CrossingTensor, gradient: Tensor) -> None:
    crossing.down = _some_chunks(gradient)


def _some_chunks(tensor: Tensor) -> list[Values]:
    """Return copies of a few chunks from all parts of a tensor."""
    values = tensor.detach().contiguous().numpy()
    bounds = [0, *accumulate(chunk_sizes(values.shape, values.itemsize))]
    every = list(pairwise(bounds))
    count = min(_CHUNKS, len(every))
    flat = values.reshape(-1)
    places = [every[number * (len(every) - 1) // max(1, count - 1)] for number in range(count)]
    return [flat[start:end].copy() for start, end in places]


def coding_times(crossing: Crossing, pause_s: float) -> dict[str, CodingTimes]:
    """Return how long each encoding takes: CPU seconds of a call and of a byte, the mean over both directions.

    The encodings take turns, so that none finds its own data in the caches, and each round starts from rest, as in
    training.
    """
    largest = crossing.largest
    if largest is None:
        return {}
    measured: dict[str, list[_Timed]] = {
        name: [_Timed(largest, name, way, size) for size in (_SMALL_BYTES, _LARGE_BYTES) for way in ("up", "down")]
        for name in encodings.CODED
    }
    for _ in range(1 + _REPETITIONS):  # the first warms up
        time.sleep(pause_s)
        for timed in measured.values():
            for one in timed:
                one.run()
    return {name: _line(timed) for name, timed in measured.items()}


class _Timed:
    """One encoding of one chunk, and decoding it again, several times."""

    def __init__(self, crossing: CrossingTensor, encoding: str, way: str, size_bytes: int) -> None:
        activation, gradient = crossing.up[0], crossing.down[0]
        count = size_bytes // activation.itemsize
        self.size_bytes = count * activation.itemsize
        # Of the required length, for any size of the network's tensors.
        self._activation = np.resize(activation, count)
        self._values = self._activation if way == "up" else np.resize(gradient, count)
        self._encoding, self._row, self._way = encoding, min(crossing.row, count), way
        self._out = np.empty_like(self._values)
        self._encode_s: list[float] = []
        self._decode_s: list[float] = []

    def run(self) -> None:
        start = time.thread_time()
        buffers = encode(self._values, self._encoding, kept=self._known(), row=self._row)
        self._encode_s.append(time.thread_time() - start)
        payload = memoryview(b"".join(buffers))
        start = time.thread_time()
        decode(payload, self._encoding, self._out, kept=self._known(), row=self._row)
        self._decode_s.append(time.thread_time() - start)

    def _known(self) -> NDArray[np.bool_] | None:
        """Return which values of a gradient are sent; both sides derive it from the activation."""
        return _kept(self._activation, self._encoding) if self._way == "down" else None

    @property
    def encode_s(self) -> float:
        return median(self._encode_s[1:])

    @property
    def decode_s(self) -> float:
        return median(self._decode_s[1:])


def _kept(activation: Values, encoding: str) -> NDArray[np.bool_] | None:
    return not_zero(activation) if encodings.is_sparse(encoding) else None


def _line(timed: Sequence[_Timed]) -> CodingTimes:
    small, large = timed[:2], timed[2:]
    sizes = (small[0].size_bytes, large[0].size_bytes)

    def through(take: Callable[[_Timed], float]) -> tuple[float, float]:
        return line(sizes, (mean(map(take, small)), mean(map(take, large))))

    return CodingTimes(*through(lambda one: one.encode_s), *through(lambda one: one.decode_s))


def line(sizes: tuple[int, int], times: tuple[float, float]) -> tuple[float, float]:
    """Return the fixed cost and the cost of a byte of a line through two measurements; neither is below zero."""
    if sizes[1] <= sizes[0]:
        return 0.0, times[1] / sizes[1]
    per_byte = max(0.0, (times[1] - times[0]) / (sizes[1] - sizes[0]))
    return max(0.0, times[0] - per_byte * sizes[0]), per_byte

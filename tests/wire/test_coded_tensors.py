"""A coded tensor is sent chunk by chunk; its size in memory is known, and limited, before a byte is decoded."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
import torch

from pipar.errors import ProtocolError
from pipar.tensors.bodies import not_zero, read_tensor, tensor_body
from pipar.wire.encodings import ALL, EXACT, LOSSY
from pipar.wire.frames import Assembler, Frame, body_limit, cut_message, pack_frame, unpack_frame
from pipar.wire.lossy import Lossy
from pipar.wire.messages import Body, Kind, Message
from tests.support.labels import label_bytes, read_labels

T = TypeVar("T")
SHAPE = (20, 8, 32, 32)  # 640 KiB: three chunks


def rectified(shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype).relu()


def whole(body: Body) -> Body:
    """Return the body with all its chunks encoded."""
    if body.chunks is not None:
        while len(body.chunks.ready) < body.chunks.count:
            body.chunks.add(body.chunks.encode_next())
    return body


def message(tensor: torch.Tensor, encoding: str = "sparse-planes", labels: torch.Tensor | None = None) -> Message:
    lossy = Lossy(np.random.default_rng(1)) if encoding in LOSSY else None
    kind = Kind.GRADIENT if labels is None else Kind.ACTIVATION
    return Message(
        kind,
        1,
        1,
        1,
        len(tensor),
        50,
        whole(tensor_body(tensor, () if labels is None else label_bytes(labels), encoding=encoding, lossy=lossy)),
    )


def frames(sent: Message) -> list[Frame]:
    return [unpack_frame(pack_frame(frame)) for frame in cut_message(sent, 1, 1)]


def arrived(sent: list[Frame], assembler: Assembler | None = None) -> Message:
    assembler = assembler or Assembler()
    *none, last = [assembler.feed(frame) for frame in sent]
    assert none == [None] * len(none)
    assert last is not None
    return last


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("encoding", ALL)
def test_a_coded_tensor_is_restored_with_its_labels(encoding: str, dtype: torch.dtype) -> None:
    tensor, labels = rectified(dtype=dtype), torch.arange(20) % 10
    back = arrived(frames(message(tensor, encoding, labels)))
    assert torch.equal(read_labels(back, 10), labels)
    read = read_tensor(back, encoding)
    assert read.dtype == dtype
    if encoding in EXACT:
        assert torch.equal(read, tensor)
    else:
        assert 0 < float((read - tensor).norm() / tensor.norm()) < 0.7


def test_a_gradient_is_sent_only_where_the_activation_is_not_zero_and_without_a_mask() -> None:
    activation, gradient = rectified(), torch.randn(SHAPE)
    kept = not_zero(activation)
    body = whole(tensor_body(gradient, encoding="sparse-planes", kept=kept))
    back = arrived(frames(Message(Kind.GRADIENT, 1, 1, 1, 20, 50, body)))
    assert torch.equal(read_tensor(back, "sparse-planes", kept), gradient * kept)
    assert sum(buffer.nbytes for buffer in back.body.buffers) < 0.47 * gradient.nbytes  # half, and fewer exponents


def test_limits_count_a_coded_tensor_with_its_size_before_encoding() -> None:
    tensor = torch.zeros(SHAPE)
    sent = frames(message(tensor))
    assert sum(frame.payload_bytes for frame in sent) < 1000
    assert arrived(sent, Assembler(limit=body_limit({Kind.GRADIENT: tensor.nbytes}))) is not None
    with pytest.raises(ProtocolError, match="at most"):
        arrived(sent, Assembler(limit=body_limit({Kind.GRADIENT: tensor.nbytes - 1})))


def _longer(frame: Frame) -> Frame:
    too_long = memoryview(bytes(256 * 1024 + 65))
    return replace(frame, payload=(too_long,), payload_bytes=too_long.nbytes)


def _of_another_shape(frame: Frame) -> Frame:
    body = replace(frame.message.body, shape=(20, 8, 16, 64, 2))
    return replace(frame, message=replace(frame.message, body=body))


@pytest.mark.parametrize(
    "change",
    [
        _longer,
        _of_another_shape,
        lambda frame: replace(frame, chunks=4),
        lambda frame: replace(frame, chunk=1),
        lambda frame: replace(frame, payload=(), payload_bytes=0),
        lambda frame: replace(frame, message=replace(frame.message, samples=19)),
        lambda frame: replace(frame, message=replace(frame.message, body=replace(frame.message.body, dtype=""))),
    ],
)
def test_chunk_that_does_not_fit_is_refused_before_it_is_kept(change: object) -> None:
    assert callable(change)
    assembler = Assembler()
    with pytest.raises(ProtocolError):
        assembler.feed(change(frames(message(rectified()))[0]))
    assert assembler.held_bytes == 0


def test_an_encoding_other_than_the_agreed_one_is_refused() -> None:
    back = arrived(frames(message(rectified(), "planes")))
    with pytest.raises(ProtocolError, match="encoded as planes, not as raw"):
        read_tensor(back, "raw")


def test_mask_of_another_shape_is_refused() -> None:
    back = arrived(frames(message(rectified())))
    with pytest.raises(ProtocolError, match="shape"):
        read_tensor(back, "sparse-planes", torch.ones(20, 8, dtype=torch.bool))


@pytest.mark.parametrize("labels", [None, torch.zeros(60, dtype=torch.int64)])
def test_a_raw_tensor_is_copied_once_by_each_side(labels: torch.Tensor | None) -> None:
    tensor = torch.randn(60, 16, 32, 32)  # four frames
    packed, out_peak = _peak(lambda: [pack_frame(frame) for frame in cut_message(message(tensor, "raw", labels), 1, 1)])
    back = arrived([unpack_frame(data) for data in packed])
    read, in_peak = _peak(lambda: read_tensor(back))
    assert torch.equal(read, tensor)
    assert out_peak < 1.02 * tensor.nbytes
    assert in_peak < 1.02 * tensor.nbytes


def test_a_message_has_a_raw_tensor_without_a_copy() -> None:
    tensor = torch.randn(6, 16, 32, 32)
    first = np.frombuffer(message(tensor, "raw", None).body.buffers[0], np.uint8)
    assert first.ctypes.data == tensor.data_ptr()


def test_coded_tensor_needs_no_more_than_its_bytes_and_a_chunk() -> None:
    """Encoding makes the bytes, framing copies them; decoding writes the tensor. It also needs one chunk."""
    tensor = rectified((60, 16, 32, 32))
    sent, encode_peak = _peak(lambda: message(tensor))
    packed, pack_peak = _peak(lambda: [pack_frame(frame) for frame in cut_message(sent, 1, 1)])
    coded = sum(map(len, packed))
    back = arrived([unpack_frame(data) for data in packed])
    read, decode_peak = _peak(lambda: read_tensor(back, "sparse-planes"))
    assert torch.equal(read, tensor)
    assert coded < 0.5 * tensor.nbytes
    assert encode_peak < coded + 4 * 256 * 1024
    assert pack_peak < 1.02 * coded
    assert decode_peak < tensor.nbytes + 4 * 256 * 1024


def _peak(work: Callable[[], T]) -> tuple[T, int]:
    """Return a result and the most memory that getting it needed, the result included."""
    work()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        result = work()
        return result, tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()

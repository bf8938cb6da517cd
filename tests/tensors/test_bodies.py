"""Tensors, labels and states are restored bit for bit; bytes that contradict their header are refused."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.memory_peak import peak_bytes

from pipar.errors import ProtocolError
from pipar.tensors.bodies import TORCH_DTYPES, check_finite, read_state, read_tensor, state_body, tensor_body
from pipar.wire import frames
from pipar.wire.encodings import CODED
from pipar.wire.frames import Assembler, cut_message, pack_frame, unpack_frame
from pipar.wire.lossy import Lossy
from pipar.wire.messages import Body, Kind, Message, end_to_end
from tests.support.labels import label_bytes, read_labels

DTYPES = list(TORCH_DTYPES.values())


def over_the_wire(message: Message) -> Message:
    """Return the message as its receiver gets it, cut into small chunks on the way."""
    assembler, received = Assembler(), None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "CHUNK_BYTES", 64)
        for frame in cut_message(message, 1, 1):
            received = assembler.feed(unpack_frame(pack_frame(frame)))
    assert received is not None
    return received


def activation(values: torch.Tensor, labels: torch.Tensor) -> Message:
    return Message(Kind.ACTIVATION, 1, 1, 1, len(labels), 99, tensor_body(values, label_bytes(labels)))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and one.numpy().tobytes() == other.numpy().tobytes()


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(st.sampled_from(DTYPES), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 2**31))
def test_a_tensor_and_its_labels_are_restored_bit_for_bit(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, dtype=dtype, generator=generator)
    labels = torch.randint(0, 10, shape[:1], generator=generator)
    received = over_the_wire(activation(values, labels))
    assert same_bits(read_tensor(received), values)
    assert torch.equal(read_labels(received, classes=10), labels)
    gradient = over_the_wire(Message(Kind.GRADIENT, 1, 1, 1, shape[0], 99, tensor_body(values)))
    assert same_bits(read_tensor(gradient), values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinities_are_restored_too(dtype: torch.dtype) -> None:
    values = torch.tensor([[float("nan"), float("inf"), -0.0, 5e-324]], dtype=dtype)
    assert same_bits(read_tensor(over_the_wire(activation(values, torch.tensor([0])))), values)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 500, 999])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_is_not_finite_is_found_anywhere(value: float, place: int, dtype: torch.dtype) -> None:
    values = torch.zeros(10, 100, dtype=dtype)
    check_finite([values], "it")
    values.view(-1)[place] = value
    with pytest.raises(ProtocolError, match=r"^ACTIVATION\(epoch 1.* has values that are infinite.* has diverged"):
        check_finite([torch.zeros(3), values], str(activation(values, torch.zeros(10))))


def test_infinities_that_cancel_are_found_and_huge_values_whose_sum_overflows_are_not() -> None:
    with pytest.raises(ProtocolError):
        check_finite([torch.tensor([float("inf"), -float("inf")])], "it")
    check_finite([torch.full((4,), torch.finfo(torch.float32).max)], "it")
    check_finite([torch.tensor([2**40]), torch.tensor([True]), torch.zeros(0, 4)], "it")


def test_a_tensor_that_is_not_contiguous_is_sent_in_its_own_order() -> None:
    values = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(read_tensor(over_the_wire(activation(values, torch.zeros(3, dtype=torch.int64)))), values)


def test_a_body_is_the_tensors_own_memory_and_a_read_tensor_has_its_own() -> None:
    values = torch.zeros(2, 2)
    message = activation(values, torch.tensor([0, 1]))
    values[0, 0] = 7.0
    read = read_tensor(message)
    assert read[0, 0] == 7.0
    values[0, 0] = 8.0
    assert read[0, 0] == 7.0


@pytest.mark.parametrize("label", [-1, 10, 2**31 - 1])
def test_a_label_outside_the_classes_is_refused(label: int) -> None:
    message = activation(torch.zeros(2, 3), torch.tensor([0, label]))
    with pytest.raises(ProtocolError, match=r"label -?[0-9]+, but (labels start at 0|the highest label is 9)"):
        read_labels(message, classes=10)


def test_a_tensor_that_contradicts_its_header_is_refused() -> None:
    message = activation(torch.zeros(2, 3), torch.tensor([0, 1]))
    for damaged in (replace(message, samples=3), replace(message, body=replace(message.body, shape=(2, 4)))):
        with pytest.raises(ProtocolError):
            read_tensor(damaged)
        with pytest.raises(ProtocolError):
            read_labels(damaged, classes=10)


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "0.weight": torch.randn(3, 2, generator=generator),
        "0.bias": torch.randn(3, generator=generator, dtype=torch.float64),
        "1.num_batches_tracked": torch.tensor(2**40),
        "1.mask": torch.tensor([True, False]),
        "1.empty": torch.zeros(0, 4),
    }


@pytest.mark.parametrize("encoding", CODED)
def test_no_memory_is_allocated_for_a_large_tensor_with_an_invalid_first_chunk(encoding: str) -> None:
    values = torch.randn(32, 32, 32, 32)
    good = tensor_body(values, encoding=encoding, lossy=Lossy())
    assert good.chunks is not None
    while len(good.chunks.ready) < good.chunks.count:
        good.chunks.add(good.chunks.encode_next())
    payloads = tuple(end_to_end(ready.buffers) for ready in good.chunks.ready)
    whole = Message(Kind.GRADIENT, 1, 1, 1, 32, 32, replace(good, buffers=payloads, chunks=None))
    assert read_tensor(whole, encoding).shape == values.shape
    cut = replace(whole, body=replace(whole.body, buffers=(payloads[0][:3], *payloads[1:])))
    assert peak_bytes(lambda: read_tensor(cut, encoding)) < 0.2 * values.nbytes
    with pytest.raises(ProtocolError):
        read_tensor(cut, encoding)


def test_a_state_is_restored_bit_for_bit_with_its_names_and_dtypes() -> None:
    read = read_state(over_the_wire(Message(Kind.MODEL, body=state_body(state()))).body)
    assert read.keys() == state().keys()
    assert all(same_bits(read[name], tensor) for name, tensor in state().items())


def test_a_state_has_the_bytes_that_safetensors_writes() -> None:
    given = {
        **state(),
        'a "name"\n\u00e9': torch.ones(2, dtype=torch.bfloat16),
        "half": torch.ones((), dtype=torch.float16),
    }
    given |= {str(dtype): torch.ones(3, dtype=dtype) for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32)}
    assert bytes(state_body(given).contiguous()) == safetensors.torch.save(given)
    assert bytes(state_body({}).contiguous()) == safetensors.torch.save({})


def test_a_state_is_sent_and_read_without_a_copy() -> None:
    weight = torch.arange(6.0)
    body = state_body({"w": weight})
    weight[0] = 7.0
    assert read_state(body)["w"][0] == 7.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "LARGE_BODY_BYTES", 1)
        received = over_the_wire(Message(Kind.MODEL, body=body)).body
    assert len(received.buffers) == 1
    read = read_state(received)["w"]
    received.buffers[0][-4:] = bytes(4)
    assert read.tolist() == [7.0, 1.0, 2.0, 3.0, 4.0, 0.0]


def test_tensors_that_are_not_aligned_are_read_too() -> None:
    packed = bytes(state_body({"w": torch.arange(3.0)}).contiguous())
    length = int.from_bytes(packed[:8], "little")
    shifted = (length + 1).to_bytes(8, "little") + packed[8 : 8 + length] + b" " + packed[8 + length :]
    read = read_state(Body.of(shifted))["w"]
    assert read.tolist() == [0.0, 1.0, 2.0]
    assert read.data_ptr() % 4 == 0


WEIGHT = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        [],
        [["w", WEIGHT]],
        "w",
        7,
        None,
        {"w": []},
        {"w": {}},
        {"w": WEIGHT, "v": WEIGHT},  # two at the same offsets
        {"w": WEIGHT | {"data_offsets": [8, 16]}},  # a gap before it
        {"w": WEIGHT | {"data_offsets": [0, 4]}},
        {"w": WEIGHT | {"data_offsets": [-8, 0]}},
        {"w": WEIGHT | {"data_offsets": [0, 8, 8]}},
        {"w": WEIGHT | {"data_offsets": [False, 8]}},
        {"w": WEIGHT | {"shape": [-1, -2]}},
        {"w": WEIGHT | {"shape": [2.0]}},
        {"w": WEIGHT | {"shape": {"2": 2}}},
        {"w": WEIGHT | {"shape": [0, 2**80]}},
        {"w": WEIGHT | {"dtype": "F128"}},
        {"w": WEIGHT | {"dtype": []}},
        {"w": WEIGHT, "e": {"dtype": "F32", "shape": [0, 2**80], "data_offsets": [8, 8]}},
        {"e": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}},  # bytes that belong to no tensor
    ],
    ids=lambda header: json.dumps(header)[:60],
)
def test_a_header_that_does_not_fit_its_bytes_is_a_protocol_error(header: object) -> None:
    written = json.dumps(header).encode()
    with pytest.raises(ProtocolError, match="safetensors"):
        read_state(Body.of(len(written).to_bytes(8, "little") + written + bytes(8)))


def test_tied_weights_and_views_can_be_sent() -> None:
    weight = torch.arange(6.0)
    tied = {"a": weight, "b": weight, "c": weight[2:4], "d": weight.reshape(2, 3).t()}
    read = read_state(state_body(tied))
    assert all(torch.equal(read[name], tensor) for name, tensor in tied.items())


def test_a_model_without_tensors_can_be_sent() -> None:
    assert read_state(state_body({})) == {}


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(st.data())
def test_a_damaged_model_is_tensors_or_a_protocol_error(data: st.DataObject) -> None:
    packed = bytearray(state_body(state()).contiguous())
    for _ in range(data.draw(st.integers(0, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = read_state(Body.of(bytes(packed[: data.draw(st.integers(0, len(packed)) | st.just(len(packed)))])))
    except ProtocolError:
        return
    assert all(isinstance(tensor, torch.Tensor) for tensor in read.values())


SIZES = st.sampled_from([0, 1, 2, 3, 10, 2**31, 2**32 - 1])


@pytest.mark.slow
@given(
    st.sampled_from([Kind.ACTIVATION, Kind.GRADIENT]),
    st.lists(SIZES, max_size=8).map(tuple),
    SIZES,
    st.sampled_from([0, 4, 8, 12, 24, 48, 100]),
    st.sampled_from(["", "float32", "float64"]),
)
@example(Kind.GRADIENT, (1, 2**32 - 1, 2**32 - 1, 0), 1, 0, "float32")
def test_any_header_over_any_bytes_is_a_tensor_or_a_protocol_error(
    kind: Kind, shape: tuple[int, ...], samples: int, size: int, dtype: str
) -> None:
    message = Message(kind, 1, 1, 1, samples, 99, Body.of(bytes(size), dtype=dtype, shape=shape))
    with contextlib.suppress(ProtocolError):
        assert read_tensor(message).shape == shape
        read_labels(message, classes=10)


@pytest.mark.slow
@given(st.binary(max_size=60))
def test_any_bytes_are_a_model_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        read_state(Body.of(data))

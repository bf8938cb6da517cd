"""Several tensors over a cut: each is encoded by itself, and restored bit by bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipar.cutting.stage_line import Line
from pipar.errors import ProtocolError
from pipar.nn.device_part import TorchDevicePart
from pipar.nn.micro_batches import MicroBatch
from pipar.nn.optimizers import sgd
from pipar.nn.server_part import TorchServerPart
from pipar.tasks.task import classification
from pipar.tensors.crossing import Received
from pipar.wire.frames import Assembler, cut_message, pack_frame, unpack_frame
from pipar.wire.messages import Kind, Message, TensorPart

SAMPLES = 6
WIDTH = 40
LOWEST = torch.finfo(torch.float32).min
EXACT = ("raw", "sparse", "planes", "sparse-planes")


class First(nn.Module):
    """A ReLU's output, another value, a mask with infinite values, and the tokens themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.other = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        states = self.embed(tokens)
        mask = torch.zeros(len(tokens), tokens.shape[1]).masked_fill(tokens == 0, -torch.inf)
        return torch.relu(states), self.other(states), mask, tokens


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.again, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, rectified: Tensor, other: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        weights = (rectified * other).sum(-1).add(mask).softmax(-1).unsqueeze(-1)
        return self.head((weights * (rectified + self.again(tokens))).sum(1))


def parts() -> tuple[TorchDevicePart, TorchServerPart]:
    torch.manual_seed(0)
    stages = {"first": First(), "second": Second()}
    lines = [Line({name: stage}, {name: stage.state_dict(keep_vars=True)}) for name, stage in stages.items()]
    rounding = lambda *_: np.random.default_rng(0)  # noqa: E731
    device = TorchDevicePart(lines[0], sgd(), has_loss=False, rounding=rounding)
    return device, TorchServerPart(lines[1], sgd(), task=classification(3), rounding=rounding)


def piece() -> MicroBatch:
    tokens = torch.randint(1, 9, (SAMPLES, 5), generator=torch.Generator().manual_seed(1))
    tokens[:, 3:] = 0
    return MicroBatch(tokens, torch.arange(SAMPLES) % 3, SAMPLES)


def over_the_wire(message: Message) -> Message:
    while message.body.chunks is not None and len(message.body.chunks.ready) < message.body.chunks.count:
        message.body.chunks.add(message.body.chunks.encode_next())
    assembler, received = Assembler(), None
    for frame in cut_message(message, 1, 1):
        received = assembler.feed(unpack_frame(pack_frame(frame)))
    assert received is not None
    return received


def activation(device: TorchDevicePart, up: str) -> Message:
    body = device.encode(device.forward(1, piece()), piece(), up, (1, 1, 1))
    return Message(Kind.ACTIVATION, 1, 1, 1, SAMPLES, SAMPLES, body)


def answered(device: TorchDevicePart, server: TorchServerPart, up: str, down: str) -> tuple[Message, Message]:
    """Train both parts on a micro-batch; return the messages as they arrived."""
    sent = over_the_wire(activation(device, up))
    assert [*server.chunk_bytes(sent, down)] == [SAMPLES * 5 * WIDTH * 4] * 2
    body = server.encode(server.backward(server.forward(server.decode(sent, up))), down, (1, 1, 1, "phone"))
    back = over_the_wire(Message(Kind.GRADIENT, 1, 1, 1, SAMPLES, SAMPLES, body))
    device.backward(1, device.decode(back, down))
    return sent, back


def gradients(*of: TorchDevicePart | TorchServerPart) -> dict[str, Tensor]:
    return {name: w.grad for part in of for name, w in part.module.named_parameters() if w.grad is not None}


def expected() -> dict[str, Tensor]:
    device, server = parts()
    output = server.module(*device.module(piece().inputs))
    (nn.functional.cross_entropy(output, piece().targets, reduction="sum") / SAMPLES).backward()
    return gradients(device, server)


@pytest.mark.parametrize("up", EXACT)
@pytest.mark.parametrize("down", EXACT)
def test_exact_encodings_give_the_gradients_of_the_uncut_network_bit_by_bit(up: str, down: str) -> None:
    device, server = parts()
    answered(device, server, up, down)
    found, wanted = gradients(device, server), expected()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())


def test_only_the_output_of_a_relu_is_sparse_and_integers_stay_integers() -> None:
    sent, back = answered(*parts(), "sparse-planes", "sparse")
    assert [(part.dtype, part.encoding) for part in sent.body.parts] == [
        ("float32", "sparse-planes"),
        ("float32", "planes"),
        ("float32", "planes"),
        ("int64", "raw"),
    ]
    first, second, *_ = (view.nbytes for view in sent.body.buffers)
    assert first < 0.6 * SAMPLES * 5 * WIDTH * 4 < second
    assert [part.encoding for part in back.body.parts] == ["sparse", "raw"]
    sparse, raw = (view.nbytes for view in back.body.buffers)
    assert sparse < 0.6 * raw


def test_what_has_no_gradient_is_never_sent_back() -> None:
    sent, back = answered(*parts(), "raw", "raw")
    assert [part.has_gradient for part in sent.body.parts] == [True, True, False, False]
    assert [part.shape for part in back.body.parts] == [part.shape for part in sent.body.parts[:2]]
    assert back.body.size_bytes == 2 * SAMPLES * 5 * WIDTH * 4


@pytest.mark.parametrize("encoding", ["fp16", "int8", "topk"])
def test_lossy_encodings_round_only_what_has_a_gradient(encoding: str) -> None:
    device, server = parts()
    sent = over_the_wire(activation(device, encoding))
    received = server.decode(sent, encoding)[0]
    assert isinstance(received, Received)
    true = First.forward(device.module.stages["first"], piece().inputs)
    same = [torch.equal(one, other) for one, other in zip(received.tensors, true, strict=True)]
    assert same == [False, False, True, True]
    assert device.take_encoding_error() is not None
    if encoding == "int8":
        assert len(device._encoding_errors._lossy) == 2  # a residual for each tensor


def test_a_device_that_breaks_the_agreement_is_refused() -> None:
    device, server = parts()
    sent = over_the_wire(activation(device, "planes"))
    with pytest.raises(ProtocolError, match="is encoded as planes, not as sparse"):
        server.decode(sent, "sparse")
    none = tuple(replace(part, has_gradient=False, is_rectified=False) for part in sent.body.parts)
    with pytest.raises(ProtocolError, match="asks for the gradient of none"):
        server.chunk_bytes(replace(sent, body=replace(sent.body, parts=none)), "raw")
    server.forward(server.decode(sent, "planes"))
    body = device.encode(device.forward(2, piece())[:2], piece(), "raw")
    fewer = over_the_wire(Message(Kind.ACTIVATION, 1, 1, 1, SAMPLES, SAMPLES, body))
    with pytest.raises(ProtocolError, match="different shape or dtype"):
        server.decode(fewer, "raw")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_ruin_the_model_are_refused_wherever_they_are(value: float) -> None:
    for place in (1, 2):
        device, server = parts()
        outputs = list(device.forward(1, piece()))
        outputs[place] = outputs[place] + value
        body = device.encode(tuple(outputs), piece(), "raw", (1, 1, 1))
        sent = over_the_wire(Message(Kind.ACTIVATION, 1, 1, 1, SAMPLES, SAMPLES, body))
        with pytest.raises(ProtocolError, match="infinite or not a number"):
            server.forward(server.decode(sent, "raw"))


@pytest.mark.parametrize("count", [1, 3, 5])
def test_another_number_of_tensors_than_the_layers_take_is_refused(count: int) -> None:
    device, server = parts()
    outputs = device.forward(1, piece())
    given = outputs[0] if count == 1 else (*outputs, outputs[0])[:count]
    body = device.encode(given, piece(), "raw", (1, 1, 1))
    sent = over_the_wire(Message(Kind.ACTIVATION, 1, 1, 1, SAMPLES, SAMPLES, body))
    with pytest.raises(ProtocolError, match="do not take activations of"):
        server.forward(server.decode(sent, "raw"))


def test_an_index_out_of_range_is_refused_at_any_time() -> None:
    device, server = parts()
    for number in (1, 2):
        outputs = device.forward(number, piece())
        body = device.encode((*outputs[:3], outputs[3] + 100), piece(), "raw", (1, 1, number))
        sent = over_the_wire(Message(Kind.ACTIVATION, 1, 1, number, SAMPLES, SAMPLES, body))
        with pytest.raises(ProtocolError, match="index out of range"):
            server.forward(server.decode(sent, "raw"))
        server.forward(server.decode(over_the_wire(activation(parts()[0], "raw")), "raw"))


@pytest.mark.parametrize(("value", "is_refused"), [(1e30, True), (-1e30, True), (-1e9, False), (LOWEST, False)])
def test_what_has_no_gradient_may_be_a_mask_but_have_no_other_huge_values(value: float, is_refused: bool) -> None:
    device, server = parts()
    outputs = list(device.forward(1, piece()))
    outputs[2] = outputs[2].clamp(min=value) if value < 0 else outputs[2].clamp(min=0) + value
    body = device.encode(tuple(outputs), piece(), "raw", (1, 1, 1))
    sent = over_the_wire(Message(Kind.ACTIVATION, 1, 1, 1, SAMPLES, SAMPLES, body))
    if is_refused:
        with pytest.raises(ProtocolError, match="values that are too large"):
            server.decode(sent, "raw")
    else:
        server.forward(server.decode(sent, "raw"))


def test_a_gradient_that_is_not_that_of_the_activations_is_refused() -> None:
    device, server = parts()
    _, back = answered(device, server, "raw", "raw")
    device.forward(1, piece())
    swapped = replace(back, body=replace(back.body, parts=(TensorPart((SAMPLES, 3), "float32"), *back.body.parts[1:])))
    with pytest.raises(ProtocolError, match="other tensors than the gradients"):
        device.decode(swapped, "raw")
    with pytest.raises(ProtocolError, match="other tensors than the gradients"):
        device.decode(back, "sparse")

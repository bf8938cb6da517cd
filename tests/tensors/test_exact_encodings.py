"""Every exact encoding gives the same bits: both parts of a network, and all messages between them as on a link."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from pipar.cutting.split import split_model
from pipar.networks.models import build_model
from pipar.nn.device_part import TorchDevicePart
from pipar.nn.micro_batches import MicroBatch, cut_micro_batches
from pipar.nn.optimizers import sgd
from pipar.nn.server_part import TorchServerPart
from pipar.tasks.task import classification
from pipar.tensors.bodies import weights_sha256
from pipar.tensors.relu_outputs import rectified_cuts
from pipar.wire import encodings
from pipar.wire.frames import Assembler, cut_message, pack_frame, unpack_frame
from pipar.wire.messages import Body, Kind, Message

pytestmark = pytest.mark.usefixtures("one_thread")

NETWORKS = ("vgg5", "vgg16", "resnet18", "resnet101", "mobilenetv3_small", "mobilenetv3_large")
LARGE = ("vgg16", "resnet101", "mobilenetv3_large")
SHAPE = (3, 32, 32)


def travel(kind: Kind, piece: MicroBatch, body: Body) -> Message:
    """Return a message as it arrives over a link, its chunks encoded one after another."""
    if body.chunks is not None:
        while len(body.chunks.ready) < body.chunks.count:
            body.chunks.add(body.chunks.encode_next())
    assembler = Assembler()
    sent = Message(kind, 1, 1, 1, piece.samples, piece.batch_samples, body)
    arrived = [assembler.feed(unpack_frame(pack_frame(frame))) for frame in cut_message(sent, 1, 1)]
    assert arrived[-1] is not None
    return arrived[-1]


def trained(model: nn.Sequential, split_point: int, up: str, down: str, batches: list[list[MicroBatch]]) -> str:
    """Return the hash of all weights after an epoch."""
    front, rest = split_model(model, split_point)
    device = TorchDevicePart(front, sgd(), has_loss=False)
    server = TorchServerPart(rest, sgd(), task=classification(10))
    for pieces in batches:
        activations = [device.forward(1 + n, piece) for n, piece in enumerate(pieces)]
        for n, (piece, activation) in enumerate(zip(pieces, activations, strict=True), start=1):
            message = travel(Kind.ACTIVATION, piece, device.encode(activation, piece, up))
            served = server.backward(server.forward(server.decode(message, up)))
            answer = travel(Kind.GRADIENT, piece, server.encode(served, down))
            gradient = device.decode(_numbered(answer, n), down)
            device.backward(n, gradient)
        device.step()
        server.step()
    return weights_sha256(model.state_dict())


def _numbered(message: Message, n: int) -> Message:
    return Message(message.kind, 1, 1, n, message.samples, message.batch_samples, message.body)


def batches(count: int) -> Iterator[list[MicroBatch]]:
    chance = torch.Generator().manual_seed(7)
    for _ in range(count):
        inputs, labels = torch.randn(4, *SHAPE, generator=chance), torch.randint(10, (4,), generator=chance)
        yield cut_micro_batches(inputs, labels, [2, 2])


def cuts(name: str, layers: int) -> list[int]:
    """Return all cuts of a small network, and every sixth cut of a large one, which repeats the same blocks."""
    return list(range(1, layers)) if name not in LARGE else sorted({*range(1, layers, 6), layers - 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "norm"),
    # Large networks repeat the blocks of small ones, which show both normalisations.
    [(name, norm) for name in NETWORKS for norm in ("batch", "group") if name not in LARGE or norm == "batch"],
)
def test_weights_after_an_epoch_are_the_same_bits_with_every_exact_encoding(name: str, norm: str) -> None:
    model = build_model(name, input_shape=SHAPE, classes=10, norm=norm, seed=3)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rectified = rectified_cuts(model, SHAPE)
    data = list(batches(1 if name in LARGE else 2))
    coded = [encoding for encoding in encodings.EXACT if encoding != "raw"]
    hashes = {}
    for place, split_point in enumerate(cuts(name, len(model))):
        # Raw is trained only once: the cut does not change the weights. Networks of many cuts try the others in turn.
        in_turn = coded if name == "vgg5" else [coded[place % len(coded)]]
        for encoding in encodings.EXACT if split_point == 1 else in_turn:
            here = encoding if split_point in rectified else encodings.dense(encoding)
            model.load_state_dict(start)
            hashes[split_point, encoding] = trained(model, split_point, here, here, data)
    assert len(set(hashes.values())) == 1, hashes

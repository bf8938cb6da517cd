"""Kept activations are those that their own device has sent, all of them and with the same part, or none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipar.errors import ProtocolError
from pipar.nn.kept_activations import KeptActivations
from pipar.nn.micro_batches import Decoded
from pipar.tasks.losses import ClassLoss
from pipar.tasks.task import Task, classification
from pipar.tensors.crossing import Received
from pipar.tensors.inputs import InputForm, TensorForm
from pipar.wire.messages import Body, Kind, Message, TensorPart, numbers_body

SAMPLES, SESSION, EPOCH = 5, 7, 3
LABELS = classification(10)


class World:
    """Two devices whose part has a version."""

    def __init__(self, limit_bytes: int = 1000) -> None:
        self.version = "one"
        self.kept = KeptActivations(limit_bytes, lambda _: self.version, LABELS)
        self.rows = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0))
        self.labels = torch.arange(SAMPLES)

    def send(self, first: int = 0, last: int = SAMPLES, device: str = "a") -> None:
        part = slice(first, last)
        self.kept.add(device, Decoded(self.rows[part].clone(), self.labels[part], SAMPLES, SAMPLES))

    def begin(self, device: str = "a") -> None:
        self.kept.begin(device, SESSION, EPOCH, SAMPLES)


def refers(*numbers: int, samples: int | None = None, body: Body | None = None) -> Message:
    given = body or numbers_body(np.array(numbers, "<u4").tobytes())
    return Message(Kind.ACTIVATION, 4, 1, 1, len(numbers) if samples is None else samples, 9, given)


def test_what_was_sent_comes_back_with_the_same_bits_in_any_order() -> None:
    world = World()
    world.begin()
    world.send(0, 2)
    world.send(2, 5)
    assert world.kept.epoch_of("a", SESSION) == EPOCH
    activation, labels, batch_samples, count = world.kept.recall("a", refers(4, 0, 3))
    assert torch.equal(activation, world.rows[[4, 0, 3]])
    assert labels.tolist() == [4, 0, 3]
    assert batch_samples == count == 9
    activation.zero_()  # layers may overwrite what they get
    assert torch.equal(world.kept.recall("a", refers(4))[0], world.rows[[4]])


def test_several_tensors_are_kept_as_they_cross() -> None:
    kept = KeptActivations(1000, lambda _: "", LABELS)
    sent = Received((torch.randn(2, 3), torch.tensor([[1], [2]])), (TensorPart((2, 3), "float32"),) * 2)
    kept.begin("a", SESSION, EPOCH, 2)
    assert kept.add("a", Decoded(sent, torch.tensor([0, 1]), 2, 2))[0] is sent
    found = kept.recall("a", refers(1, 0))[0]
    assert isinstance(found, Received)
    assert [tensor.dtype for tensor in found.tensors] == [torch.float32, torch.int64]
    assert all(torch.equal(one, other[[1, 0]]) for one, other in zip(found.tensors, sent.tensors, strict=True))


def test_a_device_that_has_not_sent_everything_sends_it_again() -> None:
    world = World()
    world.begin()
    world.send(0, 4)
    assert world.kept.epoch_of("a", SESSION) is None
    with pytest.raises(ProtocolError, match="does not have"):
        world.kept.recall("a", refers(0))
    world.kept.forget_unfinished("a")
    world.begin()
    world.send()
    world.kept.forget_unfinished("a")
    assert world.kept.epoch_of("a", SESSION) == EPOCH


def test_a_device_cannot_refer_to_what_another_one_has_sent() -> None:
    world = World()
    world.begin()
    world.send()
    with pytest.raises(ProtocolError, match="does not have"):
        world.kept.recall("b", refers(0))
    world.kept.keep_only(["b"])
    assert world.kept.epoch_of("a", SESSION) is None


def test_a_new_session_or_another_part_starts_from_nothing() -> None:
    world = World()
    world.begin()
    world.send()
    assert world.kept.epoch_of("a", SESSION + 1) is None
    assert world.kept.epoch_of("a", SESSION) == EPOCH
    world.version = "two"
    assert world.kept.epoch_of("a", SESSION) is None
    world.version = "one"
    assert world.kept.epoch_of("a", SESSION) is None


def test_nothing_above_the_limit_is_kept() -> None:
    world = World(limit_bytes=SAMPLES * (3 * 4 + 4) - 1)
    world.begin()
    world.send()
    assert world.kept.epoch_of("a", SESSION) is None
    assert "79 B" in str(world.kept.refusal("a"))
    enough = World(limit_bytes=SAMPLES * (3 * 4 + 4))
    enough.begin()
    enough.send()
    assert enough.kept.epoch_of("a", SESSION) == EPOCH
    assert enough.kept.refusal("a") is None


def test_a_claim_of_many_samples_allocates_nothing() -> None:
    kept = KeptActivations(1 << 30, lambda _: "", LABELS)
    kept.begin("a", SESSION, EPOCH, 1 << 60)
    kept.add("a", Decoded(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64), 1, 1))
    assert kept.refusal("a") is not None


def test_more_samples_than_announced_are_not_kept() -> None:
    world = World()
    world.begin()
    world.send()
    world.send(0, 1)
    assert world.kept.epoch_of("a", SESSION) == EPOCH


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (refers(0, 5), "refers to activation 5 of 5"),
        (refers(0, 1, samples=3), "does not refer to 3 activations"),
        (refers(samples=0), "does not refer to 0 activations"),
        (refers(0, body=Body.of(bytes(4))), "does not refer to 1 activations"),
    ],
)
def test_a_message_that_refers_to_nothing_is_refused(message: Message, says: str) -> None:
    world = World()
    world.begin()
    world.send()
    with pytest.raises(ProtocolError, match=says):
        world.kept.recall("a", message)


def test_targets_are_kept_in_the_bytes_that_are_counted_and_come_back_as_they_were() -> None:
    pixels = Task(ClassLoss(), InputForm((TensorForm((4, 4), torch.int64),)), 5)
    kept = KeptActivations(SAMPLES * (3 * 4 + 4 * 4), lambda _: "", pixels)
    targets = torch.randint(-1, 5, (SAMPLES, 4, 4))
    targets[targets < 0] = -100
    kept.begin("a", SESSION, EPOCH, SAMPLES)
    kept.add("a", Decoded(torch.zeros(SAMPLES, 3), targets, SAMPLES, 1.0))
    stored = kept._devices["a"].targets
    assert isinstance(stored, torch.Tensor)
    assert stored.untyped_storage().nbytes() == SAMPLES * pixels.size.sample_bytes
    body = numbers_body(np.arange(SAMPLES, dtype="<u4").tobytes(), pixels.count_bytes(targets))
    recalled = kept.recall("a", refers(*range(SAMPLES), body=body)).targets
    assert isinstance(recalled, torch.Tensor)
    assert recalled.dtype == torch.int64
    assert torch.equal(recalled, targets)

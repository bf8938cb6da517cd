"""Targets travel as they are, and a peer's targets are refused unless the task takes them."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipar.errors import ModelError, ProtocolError
from pipar.networks.models import check_fits
from pipar.nn.micro_batches import Decoded
from pipar.nn.optimizers import sgd
from pipar.nn.server_part import TorchServerPart
from pipar.tasks.evaluation import correct_answers
from pipar.tasks.losses import ClassLoss, ElementLoss, OwnLoss
from pipar.tasks.task import ONE_LABEL, Task, classification, target_form
from pipar.tensors.bodies import tensor_body
from pipar.tensors.inputs import InputForm, TensorForm
from pipar.wire.messages import Kind, Message

PIXELS = InputForm((TensorForm((2, 2), torch.int64),))
SEGMENTATION = Task(ClassLoss(), PIXELS, 5)
NUMBERS = Task(ElementLoss("mse"), InputForm((TensorForm((3,)),)))
SEVERAL = {"kind": torch.tensor([1, 0]), "mask": torch.tensor([[True], [False]]), "size": torch.tensor([0.5, 2.0])}
OWN = Task(OwnLoss(lambda output, _: output.mean()), target_form(SEVERAL))


def message(task: Task, targets: Any, count: float = 8.0, *, samples: int = 2) -> Message:
    body = tensor_body(torch.zeros(samples, 3), task.buffers(targets, count))
    return Message(Kind.ACTIVATION, 1, 1, 1, samples, 4, body)


def test_labels_have_the_bytes_that_they_always_had() -> None:
    (sent,) = classification(10).buffers(torch.tensor([3, 9]), 2.0)
    assert bytes(sent) == struct.pack("<2i", 3, 9)
    assert classification(10).size.of(7) == 28


@pytest.mark.parametrize(
    ("task", "targets", "each"),
    [
        (SEGMENTATION, torch.tensor([[[0, 4], [-100, 1]]] * 2), 4),
        (replace(SEGMENTATION, classes=200), torch.tensor([[[0, 199], [-100, 1]]] * 2), 8),
        (replace(SEGMENTATION, classes=40_000), torch.tensor([[[0, 39_999], [-100, 1]]] * 2), 16),
        (NUMBERS, torch.tensor([[1.5, -2.0, 0.0]] * 2), 12),
        (OWN, SEVERAL, 8 + 1 + 4),
    ],
)
def test_targets_of_any_form_are_restored(task: Task, targets: Any, each: int) -> None:
    read, _ = task.read(message(task, targets))
    pairs = [(read, targets)] if isinstance(read, Tensor) else [(read[name], targets[name]) for name in SEVERAL]
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in pairs)
    assert task.size.sample_bytes == each


def test_what_a_batch_counts_travels_only_if_it_depends_on_the_targets() -> None:
    assert [task.size.message_bytes for task in (classification(3), NUMBERS, OWN, SEGMENTATION)] == [0, 0, 0, 8]
    weighted = classification(3, ClassLoss(weights=(1.0, 2.0, 4.0)))
    assert weighted.count(torch.tensor([0, 2, 2])) == 9.0
    _, count = weighted.read(message(weighted, torch.tensor([0, 2]), 9.0))
    assert count == 9.0
    assert NUMBERS.read(message(NUMBERS, torch.zeros(2, 3)))[1] == 4 * 3  # of the whole batch of four samples


def test_a_batch_in_which_nothing_counts_has_no_loss() -> None:
    nothing = torch.full((2, 2, 2), -100)
    assert SEGMENTATION.count(nothing) == 1.0
    assert SEGMENTATION.share(torch.randn(2, 5, 2, 2), nothing, 1.0) == 0.0


FOUR = torch.zeros(2, 2, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("task", "targets", "count", "sentence"),
    [
        (SEGMENTATION, FOUR + 5, 8.0, "label 5, but the highest label is 4"),
        (SEGMENTATION, FOUR - 1, 8.0, "label -1, but labels start at 0"),
        (SEGMENTATION, FOUR, float("nan"), "gives nan as the count"),
        (SEGMENTATION, FOUR, float("inf"), "gives inf as the count"),
        (SEGMENTATION, FOUR, 0.0, "gives 0 as the count"),
        (SEGMENTATION, FOUR, -8.0, "gives -8 as the count"),
        (SEGMENTATION, FOUR, 7.9, "alone has 8"),
        (NUMBERS, torch.full((2, 3), float("nan")), 1.0, "infinite or not a number"),
        (NUMBERS, torch.full((2, 3), 1e30), 1.0, "too large"),
        (Task(ElementLoss("bce"), NUMBERS.form), torch.full((2, 3), 1.5), 1.0, "outside 0..1"),
        (Task(ClassLoss(), NUMBERS.form), torch.full((2, 3), -0.5), 1.0, "not probabilities"),
    ],
)
def test_hostile_targets_are_refused(task: Task, targets: Tensor, count: float, sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        task.read(message(task, targets, count))


@pytest.mark.parametrize("size", [8, 15, 17, 2, 1000])
def test_another_number_of_bytes_is_refused(size: int) -> None:
    body = tensor_body(torch.zeros(2, 3), [memoryview(bytes(size))])
    with pytest.raises(ProtocolError, match=r"bytes of targets for 2 samples.*same \[task\]"):
        SEGMENTATION.read(Message(Kind.ACTIVATION, 1, 1, 1, 2, 4, body))


def test_pieces_of_a_batch_cannot_count_more_than_the_batch() -> None:
    """Otherwise a device could give its batch any weight, by saying that it counts little."""

    def piece(count: float) -> Decoded:
        return Decoded(torch.zeros(2, 5, 2, 2), FOUR, 6, count)

    part = TorchServerPart(nn.Sequential(nn.Conv2d(5, 5, 1)), sgd(), task=SEGMENTATION)
    part.forward(piece(16.0))
    part.forward(piece(16.0))
    with pytest.raises(ProtocolError, match="add up to 24 so far, but the latest gives 16 as the count"):
        part.forward(piece(16.0))
    part.discard()
    part.forward(piece(16.0))
    with pytest.raises(ProtocolError, match="the latest gives 20 as the count"):
        part.forward(piece(20.0))
    part.step()
    part.forward(piece(20.0))


@pytest.mark.parametrize(
    ("network", "task", "sentence"),
    [
        (nn.Linear(4, 2), NUMBERS, r"to \(2, 2\), but their targets have \(2, 3\): change its last layer"),
        (nn.Linear(4, 3), SEGMENTATION, r"to \(2, 3\), but 5 classes need \(2, 5, 2, 2\)"),
        (nn.Linear(4, 2), classification(2, ClassLoss(weights=(1.0,))), "2 classes, but task.class_weights has 1"),
        (nn.LSTM(4, 3), NUMBERS, "the model returns a tuple, but it must return one tensor"),
        (
            nn.Linear(4, 3),
            Task(ClassLoss("next_token"), InputForm((TensorForm((7,), torch.int64),)), 9),
            "9 classes need",
        ),
    ],
)
def test_a_network_that_does_not_fit_its_task_is_refused(network: nn.Module, task: Task, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        check_fits(network, (4,), task)


def test_an_output_with_one_number_fits_targets_without_a_dimension_for_it() -> None:
    for shape in ((), (1,)):
        check_fits(nn.Linear(4, 1), (4,), Task(ElementLoss("mse"), InputForm((TensorForm(shape),))))
    one = Task(ElementLoss("mse"), InputForm((TensorForm(()),)))
    output, targets = torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 5.0])
    assert one.share(output, targets, 2.0) == F.mse_loss(output[:, 0], targets)


def test_random_targets_are_classes_even_if_some_pixels_of_the_data_do_not_count() -> None:
    task = replace(SEGMENTATION, form=target_form(torch.tensor([[[-100, 4], [0, 1]]])))
    drawn = task.random(50, torch.Generator().manual_seed(0))
    assert isinstance(drawn, Tensor)
    assert sorted(set(drawn.flatten().tolist())) == [0, 1, 2, 3, 4]


def test_bytes_are_classes_too() -> None:
    mask = torch.tensor([[[0, 156], [1, 2]]], dtype=torch.uint8)  # 156 has the bits of -100
    assert target_form(mask) == PIXELS
    assert ClassLoss().count(mask) == 4.0
    assert target_form(torch.tensor([1, 2], dtype=torch.int32)) == ONE_LABEL


def test_random_targets_of_a_set_with_positions_that_do_not_count_are_classes() -> None:
    task = Task(ClassLoss("next_token"), target_form(torch.tensor([[-100, 4]])), 5)
    drawn = task.random(200, torch.Generator().manual_seed(0))
    assert isinstance(drawn, torch.Tensor)
    assert set(drawn.flatten().tolist()) <= set(range(5))


@pytest.mark.parametrize("ignored", [-100, 255, 2])
def test_random_and_example_targets_are_classes_that_the_network_has(ignored: int) -> None:
    pixels = torch.tensor([[[0, 4], [ignored, 1]]])
    task = Task(ClassLoss(ignored=ignored), target_form(pixels), 5)
    for drawn in (task.random(50, torch.Generator().manual_seed(0)), task.example(3)):
        assert isinstance(drawn, Tensor)
        assert (int(drawn.min()), int(drawn.max())) == (0, 4)


def test_random_integers_of_a_loss_of_ones_own_are_values_that_occur() -> None:
    """A number in between may be no class, and not be ignored either."""
    task = Task(OwnLoss(lambda output, _: output.mean()), target_form(torch.tensor([[-100, 3], [1, 2]])))
    drawn = task.random(50, torch.Generator().manual_seed(0))
    assert isinstance(drawn, Tensor)
    assert drawn.unique().tolist() == [-100, 3]
    assert drawn.shape == (50, 2)


def test_ignored_values_are_no_classes() -> None:
    mask = torch.tensor([[[0, 3], [255, 1]]], dtype=torch.uint8)
    assert ClassLoss(ignored=255).classes_in(mask) == 4
    assert ClassLoss().classes_in(mask) == 256
    assert ClassLoss().classes_in(torch.full((1, 2), -100)) == 1


def test_class_156_of_a_mask_of_bytes_counts_in_accuracy() -> None:
    mask = torch.tensor([[156, 1]], dtype=torch.uint8)  # 156 has the bits of -100
    answers = F.one_hot(mask.long(), 200).movedim(-1, 1).float()
    assert correct_answers(ClassLoss(), answers, mask) == (2, 2)

"""A task: the loss that is trained, the targets that it takes, and how these travel with a micro-batch."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipar.errors import ProtocolError
from pipar.tasks.losses import ClassLoss, Loss, Targets
from pipar.tensors.bodies import check_range, last_bytes
from pipar.tensors.inputs import InputForm, TensorForm, in_dtype, mapped, tensors_of
from pipar.wire.messages import COUNT_BYTES, Message, TargetSize, tensor_bytes

#: A label for each sample.
ONE_LABEL = InputForm((TensorForm((), torch.int64),))
_SHORT = (torch.int8, torch.int16)
#: How far the counts of pieces, added up in another order, may exceed that of their batch.
COUNT_ROUNDING = 1e-9


@dataclass(frozen=True)
class Task:
    """What is learned: a loss, the form of one sample's targets, and the number of classes where there are any.

    Targets in floating point have the network's dtype. Labels travel in 32 bits; of many classes in one sample, each
    takes as few bytes as the number of classes allows.
    """

    loss: Loss
    form: InputForm = ONE_LABEL
    classes: int = 0
    dtype: torch.dtype = torch.float32

    def share(self, output: Any, targets: Targets, count: float) -> Tensor:
        """Return a piece's share of its batch's mean loss; `count` is that of the whole batch."""
        return self.loss.total(output, targets) / count

    def count(self, targets: Targets) -> float:
        """Return the count of a batch; 1 if no position has a target, because it then has no loss."""
        known = self.loss.count_of_samples(len(tensors_of(targets)[0]), self.form)
        return known if known is not None else self.loss.count(targets) or 1.0

    @property
    def sends_count(self) -> bool:
        """Whether a piece has to say the count of its batch, because that depends on the targets."""
        return self.loss.count_of_samples(1, self.form) is None

    @property
    def name(self) -> str:
        return self.loss.name

    @property
    def has_labels(self) -> bool:
        """Whether each sample has one class."""
        return isinstance(self.loss, ClassLoss) and self.form == ONE_LABEL

    # --- targets in messages

    @cached_property
    def size(self) -> TargetSize:
        """The bytes of targets in a message."""
        each = (math.prod(one.shape) * self._sent_dtype(one).itemsize for one in self.form.tensors)
        return TargetSize(sum(each), COUNT_BYTES if self.sends_count else 0)

    def _sent_dtype(self, form: TensorForm) -> torch.dtype:
        if not isinstance(self.loss, ClassLoss) or form.dtype is None:
            return form.dtype or self.dtype
        low, high = min(0, self.loss.ignored), max(self.classes - 1, self.loss.ignored)
        fitting = (one for one in _SHORT if torch.iinfo(one).min <= low and high <= torch.iinfo(one).max)
        return next(fitting, torch.int32) if form.shape else torch.int32

    def as_sent(self, targets: Targets) -> Targets:
        """Return targets in the dtypes in which they are sent."""
        return self._changed(targets, self._sent_dtype)

    def as_read(self, sent: Targets) -> Targets:
        """Return targets that are as they are sent in the dtypes that the loss takes."""
        return self._changed(sent, lambda form: form.dtype or self.dtype)

    def _changed(self, targets: Targets, dtype: Callable[[TensorForm], torch.dtype]) -> Targets:
        pairs = zip(tensors_of(targets), self.form.tensors, strict=True)
        return self.form.structured([tensor.to(dtype(form)) for tensor, form in pairs])

    def buffers(self, targets: Targets, count: float) -> list[memoryview]:
        """Return the bytes of a piece's targets: one tensor after another, then the count of its batch, if needed."""
        sent = list(map(_bytes, tensors_of(self.as_sent(targets))))
        return [*sent, memoryview(struct.pack("<d", count))] if self.sends_count else sent

    def count_bytes(self, targets: Targets) -> bytes:
        """Return the count of a batch as it is sent."""
        return struct.pack("<d", self.count(targets))

    def read(self, message: Message) -> tuple[Targets, float]:
        """Return the targets of a message and the count of its batch; raise ProtocolError if they are wrong."""
        size = message.body.size_bytes - tensor_bytes(message)
        if size != self.size.of(message.samples):
            raise ProtocolError(
                f"{message} has {size} bytes of targets for {message.samples} samples, but {self.form} of each have "
                f"{self.size.of(message.samples)}: start both sides with the same [task]."
            )
        content = last_bytes(message.body.buffers, size)
        targets = self._read(content, message.samples)
        self.check(targets, str(message))
        counted = content[size - self.size.message_bytes :] if self.sends_count else b""
        return targets, self.read_count(message, counted, targets)

    def _read(self, content: bytes, samples: int) -> Targets:
        found, at = [], 0
        for form in self.form.tensors:
            sent, values = self._sent_dtype(form), samples * math.prod(form.shape)
            # Any byte but 0 and 1 would be no boolean.
            as_read = torch.uint8 if sent == torch.bool else sent
            flat = np.frombuffer(content, str(as_read).removeprefix("torch."), values, at).copy()
            at += values * sent.itemsize
            tensor = torch.from_numpy(flat).reshape(samples, *form.shape)
            found.append(tensor != 0 if sent == torch.bool else tensor.to(form.dtype or self.dtype))
        return self.form.structured(found)

    def read_count(self, message: Message, content: bytes, targets: Targets) -> float:
        """Return the count of a message's batch: from its bytes, or from its number of samples."""
        if not self.sends_count:
            known = self.loss.count_of_samples(message.batch_samples, self.form)
            assert known is not None
            return known
        count: float = struct.unpack("<d", content)[0]
        own = self.loss.count(targets)
        if not (math.isfinite(count) and count > 0 and own <= count * (1 + COUNT_ROUNDING)):
            raise ProtocolError(
                f"{message} gives {count:g} as the count of its batch, but this micro-batch alone has {own:g}."
            )
        return count

    def check(self, targets: Targets, of: str) -> None:
        """Raise ProtocolError if a peer's targets have values that the loss does not take."""
        check_range(tensors_of(targets), of)
        wrong = self.loss.wrong_target(targets, self.classes)
        if wrong is not None:
            raise ProtocolError(f"{of} has {wrong}.")

    # --- examples

    def in_dtype(self, targets: Targets) -> Targets:
        """Return targets with floating-point tensors in the network's dtype."""
        return in_dtype(targets, self.dtype)

    def example(self, samples: int, device: torch.device | None = None) -> Targets:
        """Return targets of this form, always the same ones; no class is above the highest."""
        return self._possible(self._possible_form.example(samples, self.dtype, device))

    def random(self, samples: int, generator: torch.Generator) -> Targets:
        """Return random targets of this form."""
        drawn = tensors_of(self._possible_form.random(samples, self.dtype, generator))
        if not isinstance(self.loss, ClassLoss):
            drawn = tuple(map(_least_or_largest, drawn, self.form.tensors))
        return self._possible(self.form.structured(drawn))

    @property
    def _possible_form(self) -> InputForm:
        """The form, with all classes as its range: values that are ignored may be far from them."""
        if not isinstance(self.loss, ClassLoss):
            return self.form
        highest = max(self.classes - 1, 0)
        return replace(self.form, tensors=tuple(replace(one, low=0, high=highest) for one in self.form.tensors))

    def _possible(self, targets: Targets) -> Targets:
        """Return targets with numbers from 0 to 1, which every loss of floating-point numbers takes."""
        return mapped(targets, lambda one: one.sigmoid() if one.is_floating_point() else one)


def _least_or_largest(tensor: Tensor, form: TensorForm) -> Tensor:
    """Return integers that occur in the data: those in between may mean nothing to a user's own loss."""
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        return tensor
    return torch.where(2 * tensor > form.low + form.high, form.high, form.low)


def classification(classes: int, loss: Loss | None = None) -> Task:
    """Return the task of most trainings: cross-entropy with one of these classes for each sample."""
    return Task(loss or ClassLoss(), ONE_LABEL, classes)


def target_form(targets: Targets) -> InputForm:
    """Return the form of the targets of a set; integers of all sizes count as those of 64 bits."""
    forms = tuple(_tensor_form(tensor) for tensor in tensors_of(targets))
    return InputForm(forms, tuple(targets) if isinstance(targets, dict) else None, isinstance(targets, tuple))


def _tensor_form(tensor: Tensor) -> TensorForm:
    shape = tuple(tensor.shape[1:])
    if tensor.is_floating_point():
        return TensorForm(shape)
    dtype = torch.bool if tensor.dtype == torch.bool else torch.int64
    return TensorForm(shape, dtype, int(tensor.min()), int(tensor.max()))


def _bytes(tensor: Tensor) -> memoryview:
    values = tensor.detach().contiguous().reshape(-1).numpy()
    return values.view(np.uint8).data

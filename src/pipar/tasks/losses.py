"""The named losses, each as a sum and a count, so that any division of a batch gives the mean of the whole batch.

The mean loss of a batch, as torch's `reduction="mean"` computes it, is total / count. The count is the number of
samples, tokens, pixels or numbers that have a target, or the sum of their class weights. Both add up over the
micro-batches: the device counts the whole batch before it divides it, and a micro-batch's share of the loss is its
total over that count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from pipar.errors import ConfigError, describe
from pipar.settings.training_sections import TaskSection
from pipar.tensors.inputs import InputForm, Inputs, TensorForm, tensors_of

#: A batch of targets, structured like inputs: a tensor, a tuple or a dictionary, each with a row for each sample.
Targets = Inputs


class Loss(Protocol):
    """A loss of outputs and targets: its sum, and the count that this is divided by."""

    @property
    def name(self) -> str:
        """Its name in the configuration."""

    def total(self, output: Any, targets: Any) -> Tensor:
        """Return the sum of the loss, before it is divided by the count."""

    def count(self, targets: Any) -> float:
        """Return the count of these targets."""

    def count_of_samples(self, samples: int, form: InputForm) -> float | None:
        """Return the count of any targets of this form; None if it depends on their values."""

    def wrong_target(self, targets: Any, classes: int) -> str | None:
        """Return what is wrong with the values of targets; None if nothing is."""

    def wrong_output(self, output: Any, form: InputForm, classes: int) -> str | None:
        """Return what is wrong with a network's output for two samples, `form` being that of targets; None: nothing."""

    def form_for(self, output: Any, classes: int) -> InputForm | None:
        """Return the targets that an output for two samples needs; None if they are not known from it."""


@dataclass(frozen=True)
class ClassLoss:
    """Cross-entropy of logits, or the negative log-likelihood of log-probabilities, with a class for each position.

    Classes are the second dimension of the output or, of a sequence of tokens, the last one. With weights, a position
    has the weight of its class as its count. Targets in floating point are probabilities of all classes.
    """

    name: str = "cross_entropy"
    weights: tuple[float, ...] | None = None
    smoothing: float = 0.0
    ignored: int = -100

    @property
    def _is_sequence(self) -> bool:
        return self.name == "next_token"

    def total(self, output: Any, targets: Any) -> Tensor:
        if self._is_sequence:
            output, targets = output.flatten(0, -2), targets.flatten()
        weights = None if self.weights is None else output.new_tensor(self.weights)
        if targets.is_floating_point():
            return F.cross_entropy(output, targets, weights, reduction="sum", label_smoothing=self.smoothing)
        if self.name == "nll":
            return F.nll_loss(output, targets.long(), weights, ignore_index=self.ignored, reduction="sum")
        return F.cross_entropy(
            output,
            targets.long(),
            weights,
            ignore_index=self.ignored,
            reduction="sum",
            label_smoothing=self.smoothing,
        )

    def count(self, targets: Any) -> float:
        if targets.is_floating_point():
            return float(targets.numel() / targets.shape[1])
        counted = self._counted(targets)
        if self.weights is None:
            return float(counted.numel())
        return torch.tensor(self.weights, dtype=torch.float64)[counted].sum().item()

    def _counted(self, targets: Tensor) -> Tensor:
        numbers = targets.long()  # bytes would be compared with a number below 0 as if it were a byte
        return numbers[numbers != self.ignored]

    def classes_in(self, targets: Any) -> int:
        """Return the number of classes up to the highest that is not ignored."""
        counted = self._counted(tensors_of(targets)[0])
        return 1 + max(0, int(counted.max())) if counted.numel() else 1

    def count_of_samples(self, samples: int, form: InputForm) -> float | None:
        target = form.tensors[0]
        if target.dtype is None:
            return float(samples * math.prod(target.shape[1:]))
        # No label of a whole sample is below 0, which all loaders check.
        return float(samples) if not target.shape and self.weights is None and self.ignored < 0 else None

    def wrong_target(self, targets: Any, classes: int) -> str | None:
        if not isinstance(targets, Tensor):
            return f"several targets for a sample, but {self.name} takes one tensor"
        if targets.dtype == torch.bool:
            return f"boolean targets, but {self.name} takes the numbers of classes"
        if targets.is_floating_point():
            return self._wrong_probability(targets)
        counted = self._counted(targets) if targets.ndim > 1 or self.ignored >= 0 else targets
        if not counted.numel():
            return None
        low, high = int(counted.min()), int(counted.max())
        if low >= 0 and high < classes:
            return None
        return (
            f"label {low}, but labels start at 0"
            if low < 0
            else f"label {high}, but the highest label is {classes - 1}"
        )

    def _wrong_probability(self, targets: Tensor) -> str | None:
        if self.name != "cross_entropy":
            return f"floating-point targets, but {self.name} takes the numbers of classes"
        if targets.ndim < 2:
            return "a floating-point number as a target, but cross_entropy takes the number of a class"
        is_share = bool(((targets >= 0) & (targets <= 1)).all())
        return None if is_share else "targets that are not probabilities from 0 to 1"

    def wrong_output(self, output: Any, form: InputForm, classes: int) -> str | None:
        if not isinstance(output, Tensor):
            return f"a {type(output).__name__}, but it must return one tensor of logits"
        target, given = form.tensors[0], tuple(output.shape)
        if target.dtype is None:
            wanted = (2, *target.shape)
            return None if given == wanted else f"{given}, but the probabilities of all classes have {wanted}"
        places = given[1:-1] if self._is_sequence else given[2:]
        number = given[-1] if self._is_sequence else given[1] if len(given) > 1 else 0
        # A single label: exactly its classes. Where a network has more classes than occur, it is rarely a mistake; a
        # class that is ignored does not occur.
        fits = number == classes if not target.shape and self.ignored < 0 else number >= classes
        if fits and places == target.shape:
            return self._wrong_weights(number)
        wanted = (2, *target.shape, classes) if self._is_sequence else (2, classes, *target.shape)
        return f"{given}, but {classes} classes need {wanted}: change its last layer, or data.classes"

    def _wrong_weights(self, classes: int) -> str | None:
        given = len(self.weights or ())
        if not given or given == classes:
            return None
        return f"{classes} classes, but task.class_weights has {given} numbers: give one for each class"

    def classes_of(self, output: Any) -> int | None:
        """Return how many classes an output has scores for; None if it is no tensor of scores."""
        if not isinstance(output, Tensor) or output.ndim < 2:
            return None
        return int(output.shape[-1 if self._is_sequence else 1])

    def form_for(self, output: Any, classes: int) -> InputForm | None:  # noqa: ARG002
        if not isinstance(output, Tensor) or output.ndim < 2:
            return None
        places = output.shape[1:-1] if self._is_sequence else output.shape[2:]
        return InputForm((TensorForm(tuple(places), torch.int64),))


_ELEMENTWISE: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "bce": F.binary_cross_entropy_with_logits,
}


@dataclass(frozen=True)
class ElementLoss:
    """A loss of each number of the output, the mean over all numbers. `bce` takes logits."""

    name: str

    def total(self, output: Any, targets: Any) -> Tensor:
        # One number for a sample may come with or without a dimension of its own; broadcasting would compare all pairs.
        return _ELEMENTWISE[self.name](output, targets.to(output.dtype).view_as(output), reduction="sum")

    def count(self, targets: Any) -> float:
        return float(targets.numel())

    def count_of_samples(self, samples: int, form: InputForm) -> float | None:
        return float(samples * math.prod(form.tensors[0].shape))

    def wrong_target(self, targets: Any, classes: int) -> str | None:  # noqa: ARG002
        if not isinstance(targets, Tensor):
            return f"several targets for a sample, but {self.name} takes one tensor"
        if targets.is_floating_point() and not bool(torch.isfinite(targets).all()):
            return "targets that are infinite or not a number"
        if self.name == "bce" and not bool(((targets >= 0) & (targets <= 1)).all()):
            return "targets outside 0..1, which bce needs"
        return None

    def wrong_output(self, output: Any, form: InputForm, classes: int) -> str | None:  # noqa: ARG002
        if not isinstance(output, Tensor):
            return f"a {type(output).__name__}, but it must return one tensor"
        given, wanted = tuple(output.shape), (2, *form.tensors[0].shape)
        if given in (wanted, (*wanted, 1)) or (*given, 1) == wanted:
            return None
        return f"{given}, but their targets have {wanted}: change its last layer"

    def form_for(self, output: Any, classes: int) -> InputForm | None:  # noqa: ARG002
        return InputForm((TensorForm(tuple(output.shape[1:])),)) if isinstance(output, Tensor) else None


@dataclass(frozen=True)
class OwnLoss:
    """A user's function of output and targets: a mean over the number that `counting` returns, or over the samples."""

    function: Callable[[Any, Any], Any]
    counting: Callable[[Any], Any] | None = None
    name: str = "own"

    def total(self, output: Any, targets: Any) -> Tensor:
        count = self.count(targets)
        if count == 0:  # a mean over nothing is not a number
            return sum((one.sum() for one in tensors_of(output)), torch.zeros(())) * 0.0
        mean: Tensor = self.function(output, targets)
        return mean * count

    def count(self, targets: Any) -> float:
        if self.counting is None:
            return float(len(tensors_of(targets)[0]))
        return float(self.counting(targets))

    def count_of_samples(self, samples: int, form: InputForm) -> float | None:  # noqa: ARG002
        return float(samples) if self.counting is None else None

    def wrong_target(self, targets: Any, classes: int) -> str | None:  # noqa: ARG002
        is_finite = all(bool(torch.isfinite(one).all()) for one in tensors_of(targets) if one.is_floating_point())
        return None if is_finite else "targets that are infinite or not a number"

    def wrong_output(self, output: Any, form: InputForm, classes: int) -> str | None:  # noqa: ARG002
        return None

    def form_for(self, output: Any, classes: int) -> InputForm | None:  # noqa: ARG002
        return None


def named_loss(section: TaskSection, load: Callable[[str], Callable[..., Any]]) -> Loss:
    """Return the loss of a configuration; `load` finds the user's functions."""
    if section.is_own:
        return OwnLoss(load(section.loss), None if section.count is None else load(section.count), section.loss)
    if section.loss in _ELEMENTWISE:
        return ElementLoss(section.loss)
    return ClassLoss(section.loss, section.class_weights, section.label_smoothing, section.ignore_index)


def checked_total(loss: Loss, output: Any, targets: Any) -> Tensor:
    """Return the summed loss of an example; raise ConfigError if it is not one number."""
    try:
        total, count = loss.total(output, targets), loss.count(targets)
    except Exception as error:
        raise ConfigError(f"The loss {_name(loss)} cannot be computed: {describe(error)}.") from error
    if not isinstance(total, Tensor) or total.numel() != 1:
        given = f"a tensor of {tuple(total.shape)}" if isinstance(total, Tensor) else f"a {type(total).__name__}"
        raise ConfigError(f"The loss {_name(loss)} returns {given}: it must return one number as a tensor.")
    if not (math.isfinite(count) and count >= 0):
        raise ConfigError(f"task.count returns {count} for the loss {_name(loss)}: it must be a number of at least 0.")
    return total


def _name(loss: Loss) -> str:
    return getattr(loss, "name", "own")

"""Metrics of a model on a held-out set: by name from torchmetrics, or a user's functions.

With two classes a metric is that of class 1, as F1 of "spam"; with more it is the mean over the classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from pipar.errors import ConfigError, describe
from pipar.settings.metrics import METRICS, shown_name
from pipar.tasks.losses import ClassLoss, Loss
from pipar.tasks.task import Task
from pipar.tensors.inputs import tensors_of

#: Curves over more than one label of each sample, as of pixels, have this many thresholds: all would fill the memory.
_THRESHOLDS = 200


class Metric(Protocol):
    """Adds up batches to one number."""

    def update(self, output: Any, targets: Any) -> None: ...
    def value(self) -> float: ...


@dataclass(frozen=True)
class NamedMetric:
    """A metric with its name in results, and whether higher is better."""

    name: str
    higher_is_better: bool
    make: Callable[[], Metric]

    def checked(self, output: Any, targets: Any) -> NamedMetric:
        """Return the metric; raise ConfigError if it cannot be computed of a network's output and its targets."""
        try:
            tried = self.make()
            tried.update(output, targets)
            tried.value()
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"The metric {self.name} cannot be computed: {describe(error)}.") from error
        return self


def named_metrics(names: Mapping[str, Any], task: Task) -> list[NamedMetric]:
    """Return metrics; `names` have None, or the user's function."""
    return [_known(name, task) if own is None else _own(name, own) for name, own in names.items()]


def _own(name: str, function: Any) -> NamedMetric:
    higher = bool(getattr(function, "higher_is_better", True))
    return NamedMetric(shown_name(name), higher, partial(_MeanOverSamples, function, shown_name(name)))


def _known(name: str, task: Task) -> NamedMetric:
    info = METRICS[name]
    view = _view_of(task)
    if view is None or view.of != info.of:
        raise ConfigError(f"task.metrics names '{name}', which compares {info.of}, but {_instead(view, task)}.")
    if name == "perplexity":
        view = _View(view.of, partial(_log_likelihoods, task.loss))
    return NamedMetric(name, info.higher_is_better, partial(_FromTorchmetrics, _builder(name, task), view))


def _instead(view: _View | None, task: Task) -> str:
    """Return what targets of the task are, as far as it is known, and what to use for them."""
    if view is None:
        return (
            f"the loss {task.name} does not say whether its targets are classes: write a metric of your own, as "
            "package.module:function"
        )
    fitting = ", ".join(name for name, info in METRICS.items() if info.of == view.of)
    return f"the loss {task.name} has {view.of} as targets: use {fitting} or a function of your own"


# --- what metrics see of outputs and targets


@dataclass(frozen=True)
class _View:
    """How outputs and targets are given to a metric."""

    of: str
    prepare: Callable[[Any, Any], tuple[Tensor, Tensor]]


def _view_of(task: Task) -> _View | None:
    loss, form = task.loss, task.form
    if form.names is not None or form.is_tuple:
        return None
    if isinstance(loss, ClassLoss):
        return _View("classes", partial(_classes, loss, task.classes)) if form.tensors[0].dtype is not None else None
    if task.name == "bce":
        return _View("classes", _marks)
    return _View("numbers", _numbers) if form.tensors[0].dtype is None else None


def _classes(loss: ClassLoss, classes: int, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities of all classes, or of class 1 if there are two, at each position that is not ignored."""
    rows, labels = _counted(loss, output, targets)
    shares = rows.exp() if loss.name == "nll" else rows.softmax(-1)
    return (shares[:, 1] if rows.shape[-1] == 2 and classes == 2 else shares), labels


def _counted(loss: ClassLoss, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs for all classes, and the class, at each position that is not ignored."""
    rows = output.flatten(0, -2) if loss.name == "next_token" else output.movedim(1, -1).flatten(0, -2)
    labels = targets.flatten().long()
    counts = labels != loss.ignored
    return rows[counts], labels[counts]


def _log_likelihoods(loss: Loss, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the probability of each position's class, also where the probability rounds to 0."""
    if not isinstance(loss, ClassLoss):
        marks = (targets > 0.5).flatten()
        return F.logsigmoid(torch.where(marks, output.flatten(), -output.flatten())), marks
    rows, labels = _counted(loss, output, targets)
    logs = rows if loss.name == "nll" else rows.log_softmax(-1)
    return logs.gather(1, labels[:, None])[:, 0], labels


def _marks(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return output.sigmoid().flatten(), (targets > 0.5).flatten().long()


def _numbers(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return output.flatten(), targets.flatten()


# --- by name


class _FromTorchmetrics:
    """A metric of torchmetrics; a set without targets has none."""

    def __init__(self, make: Callable[[int], Any], view: _View) -> None:
        self._make, self._view = make, view
        self._metric: Any = None

    def update(self, output: Any, targets: Any) -> None:
        given, wanted = self._view.prepare(output, targets)
        if not len(wanted):
            return
        if self._metric is None:
            self._metric = self._make(given.shape[1] if given.ndim > 1 else 1)
        with _quietly():
            self._metric.update(given, wanted)

    def value(self) -> float:
        with _quietly():
            return float(self._metric.compute()) if self._metric is not None else float("nan")


@contextmanager
def _quietly() -> Iterator[None]:
    """Leave out warnings: about a set without positive samples, of which the metric is 0 or not a number anyway."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _builder(name: str, task: Task) -> Callable[[int], Any]:
    """Return what makes a metric for some classes; torchmetrics is imported only here, because that takes a second."""
    try:
        from torchmetrics import classification, regression
    except ImportError:
        raise ConfigError(
            f"The metric '{name}' needs torchmetrics, which is not installed: run `pip install 'pipar[metrics]'`, or "
            "remove it from task.metrics."
        ) from None
    numbers: dict[str, Callable[[], Any]] = {
        "mae": regression.MeanAbsoluteError,
        "mse": regression.MeanSquaredError,
        "rmse": partial(regression.MeanSquaredError, squared=False),
        "r2": regression.R2Score,
        "perplexity": _Perplexity,
    }
    if name in numbers:
        return lambda _: numbers[name]()
    thresholds = {"thresholds": _THRESHOLDS} if name in _CURVES and not task.has_labels else {}
    return partial(_of_classes, classification, name, thresholds)


_CURVES = {"auroc": "AUROC", "average_precision": "AveragePrecision"}
_COUNTED = {
    "accuracy": "Accuracy",
    "precision": "Precision",
    "recall": "Recall",
    "f1": "F1Score",
    "iou": "JaccardIndex",
}


def _of_classes(classification: Any, name: str, settings: dict[str, Any], classes: int) -> Any:
    own = (_COUNTED | _CURVES)[name]
    if classes == 1:
        return getattr(classification, f"Binary{own}")(**settings)
    average = "micro" if name == "accuracy" else "macro"
    return getattr(classification, f"Multiclass{own}")(num_classes=classes, average=average, **settings)


class _Perplexity:
    """exp of the mean negative log-likelihood over positions that are not ignored, as torchmetrics defines it."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def update(self, likelihoods: Tensor, labels: Tensor) -> None:
        self._sum -= likelihoods.double().sum().item()
        self._count += len(labels)

    def compute(self) -> float:
        return float(torch.tensor(self._sum / self._count, dtype=torch.float64).exp())


# --- a user's function


class _MeanOverSamples:
    """The mean of a user's function over all samples: each batch is weighted by its samples."""

    def __init__(self, function: Callable[[Any, Any], Any], name: str) -> None:
        self._function, self._name = function, name
        self._sum, self._samples = 0.0, 0

    def update(self, output: Any, targets: Any) -> None:
        value = self._function(output, targets)
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(
                f"The metric {self._name} returns a {type(value).__name__}: it must return one number."
            ) from None
        samples = len(tensors_of(targets)[0])
        self._sum, self._samples = self._sum + number * samples, self._samples + samples

    def value(self) -> float:
        return self._sum / self._samples if self._samples else float("nan")

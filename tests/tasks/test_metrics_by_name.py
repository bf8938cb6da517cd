"""Metrics are those of scikit-learn, over all batches together, and a user's function is a mean over samples."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipar.errors import ConfigError
from pipar.settings.metrics import METRICS
from pipar.tasks.evaluation import Evaluator
from pipar.tasks.losses import ClassLoss, ElementLoss, OwnLoss
from pipar.tasks.metrics import named_metrics
from pipar.tasks.task import Task, classification
from pipar.tensors.inputs import InputForm, TensorForm

pytestmark = pytest.mark.slow  # torchmetrics takes seconds to import


@pytest.fixture(scope="module")
def sk() -> Any:
    """scikit-learn's metrics, whose import would cost every worker two seconds before its first test."""
    return importlib.import_module("sklearn.metrics")


DRAW = torch.Generator().manual_seed(0)
ROWS, LABELS = torch.randn(60, 4, generator=DRAW).double(), torch.randint(4, (60,), generator=DRAW)
NUMBERS = Task(ElementLoss("mse"), InputForm((TensorForm((3,)),)), 3, torch.float64)


def scores(names: Any, task: Task, output: Tensor, targets: Any) -> dict[str, float]:
    """Return the metrics of two batches of different sizes."""
    made = named_metrics(names if isinstance(names, dict) else dict.fromkeys(names), task)
    evaluate = Evaluator(nn.Identity(), task, made)
    evaluate(lambda: (output[:13], targets[:13]))
    evaluate(lambda: (output[13:], targets[13:]))
    return evaluate.scores().metrics


def test_metrics_of_several_classes_are_means_over_them(sk: Any) -> None:
    found = scores(
        ["accuracy", "precision", "recall", "f1", "iou", "auroc", "perplexity"], classification(4), ROWS, LABELS
    )
    guessed, shares, labels = ROWS.argmax(1).numpy(), ROWS.softmax(1).numpy(), LABELS.numpy()
    expected = {
        "accuracy": sk.accuracy_score(labels, guessed),
        "precision": sk.precision_score(labels, guessed, average="macro"),
        "recall": sk.recall_score(labels, guessed, average="macro"),
        "f1": sk.f1_score(labels, guessed, average="macro"),
        "iou": sk.jaccard_score(labels, guessed, average="macro"),
        "auroc": sk.roc_auc_score(labels, shares, multi_class="ovr"),
        "perplexity": math.exp(F.cross_entropy(ROWS, LABELS).item()),
    }
    assert found == pytest.approx(expected, rel=1e-5)


def test_metrics_of_two_classes_are_those_of_class_one(sk: Any) -> None:
    labels, rows = LABELS % 2, ROWS[:, :2]
    found = scores(
        ["precision", "recall", "f1", "average_precision", "auroc", "perplexity"], classification(2), rows, labels
    )
    guessed, share = rows.argmax(1).numpy(), rows.softmax(1)[:, 1].numpy()
    expected = {
        "precision": sk.precision_score(labels, guessed),
        "recall": sk.recall_score(labels, guessed),
        "f1": sk.f1_score(labels, guessed),
        "average_precision": sk.average_precision_score(labels, share),
        "auroc": sk.roc_auc_score(labels, share),
        "perplexity": math.exp(F.cross_entropy(rows, labels).item()),
    }
    assert found == pytest.approx(expected, rel=1e-5)


def test_positions_that_are_ignored_do_not_count(sk: Any) -> None:
    task = Task(ClassLoss("next_token"), InputForm((TensorForm((5,), torch.int64),)), 4)
    output, targets = torch.randn(20, 5, 4, generator=DRAW), torch.randint(4, (20, 5), generator=DRAW)
    targets[::3, 1:] = -100
    counted = targets.flatten() != -100
    guessed, labels = output.argmax(-1).flatten()[counted], targets.flatten()[counted]
    found = scores(["accuracy", "perplexity"], task, output, targets)
    loss = F.cross_entropy(output.flatten(0, 1), targets.flatten()).item()
    assert found == pytest.approx(
        {"accuracy": sk.accuracy_score(labels, guessed), "perplexity": math.exp(loss)}, rel=1e-5
    )


def test_metrics_of_numbers(sk: Any) -> None:
    wanted = ROWS[:, :3] + torch.randn(60, 3, generator=DRAW).double()
    found = scores(["mae", "mse", "rmse", "r2"], NUMBERS, ROWS[:, :3], wanted)
    flat, given = wanted.flatten().numpy(), ROWS[:, :3].flatten().numpy()
    mse = sk.mean_squared_error(flat, given)
    expected = {
        "mae": sk.mean_absolute_error(flat, given),
        "mse": mse,
        "rmse": mse**0.5,
        "r2": sk.r2_score(flat, given),
    }
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_users_function_is_the_mean_over_samples_whatever_the_batches() -> None:
    def largest(output: Tensor, _: Tensor) -> Tensor:
        return output.amax(1).mean()

    found = scores({"mine:largest": largest}, classification(4), ROWS, LABELS)
    assert found == pytest.approx({"largest": ROWS.amax(1).mean().item()})


def test_each_metric_knows_which_way_is_better() -> None:
    def error(_: Any, __: Any) -> float:
        return 0.0

    error.higher_is_better = False  # type: ignore[attr-defined]
    assert [metric.higher_is_better for metric in named_metrics({"a:error": error, "f1": None}, classification(3))] == [
        False,
        True,
    ]
    assert {name for name, info in METRICS.items() if not info.higher_is_better} == {"perplexity", "mae", "mse", "rmse"}


@pytest.mark.parametrize(
    ("name", "task", "sentence"),
    [
        ("auroc", NUMBERS, "which compares classes, but the loss mse has numbers as targets: use mae, mse, rmse"),
        ("r2", classification(3), "which compares numbers, but the loss cross_entropy has classes as targets: use acc"),
        (
            "f1",
            Task(OwnLoss(lambda *_: 0.0), InputForm((TensorForm((), torch.int64),))),
            "does not say whether its targets are classes: write a metric of your own",
        ),
        (
            "f1",
            Task(OwnLoss(lambda *_: 0.0), InputForm((TensorForm(()),) * 2, is_tuple=True)),
            "write a metric of your own",
        ),
    ],
)
def test_a_metric_that_does_not_fit_the_task_is_refused(name: str, task: Task, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        named_metrics({name: None}, task)


def test_a_function_that_returns_no_number_is_refused() -> None:
    (metric,) = named_metrics({"mine:both": lambda output, _: output}, classification(4))
    with pytest.raises(ConfigError, match="The metric both returns a Tensor: it must return one number"):
        metric.checked(ROWS, LABELS)
    (failing,) = named_metrics({"mine:broken": lambda *_: np.zeros(3)[5]}, classification(4))
    with pytest.raises(ConfigError, match="The metric broken cannot be computed: IndexError"):
        failing.checked(ROWS, LABELS)


def test_a_set_without_positive_samples_has_a_score_and_no_warning() -> None:
    found = scores(["f1", "auroc"], classification(2), ROWS[:, :2], torch.zeros(60, dtype=torch.int64))
    assert found["f1"] == 0.0


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", ["cross_entropy", "nll"])
def test_perplexity_is_finite_where_the_loss_is(name: str, classes: int) -> None:
    """The probability of the right class is 0 in float32."""
    rows = torch.zeros(60, classes)
    rows[:, 0] = 200.0
    output, labels = rows.log_softmax(1) if name == "nll" else rows, torch.ones(60, dtype=torch.int64)
    found = scores(["perplexity"], classification(classes, ClassLoss(name)), output, labels)
    assert found["perplexity"] == pytest.approx(math.exp(200.0))


def test_perplexity_of_marks_is_that_of_bce() -> None:
    task = Task(ElementLoss("bce"), NUMBERS.form, 3, torch.float64)
    output, marks = 40 * ROWS[:, :3], (ROWS[:, 1:] > 0.3).double()
    loss = F.binary_cross_entropy_with_logits(output, marks).item()
    assert scores(["perplexity"], task, output, marks)["perplexity"] == pytest.approx(math.exp(loss))

"""The trainings for the paper's curves and accuracies, and the evaluation of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipar.settings.config_file import config_from
from reproduction.cells import run_cell
from reproduction.experiment import Cell, Outcome
from reproduction.learning import (
    EXPERIMENTS,
    METHODS,
    QUICK,
    SEEDS,
    accuracy_rows,
    compare_accuracies,
    compare_losses,
    compare_weights,
    equality_cells,
    loss_rows,
    training_cells,
)
from reproduction.published import published


def outcome(method: str, seed: int, accuracy: float, losses: tuple[float, ...] = (1.0, 0.5)) -> Outcome:
    cell = QUICK[0].cell(method, seed)
    result = {
        "plan": "P=1 N=6",
        "train_loss": [2 * loss for loss in losses],
        "val_loss": list(losses),
        "val_accuracy": [0.5] * len(losses),
        "test_accuracy": accuracy,
    }
    return Outcome(cell, result)


def outcomes(of: Callable[[str, int], float]) -> list[Outcome]:
    return [outcome(method, seed, of(method, seed)) for seed in SEEDS for method in METHODS]


# --- the trainings


@pytest.mark.parametrize("quick", [False, True])
def test_runs_of_a_training_differ_only_in_methods_and_seeds(quick: bool) -> None:
    def without_run(cell: Cell) -> dict[str, Any]:
        kept = {key: value for key, value in cell.config["run"].items() if key not in ("method", "seed")}
        return {**cell.config, "run": kept}

    by_training: dict[tuple[str, str], list[Cell]] = {}
    for cell in training_cells(quick):
        by_training.setdefault((cell.labels["network"], cell.labels["data"]), []).append(cell)
    assert by_training
    for cells in by_training.values():
        assert all(without_run(cell) == without_run(cells[0]) for cell in cells)
        runs = [(cell.config["run"]["method"], cell.config["run"]["seed"]) for cell in cells]
        assert sorted(runs) == sorted((method, seed) for method in METHODS for seed in SEEDS)


@pytest.mark.parametrize("quick", [False, True])
def test_every_cell_has_a_different_configuration(quick: bool) -> None:
    for experiment in EXPERIMENTS:
        cells = experiment.cells(quick)
        assert cells
        assert all(config_from(cell.config) for cell in cells)
        assert len({cell.hash for cell in cells}) == len(cells)


def test_all_of_mnist_is_trained_on() -> None:
    cells = [cell for cell in training_cells(False) if cell.labels["data"] == "mnist"]
    assert cells
    for cell in cells:
        (group,) = cell.config["devices"]
        assert group["count"] * cell.config["data"]["samples_per_device"] == 60_000


def test_plans_are_those_that_the_paper_prints_for_wifi() -> None:
    plans = {
        (cell.labels["network"], cell.labels["data"]): (
            cell.config["plan"]["split_point"],
            cell.config["plan"]["micro_batches"],
        )
        for cell in training_cells(False)
    }
    assert plans == {("vgg5", "mnist"): (1, 6), ("mobilenetv3_small", "mnist"): (1, 4), ("vgg5", "cifar10"): (1, 3)}


def test_equality_is_tested_on_networks_without_batch_statistics() -> None:
    cells = equality_cells(False)
    assert cells
    for cell in cells:
        assert cell.config["model"]["dtype"] == "float64"
        assert cell.config["model"]["norm"] in ("none", "group")


# --- tables and comparisons


def test_every_epoch_of_every_run_is_a_row_of_the_curves() -> None:
    rows = loss_rows([outcome("fl", 0, 0.9), outcome("pipar", 1, 0.9)])
    assert [(row["method"], row["seed"], row["epoch"], row["val_loss"], row["train_loss"]) for row in rows] == [
        ("fl", 0, 1, 1.0, 2.0),
        ("fl", 0, 2, 0.5, 1.0),
        ("pipar", 1, 1, 1.0, 2.0),
        ("pipar", 1, 2, 0.5, 1.0),
    ]
    assert all(row["run"] for row in rows)


def test_accuracies_are_means_over_seeds_and_their_spread_is_of_one_method() -> None:
    accuracies = {"fl": (0.90, 0.91, 0.92), "sfl": (0.91, 0.92, 0.93), "pipar": (0.90, 0.93, 0.96)}
    (row,) = accuracy_rows(outcomes(lambda method, seed: accuracies[method][seed]))
    assert [row[method] for method in METHODS] == pytest.approx([91.0, 92.0, 93.0])
    assert row["difference"] == pytest.approx(1.0)
    assert row["spread"] == pytest.approx(6.0)
    assert row["by_seed"] == "-1.00 to +4.00"
    assert row["printed"] == "97.96 / 97.96 / 97.94"
    assert len(row["run"].split()) == 9


@pytest.mark.parametrize(("lost", "verdict"), [(0.0, "inside"), (0.009, "inside"), (0.03, "below"), (-0.03, "above")])
def test_a_difference_counts_if_it_exceeds_that_between_seeds(lost: float, verdict: str) -> None:
    rows = accuracy_rows(outcomes(lambda method, seed: 0.9 + seed / 100 - (lost if method == "pipar" else 0.0)))
    (compared,) = [line for line in compare_accuracies(rows) if "difference between seeds" in line.what]
    assert compared.verdict == verdict
    assert (compared.paper, compared.place) == ("-0.02", "V-C2, Table V")


def test_every_printed_accuracy_is_compared_with_ours_or_marked_as_not_run() -> None:
    rows = accuracy_rows(outcomes(lambda method, _: 0.98 if method == "pipar" else 0.9))
    lines = {line.what: line for line in compare_accuracies(rows)}
    columns = [line for what, line in lines.items() if "accuracy with" in what]
    assert len(columns) == 3 * len(published().accuracies)
    assert {line.verdict for line in columns} == {"below", "better", "not run"}
    by_fl, by_pipar = (lines[f"vgg5, mnist: accuracy with {method} for 2 epochs"] for method in ("fl", "pipar"))
    assert (by_fl.paper, by_fl.ours, by_fl.verdict) == ("97.96 %", pytest.approx(90.0), "below")
    assert (by_pipar.verdict, len(by_pipar.run.split())) == ("better", 9)
    (over_all,) = [line for line in lines.values() if line.paper == "-0.2 to 2.07 points"]
    assert (over_all.ours, over_all.verdict) == (pytest.approx(8.0), "above")
    assert [line.verdict for line in lines.values() if line.paper in ("-0.2 points", "0.7 points")] == ["not run"] * 2


def curves(*seeds_change: float, off: float) -> list[Outcome]:
    """Runs whose losses differ by these amounts between seeds in each epoch; in the last one pipar's is `off`."""
    return [
        outcome(method, seed, 0.9, (*losses[:-1], losses[-1] + (off if method == "pipar" else 0.0)))
        for seed in SEEDS
        for method in METHODS
        for losses in [tuple(1.0 + seed * change for change in seeds_change)]
    ]


@pytest.mark.parametrize(("off", "verdict"), [(0.05, "inside"), (0.3, "above"), (-0.3, "above")])
def test_curves_overlap_if_they_differ_no_more_than_those_of_one_method(off: float, verdict: str) -> None:
    (compared,) = compare_losses(loss_rows(curves(0.1, 0.1, off=off)))
    assert compared.ours == pytest.approx(abs(off))
    assert compared.high == pytest.approx(0.2)
    assert compared.verdict == verdict


def test_a_spread_of_one_epoch_does_not_excuse_another() -> None:
    (compared,) = compare_losses(loss_rows(curves(0.5, 0.01, off=0.1)))
    assert compared.verdict == "above"
    assert "epoch 2" in compared.what


def test_weights_that_differ_by_more_than_rounding_are_not_equal() -> None:
    rows = [{"network": "vgg5", "norm": "group", "largest_difference": value, "run": ""} for value in (1e-15, 1e-9)]
    assert [compared.verdict for compared in compare_weights(rows)] == ["inside", "above"]


# --- running it


def with_few_samples(norm: str) -> dict[str, Any]:
    """The configuration of an equality, with two batches of two devices."""
    cell = equality_cells(True)[0]
    changes: dict[str, dict[str, Any]] = {
        "run": {"epochs": 1, "batch_size": 12},
        "model": {"norm": norm},
        "data": {"samples_per_device": 24},
    }
    tree = {name: {**cell.config[name], **changes.get(name, {})} for name in cell.config if name != "devices"}
    return {**tree, "devices": [{**cell.config["devices"][0], "count": 2}]}


@pytest.mark.slow
def test_three_methods_train_the_same_weights_in_float64() -> None:
    result = run_cell("alike", with_few_samples("group"), {"methods": list(METHODS)})
    (compared,) = compare_weights([{"network": "vgg5", "norm": "group", "run": "", **result}])
    assert compared.verdict == "inside"
    assert result["plan"] == "P=1 N=6"


@pytest.mark.slow
def test_batch_normalisation_changes_the_weights() -> None:
    result = run_cell("alike", with_few_samples("batch"), {"methods": ["fl", "pipar"]})
    assert result["largest_difference"] > 1e-6


@pytest.mark.slow
def test_a_training_gives_curves_and_accuracies() -> None:
    cell = QUICK[0].cell("sfl", 0)
    few = {"name": "digits", "samples_per_device": 50, "validation": 20, "test": 50}
    result = run_cell(cell.how, {**cell.config, "data": few}, cell.options)
    rows = loss_rows([Outcome(cell, result)])
    assert [row["epoch"] for row in rows] == [1, 2]
    assert all(row["val_loss"] > 0 for row in rows)
    assert 0 <= result["test_accuracy"] <= 1

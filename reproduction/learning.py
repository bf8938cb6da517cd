"""Loss curves and accuracies of fl, sfl and pipar and, in float64, their weights; paper V-C.

Real images and mathematics, in virtual time. A handful of devices share all images, because the mathematics is what a
training costs here: 100 devices would learn less in the same time, with all three methods. P and N are those that the
paper prints for WiFi. Batch normalisation is the paper's, and makes pipar's weights differ from the others'; without it
they are the same, as `equality` shows to the last digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import mean
from typing import Any

from reproduction.experiment import UNSAID, Cell, Compared, Experiment, Found, Outcome, Row
from reproduction.plots import plot_if_possible
from reproduction.published import Accuracy, published
from reproduction.tables import against
from reproduction.testbed import BOARD, SERVER

METHODS = ("fl", "sfl", "pipar")
SEEDS = (0, 1, 2)
DEVICES = 4
#: Rounding in float64 after some iterations, relative to the largest weight.
EQUAL = 1e-12


@dataclass(frozen=True)
class Training:
    """What is trained with each method and each seed; `samples` are those of one device.

    Without a size, validation and test sets are 2,000 and 8,000 images as in the paper, or all that there are.
    """

    model: str
    dataset: str
    samples: int
    epochs: int
    norm: str = "batch"
    learning_rate: float = 0.01
    validation: int | None = None
    test: int | None = None

    def tree(self, method: str, seed: int) -> dict[str, Any]:
        """Return the configuration of one run."""
        printed = published().selection(self.model, self.dataset, "wifi")
        assert printed is not None, "the paper has plans for all of its trainings"
        return {
            "run": {"method": method, "epochs": self.epochs, "seed": seed, "trace": "off"},
            "model": {"name": self.model, "norm": self.norm},
            "optimizer": {"learning_rate": self.learning_rate},
            "data": {"name": self.dataset, "samples_per_device": self.samples, **self._held_out()},
            "plan": {
                "split_point": printed.split_point,
                "micro_batches": printed.micro_batches,
                "replan": False,
            },
            "wire": {"encoding": "raw"},  # as in the paper; exact encodings would cost time and change nothing
            "server": {"profile": SERVER, "threads": 1},
            "devices": [{"name": "board", "count": DEVICES, "profile": BOARD, "link": "wifi"}],
        }

    def _held_out(self) -> dict[str, int]:
        sizes = {"validation": self.validation, "test": self.test}
        return {name: size for name, size in sizes.items() if size is not None}

    def cell(self, method: str, seed: int) -> Cell:
        labels = {"network": self.model, "data": self.dataset, "norm": self.norm, "method": method, "seed": seed}
        return Cell("train", self.tree(method, seed), labels=labels)


#: All of MNIST, and a fifth of CIFAR-10: some two hours of one core, of which MobileNetV3-Small takes two thirds.
FULL = (
    Training("vgg5", "mnist", samples=15_000, epochs=3),
    Training("mobilenetv3_small", "mnist", samples=15_000, epochs=3, learning_rate=0.05),
    Training("vgg5", "cifar10", samples=2_500, epochs=8, learning_rate=0.03),
)
#: Small enough to take minutes.
QUICK = (
    Training("vgg5", "mnist", samples=1_000, epochs=2, validation=500, test=2_000),
    Training("vgg5", "cifar10", samples=500, epochs=4, learning_rate=0.03, validation=400, test=1_600),
)


def training_cells(quick: bool) -> list[Cell]:
    """Return a run of each training with each method and seed; both experiments use the same ones."""
    return [training.cell(method, seed) for training, seed, method in product(QUICK if quick else FULL, SEEDS, METHODS)]


# --- convergence: a row for each epoch


def loss_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return the losses of every run, epoch by epoch."""
    return [row for outcome in outcomes for row in _epochs(outcome.row)]


def _epochs(run: Row) -> Iterator[Row]:
    kept = {key: run[key] for key in ("network", "data", "norm", "method", "seed", "plan", "run")}
    curves = ("train_loss", "val_loss", "val_accuracy")
    for number, values in enumerate(zip(*(run[name] for name in curves), strict=True), start=1):
        yield {**kept, "epoch": number, **dict(zip(curves, values, strict=True))}


_BATCH_STATISTICS = (
    "batch normalisation uses statistics of micro-batches, not of the batch; see `equality` for networks without it"
)


def compare_losses(rows: Sequence[Row]) -> list[Compared]:
    """Compare pipar's curve with the others', in the epoch with the largest difference.

    Curves overlap if in every epoch their means differ no more than two seeds of one method.
    """
    said = published().statement("curves-overlap")
    compared = []
    for (model, dataset), own in _by_training(rows).items():
        epoch, gap, spread = max(_gaps(own), key=lambda one: one[1] - one[2])
        what = (
            f"{model}, {dataset}: mean validation losses of pipar and of fl or sfl differ in epoch {epoch} by at most"
        )
        run = " ".join(row["run"] for row in own if row["epoch"] == epoch)
        compared.append(
            Compared(
                place=said.place,
                what=f"{what}; compared with the difference between seeds",
                paper=str(said),
                ours=gap,
                low=0.0,
                high=spread,
                below=_BATCH_STATISTICS,
                above=_BATCH_STATISTICS,
                run=run,
            )
        )
    return compared


def _gaps(rows: Sequence[Row]) -> Iterator[tuple[int, float, float]]:
    """Yield for every epoch the largest difference of pipar's mean to another's, and of two seeds of one method."""
    for epoch in sorted({row["epoch"] for row in rows}):
        losses = _by_method([row for row in rows if row["epoch"] == epoch], "val_loss")
        ours = mean(losses["pipar"])
        gap = max(abs(ours - mean(losses[other])) for other in ("fl", "sfl"))
        yield epoch, gap, max(_spread(values) for values in losses.values())


# --- accuracy: a row for each training


def accuracy_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return a row for each training: percent of the test set with each method, means over the seeds."""
    return [
        _accuracies(model, dataset, own)
        for (model, dataset), own in _by_training([outcome.row for outcome in outcomes]).items()
    ]


def _accuracies(model: str, dataset: str, runs: Sequence[Row]) -> Row:
    percent = {
        method: [100 * value for value in values] for method, values in _by_method(runs, "test_accuracy").items()
    }
    means = {method: mean(values) for method, values in percent.items()}
    apart = [
        ours - other for name in ("fl", "sfl") for ours, other in zip(percent["pipar"], percent[name], strict=True)
    ]
    return {
        "network": model,
        "data": dataset,
        "norm": runs[0]["norm"],
        "epochs": len(runs[0]["val_loss"]),
        **means,
        "difference": means["pipar"] - max(means["fl"], means["sfl"]),
        "by_seed": f"{min(apart):+.2f} to {max(apart):+.2f}",
        "spread": max(_spread(values) for values in percent.values()),
        "printed": _printed_accuracies(model, dataset),
        "of_seeds": percent,
        "run": " ".join(run["run"] for run in runs),
    }


def _printed_accuracies(model: str, dataset: str) -> str:
    said = published().accuracy(model, dataset)
    return "" if said is None else f"{said.fl:g} / {said.sfl:g} / {said.pipar:g}"


def compare_accuracies(rows: Sequence[Row]) -> list[Compared]:
    """Compare pipar's difference to the better of the others with the difference between seeds; then every column.

    Trainings that are not run here are marked so.
    """
    return [
        *(_within_seeds(row) for row in rows),
        *_differences(rows),
        *(line for said in published().accuracies for line in _columns(said, rows)),
    ]


def _within_seeds(row: Row) -> Compared:
    said = published().accuracy(row["network"], row["data"])
    return Compared(
        place="V-C2" if said is None else said.place,
        what=f"{row['network']}, {row['data']}: accuracy of pipar minus the better of fl and sfl; compared with the "
        "difference between seeds",
        paper="" if said is None else f"{said.difference:+g}",
        ours=row["difference"],
        low=-row["spread"],
        high=row["spread"],
        unit="points",
        below=_BATCH_STATISTICS,
        above=_BATCH_STATISTICS,
        run=row["run"],
    )


_SEEDS_CHANGE_MORE = "these are means of three seeds after few epochs; two seeds differ by more than that"


def _differences(rows: Sequence[Row]) -> list[Compared]:
    """Compare the differences that the paper states: over all trainings, and the worst one."""
    lines = []
    for statement in published().about("accuracy"):
        here = [
            row
            for row in rows
            if row["network"] in statement.models and (not statement.datasets or row["data"] in statement.datasets)
        ]
        found = [Found(_difference(row, statement.against), row["run"]) for row in here]
        what = f"{', '.join(statement.models)}: {statement.what}"
        lines.append(against(statement, found, what=what, below=_SEEDS_CHANGE_MORE, above=_SEEDS_CHANGE_MORE))
    return lines


def _difference(row: Row, other: str | None) -> float:
    return float(row["difference"] if other is None else row["pipar"] - row[other])


def _columns(said: Accuracy, rows: Sequence[Row]) -> Iterator[Compared]:
    """Yield the accuracies of one training with each method, printed and ours."""
    row = next((row for row in rows if (row["network"], row["data"]) == (said.model, said.dataset)), None)
    for method in METHODS:
        printed = float(getattr(said, method))
        epochs = "" if row is None else f" for {row['epochs']} epochs"
        yield Compared(
            place=said.place,
            what=f"{said.model}, {said.dataset}: accuracy with {method}{epochs}",
            paper=f"{printed:g} %",
            ours=None if row is None else row[method],
            low=printed,
            high=printed,
            unit="%",
            better="more",
            below="the paper trained to the end, on all images",
            run="" if row is None else row["run"],
        )


def _by_training(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["network"], row["data"]), []).append(row)
    return found


def _by_method(rows: Sequence[Row], column: str) -> dict[str, list[float]]:
    return {method: [row[column] for row in rows if row["method"] == method] for method in METHODS}


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


# --- equality: the same weights


def equality_cells(quick: bool) -> list[Cell]:
    """Return short trainings in float64 that are run with all methods to compare their weights."""
    networks = ("vgg5",) if quick else ("vgg5", "mobilenetv3_small")
    return [_equality_cell(model, norm) for model, norm in product(networks, ("none", "group"))]


def _equality_cell(model: str, norm: str) -> Cell:
    few = Training(model, "mnist", samples=150, epochs=2, norm=norm, validation=0, test=0)
    tree = few.tree("pipar", seed=0)
    tree["model"]["dtype"] = "float64"
    tree["run"]["batch_size"] = 50
    tree["data"]["name"] = "digits"  # comes with pipar
    return Cell("alike", tree, {"methods": list(METHODS)}, {"network": model, "data": "digits", "norm": norm})


_DEFECT = "the methods do not train the same weights"


def compare_weights(rows: Sequence[Row]) -> list[Compared]:
    """Compare the weights of the methods."""
    return [
        Compared(
            place="IV",
            what=f"{row['network']}, norm {row['norm']}, float64: largest difference of a weight between fl, sfl and "
            "pipar over the largest weight",
            paper=UNSAID,
            ours=row["largest_difference"],
            low=0.0,
            high=EQUAL,
            below=_DEFECT,
            above=_DEFECT,
            run=row["run"],
        )
        for row in rows
    ]


_NOTES = (
    f'{DEVICES} devices share the images; P and N are those that the paper prints for WiFi; norm = "batch", as in the '
    f"paper; seeds {', '.join(map(str, SEEDS))}. `spread` is the difference between seeds: the largest one of two "
    "runs with one method. `by seed` are the differences of pipar to fl and to sfl with the same seed."
)

CONVERGENCE = Experiment(
    "convergence",
    "Validation losses of fl, sfl and pipar (V-C1)",
    training_cells,
    ("network", "data", "norm", "method", "seed", "epoch", "train_loss", "val_loss", "val_accuracy", "run"),
    compare_losses,
    partial(plot_if_possible, "convergence"),
    loss_rows,
    _NOTES,
)
ACCURACY = Experiment(
    "accuracy",
    "Test accuracy of fl, sfl and pipar in percent (V-C2)",
    training_cells,
    ("network", "data", "norm", "epochs", "fl", "sfl", "pipar", "difference", "by_seed", "spread", "printed", "run"),
    compare_accuracies,
    partial(plot_if_possible, "accuracy"),
    accuracy_rows,
    _NOTES + " The paper trained longer: `printed` has its accuracies of fl, sfl and pipar.",
)
EQUALITY = Experiment(
    "equality",
    "Weights of fl, sfl and pipar in float64 (IV)",
    equality_cells,
    ("network", "data", "norm", "plan", "largest_difference", "run"),
    compare_weights,
    notes="The same training with each method and the same seed. With batch normalisation pipar's weights would "
    "differ: statistics of a micro-batch are not those of the batch.",
)
EXPERIMENTS = (CONVERGENCE, ACCURACY, EQUALITY)

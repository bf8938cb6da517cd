"""Results as people look at them in Python: tables of pandas, figures of matplotlib, HTML for notebooks."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipar.extras import optional_library
from pipar.html_table import html_facts, html_line, html_page, html_rows
from pipar.settings.wording import equivalence_text, plan_text, plans_text, statistical_mark, whole_network_text
from pipar.storage.run_json import plan_from_json
from pipar.units import format_percent

Row = Mapping[str, Any]
WORLDS = {"real": "real processes", "virtual": "virtual time", "timing-only": "virtual time, timing only"}
#: Epochs and plans that HTML shows.
_MOST_EPOCHS = 10
_MOST_PLANS = 4
#: Columns of the table of epochs: key, title, decimals; those that no epoch has are left out.
_COLUMNS = (
    ("seconds", "seconds", 2),
    ("train_loss", "train loss", 4),
    ("val_loss", "val loss", 4),
    ("val_accuracy", "val acc.", 3),
    ("epsilon", "epsilon", 3),
)
#: Before the names of metrics, among the flat values of an epoch.
_METRICS = "val_metrics."


# --- pandas


def frame(rows: Iterable[Row], index: str, purpose: str) -> Any:
    """Return rows as a DataFrame; a nested value is a column of its own, as in "utilisation.server"."""
    pandas = optional_library("pandas", extra="notebook", purpose=purpose)
    made = pandas.DataFrame([dict(_flat(row)) for row in rows])
    return made.set_index(index) if index in made else made


def _flat(row: Row, before: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the names and values of a row; lists, such as the bytes of each device, are left out.

    So are the values of each device, which `Result.device_frame()` has.
    """
    for name, value in row.items():
        if before == "device_metrics." and name in ("devices", "missing", "higher_is_better"):
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        elif not isinstance(value, list | tuple):
            yield f"{before}{name}", value


# --- matplotlib


def new_figure(purpose: str, columns: int) -> tuple[Any, Any]:
    """Return an empty figure with axes side by side.

    pyplot does not know the figure: a notebook shows what pyplot knows at the end of a cell, and would show it twice.
    """
    figures = optional_library("matplotlib.figure", extra="notebook", purpose=purpose)
    figure = figures.Figure(figsize=(4.5 * columns, 3.2), layout="constrained")
    figure._repr_png_ = partial(_png, figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def plot_epochs(content: Row) -> Any:
    """Return a figure of a run: its losses, its accuracy and metrics by epoch, or its seconds if it trains nothing."""
    epochs = [dict(_flat(epoch)) for epoch in content["epochs"]]
    keys = dict.fromkeys(["val_accuracy", *(key for row in epochs for key in row if key.startswith(_METRICS))])
    scores = [key for key in keys if any(epoch.get(key) is not None for epoch in epochs)]
    learns = any(epoch.get("train_loss") is not None for epoch in epochs)
    figure, axes = new_figure("Result.plot()", 1 + len(scores) if learns else 1)
    numbers = [epoch["epoch"] for epoch in epochs]
    if not learns:
        curve(axes[0], numbers, epochs, {"seconds": ""}, "seconds per epoch")
    else:
        curve(axes[0], numbers, epochs, {"train_loss": "training", "val_loss": "validation"}, "loss")
        for one, key in zip(axes[1:], scores, strict=True):
            name = "accuracy" if key == "val_accuracy" else key.removeprefix(_METRICS)
            curve(one, numbers, epochs, {key: ""}, f"validation {name}")
    for one in axes:
        one.set_xlabel("epoch")
        one.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title(content))
    return figure


def curve(axes: Any, x: Sequence[float], epochs: Sequence[Row], labels: Mapping[str, str], name: str) -> None:
    """Draw values of epochs, one line for each key with its label."""
    for key, label in labels.items():
        values = [epoch.get(key) for epoch in epochs]
        if any(value is not None for value in values):
            known = [float("nan") if value is None else value for value in values]
            axes.plot(x, known, marker=".", label=label or None)
    axes.set_title(name, fontsize="medium")
    if len([label for label in labels.values() if label]) > 1:
        axes.legend(frameon=False)


# --- HTML


def title(content: Row) -> str:
    """Return what was trained: "vgg5 on digits, pipar, virtual time"."""
    return f"{subject(content['model'], content['dataset'])}, {content['method']}, {WORLDS[content['world']]}"


def subject(model: str, dataset: str) -> str:
    """Return a network and a dataset in words; objects of the caller have no name."""
    return f"{'your network' if model == 'own' else model} on {'your data' if dataset == 'own' else dataset}"


def result_html(content: Row, folder: Path, seconds: float | None) -> str:
    """Return a run as HTML: what was trained and how it ended, then its last epochs."""
    epochs, accuracy = content["epochs"], content["test_accuracy"]
    facts = {
        "plan": f"{plans(content)}{_whole(content)}",
        "epoch": None if seconds is None else f"{seconds:.2f} s on average",
        "test accuracy": None if accuracy is None else f"{percent(accuracy)}{statistical_mark(content)}",
        **{f"test {name}": number(value, 4) for name, value in (content.get("test_metrics") or {}).items()},
        "on devices": _on_devices(content.get("device_metrics") or {}),
        "equivalence": equivalence_text(content),
        "stopped": content.get("stopped"),
        "folder": str(folder),
    }
    left_out = len(epochs) - _MOST_EPOCHS
    note = [html_line(f"The last {_MOST_EPOCHS} of {len(epochs)} epochs")] if left_out > 0 else []
    table = epochs_html(epochs[-_MOST_EPOCHS:]) if epochs else html_line("No epoch was finished.")
    return html_page(title(content), html_facts(facts), *note, table)


def result_line(content: Row, folder: Path) -> str:
    """Return a run in one line: what was trained, how it ended, and its folder."""
    epochs, accuracy, loss = content["epochs"], content.get("test_accuracy"), content.get("test_loss")
    parts = [title(content), "one epoch" if len(epochs) == 1 else f"{len(epochs)} epochs"]
    if accuracy is not None:
        parts.append(f"test accuracy {percent(accuracy)}{statistical_mark(content)}")
    elif loss is not None:
        parts.append(f"test loss {number(loss, 4)}")
    return f"<Result: {', '.join(parts)}; {folder}/>"


def _whole(content: Row) -> str:
    chosen = [plan_from_json(entry) for entry in content["plans"]]
    said = whole_network_text(content["method"], chosen, content.get("layers"))
    return f" ({said})" if said else ""


def _on_devices(metrics: Row) -> str | None:
    """Return the means over the devices' own samples, with the worst deciles."""
    worst = metrics.get("worst_decile") or {}
    known = (f"{name} {number(one, 4)} (worst decile {number(worst[name], 4)})" for name, one in _means(metrics))
    return ", ".join(known) or None


def _means(metrics: Row) -> Iterable[tuple[str, float | None]]:
    return (metrics.get("mean") or {}).items()


def devices_frame(metrics: Row, purpose: str) -> Any:
    """Return the devices' own values as a DataFrame, one row for each; a device without values has its reason."""
    missing = {name: {"missing": reason} for name, reason in (metrics.get("missing") or {}).items()}
    rows = {**(metrics.get("devices") or {}), **missing}
    return frame([{"device": name, **of} for name, of in sorted(rows.items())], "device", purpose)


def epochs_html(epochs: Sequence[Row]) -> str:
    """Return the table of epochs, without columns that are empty."""
    flat = [dict(_flat(epoch)) for epoch in epochs]
    metrics = dict.fromkeys(key for row in flat for key in row if key.startswith(_METRICS))
    columns = [*_COLUMNS, *((key, f"val {key.removeprefix(_METRICS)}", 4) for key in metrics)]
    shown = [column for column in columns if any(row.get(column[0]) is not None for row in flat)]
    rows = [[str(row["epoch"]), *(number(row.get(key), digits) for key, _, digits in shown)] for row in flat]
    return html_rows(["epoch", *(name for _, name, _ in shown)], rows)


def plans(content: Row) -> str:
    """Return the plans at the start, with the number of devices of each."""
    texts = [plan_text(plan_from_json(entry), content.get("layers")) for entry in content["plans"]]
    counts = Counter(texts).most_common()
    return plans_text(texts) if len(counts) <= _MOST_PLANS else f"{len(counts)} plans, {counts[0][0]} most often"


def number(value: float | None, digits: int) -> str:
    """Return a number, or a dash if there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """Return a share in per cent, or a dash if it is unknown."""
    return "-" if share is None else f"{format_percent(share)} %"

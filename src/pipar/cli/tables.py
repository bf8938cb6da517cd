"""Results in the terminal: tables of runs, profiles, datasets, leakage and checks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipar.leakage.table import as_rows, how_lines, last_line
from pipar.methods import Plan
from pipar.monitored_metric import VAL_LOSS
from pipar.monitoring.epoch_lines import metrics_text, number_text, percent
from pipar.settings.config import Config
from pipar.settings.wording import (
    WHOLE,
    equivalence_text,
    plan_text,
    privacy_text,
    range_text,
    setting_text,
    statistical_mark,
    whole_network_text,
)
from pipar.storage.device_table import device_rows, value_names
from pipar.storage.run_json import plan_from_json
from pipar.units import format_bytes

if TYPE_CHECKING:
    from pipar.cli.doctor_checks import Finding
    from pipar.data.catalog import DatasetInfo
    from pipar.leakage.table import LeakageTable
    from pipar.profiling.profile import Profile
    from pipar.storage.result import Result

_WIDEST = 110
#: Width of a number in the comparison, with a space next to it, so that plans have room.
_CELL = 7
#: What a mark at an accuracy means.
_NOT_EXACT = "; the accuracy may differ from that of exact training"
#: Different plans that are listed; further ones are only counted.
_MOST_PLANS = 8
#: Devices whose own values are listed; the others are in result.json.
_MOST_EVALUATED = 12

# --- plans in words


def _replans(content: Mapping[str, Any]) -> list[str]:
    """Return the new plans of the run, each with its first epoch."""
    return [f"from epoch {replan['epoch']} on: {line}" for replan in content["replans"] for line in _plan_lines(replan)]


def _plan_lines(content: Mapping[str, Any]) -> list[str]:
    """Return a line for each of the most frequent plans, with its number of devices."""
    counts = Counter(_plans(content)).most_common()
    if len(counts) == 1:
        return [plan_text(counts[0][0], content.get("layers"))]
    more = [f"and {len(counts) - _MOST_PLANS} other plans"] if len(counts) > _MOST_PLANS else []
    return [f"{count} x {plan}" for plan, count in counts[:_MOST_PLANS]] + more


def _whole_line(content: Mapping[str, Any]) -> list[str]:
    """Return a line if a method that cuts networks trains the whole network on every device."""
    said = whole_network_text(content["method"], _plans(content), content.get("layers"))
    return [said] if said else []


def _plans_in_short(content: Mapping[str, Any]) -> str:
    """Return the ranges of P and N, and the window of 1F1B if it is the same for all: "P=1-3 N=4"."""
    plans = _plans(content)
    cuts, pieces = ([get(plan) for plan in plans] for get in (attrgetter("split_point"), attrgetter("micro_batches")))
    windows = {plan.window for plan in plans}
    schedule = f" 1f1b({windows.pop()})" if len(windows) == 1 and 0 not in windows else ""
    where = WHOLE if content.get("layers") == 1 else f"P={range_text(cuts)}"
    return f"{where} N={range_text(pieces)}{schedule}"


def _plans(content: Mapping[str, Any]) -> list[Plan]:
    return [plan_from_json(entry) for entry in content["plans"]]


# --- tables


def console(*, stderr: bool = False) -> Console:
    """Return a console for standard output or error; without a terminal it is wide enough for whole rows."""
    made = Console(stderr=stderr, highlight=False)
    # Rich assumes 80 columns without a terminal, but a file has no width.
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _WIDEST
    return made


def new_table(*, header: bool = True) -> Table:
    """Return an empty table in the common style."""
    head = box.SIMPLE_HEAD if header else None
    return Table(box=head, show_header=header, pad_edge=False, collapse_padding=True, header_style="bold")


def result_table(result: Result, config: Config) -> RenderableType:
    """Return the summary of a finished run."""
    content, epochs = result.content, result.epochs
    table = new_table(header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(
        "training", f"{content['model']} on {content['dataset']}, method {content['method']}, {_world(content)}"
    )
    table.add_row("emulated", setting_text(config, "\n"))
    table.add_row("plan", "\n".join([*_plan_lines(content), *_whole_line(content), *_replans(content)]))
    if epochs:
        seconds = result.seconds_per_epoch
        rate = _average(epochs, "samples") / seconds if seconds else 0.0
        efficiency = percent(_average(epochs, "efficiency"))
        table.add_row("epoch", f"{seconds:.2f} s on average, {rate:.1f} samples/s, efficiency {efficiency}")
        idle = (_average(epochs, "server_idle_s"), _average(epochs, "device_idle_s"))
        table.add_row("idle", f"server {idle[0]:.2f} s, device {idle[1]:.2f} s of each epoch")
        table.add_row("sent", f"{_traffic(epochs, 'bytes_up')} up, {_traffic(epochs, 'bytes_down')} down in each epoch")
    if content["test_accuracy"] is not None:
        table.add_row("test accuracy", f"{percent(content['test_accuracy'])}{statistical_mark(content)}")
    elif content.get("test_loss") is not None:
        table.add_row("test loss", f"{content['test_loss']:.4f}")
    if content.get("test_metrics"):
        table.add_row("test metrics", metrics_text(content["test_metrics"]))
    if content.get("device_metrics"):
        table.add_row("on devices", _evaluation_table(content["device_metrics"]))
    if config.run.keep == "best" and epochs:
        best = "lowest validation loss" if config.run.monitor == VAL_LOSS else f"best {config.run.monitor}"
        table.add_row("kept model", f"of epoch {content['kept_epoch']}, with the {best}")
    privacy = privacy_text(content, config, "\n")
    if privacy is not None:
        table.add_row("privacy", privacy)
    if content.get("stopped") is not None:
        table.add_row("stopped", content["stopped"])
    table.add_row("equivalence", f"{statistical_mark(content)} {equivalence_text(content)}".lstrip())
    table.add_row("folder", f"{result.folder}/")
    table.add_row("files", ", ".join(sorted(path.name for path in result.folder.iterdir())))
    return Group(Text(), table)


def _evaluation_table(metrics: Mapping[str, Any]) -> RenderableType:
    """Return the model on each device's own samples: the mean, the worst decile, and a row per device."""
    rows, left_out = device_rows(metrics, _MOST_EVALUATED)
    names, table = value_names(metrics), new_table()
    table.add_column("device", no_wrap=True)
    for title in ("samples", *names):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    if names:
        for title, key in (("mean", "mean"), ("worst decile", "worst_decile")):
            table.add_row(title, "", *(_value_text(name, metrics[key].get(name)) for name in names))
    for row in rows:
        values = (_value_text(name, row.values.get(name)) for name in names)
        table.add_row(row.device, "-" if row.samples is None else str(int(row.samples)), *values, row.reason)
    others = [Text(f"and {left_out} devices that are better; all are in result.json")] if left_out else []
    took = f"the model of epoch {metrics['epoch']}, evaluated in {metrics['seconds']:.2f} s"
    return Group(Text(took), table, *others)


def _value_text(name: str, value: float | None) -> str:
    return percent(value) if name == "accuracy" else number_text(value, 4, 10)


def _world(content: Mapping[str, Any]) -> str:
    names = {"real": "real processes", "virtual": "virtual time", "timing-only": "virtual time, timing only"}
    return names[content["world"]]


def _average(epochs: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(float(epoch[key]) for epoch in epochs) / len(epochs)


def _traffic(epochs: Sequence[Mapping[str, Any]], key: str) -> str:
    return format_bytes(_average(epochs, key))


def comparison_table(results: Mapping[str, Result], config: Config) -> RenderableType:
    """Return one row per method; speed-ups are relative to fl, or to the first method without fl."""
    base = "fl" if "fl" in results else next(iter(results))
    table = new_table()
    table.add_column("method", no_wrap=True)
    table.add_column("plan")  # the only column that is cut if space is short
    private = any(result.content.get("epsilon") is not None for result in results.values())
    titles = ["s/epoch", f"vs {base}", "server\nidle s", "device\nidle s", "test\nacc.", "MB up", "MB\ndown"]
    titles[5:5] = ["epsilon"] if private else []
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for method, result in results.items():
        plans = Text(_plans_in_short(result.content), no_wrap=True, overflow="ellipsis")
        table.add_row(method, plans, *_comparison_row(result, results[base].seconds_per_epoch, private=private))
    first = next(iter(results.values())).content
    title = f"{first['model']} on {first['dataset']}, {_world(first)}, mean of {_epochs_text(first)}"
    folders = [Text(f"{result.folder}/", overflow="fold") for result in results.values()]
    head = (Text(f"\n{title}"), Text(setting_text(config, "\n")))
    return Group(*head, table, *_whole_plans(results), *_equivalence_lines(results), *folders)


def _equivalence_lines(results: Mapping[str, Result]) -> list[Text]:
    """Return a line for each different equivalence, with its methods."""
    methods: dict[str, list[str]] = {}
    for method, result in results.items():
        mark = statistical_mark(result.content).lstrip()
        text = f"weights are {equivalence_text(result.content)}{_NOT_EXACT if mark else ''}"
        methods.setdefault(text, []).append(f"{mark} {method}".lstrip())
    return [Text(f"{', '.join(names)}: {text}", overflow="fold") for text, names in methods.items()]


def _whole_plans(results: Mapping[str, Result]) -> list[RenderableType]:
    """Return the full plans of methods whose row shows only a summary."""
    table = Table.grid(padding=(0, 1), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for method, result in results.items():
        lines = [*_plan_lines(result.content), *_whole_line(result.content)]
        if lines != [_plans_in_short(result.content)]:
            table.add_row(f"{method}:", "\n".join(lines))
    return [table, Text()] if table.row_count else []


def _epochs_text(content: Mapping[str, Any]) -> str:
    count = len(content["epochs"])
    return "one epoch" if count == 1 else f"{count} epochs"


def _comparison_row(result: Result, base_s: float, *, private: bool) -> list[str]:
    epochs, seconds = result.epochs, result.seconds_per_epoch
    epsilon = [number_text(result.content.get("epsilon"), 3, _CELL)] if private else []
    return [
        number_text(seconds, 2, _CELL),
        f"{base_s / seconds:.2f}x" if seconds else "-",
        number_text(_average(epochs, "server_idle_s"), 2, _CELL),
        number_text(_average(epochs, "device_idle_s"), 2, _CELL),
        f"{percent(result.test_accuracy)}{statistical_mark(result.content)}",
        *epsilon,
        number_text(_average(epochs, "bytes_up") / 1e6, 2, _CELL),
        number_text(_average(epochs, "bytes_down") / 1e6, 2, _CELL),
    ]


def profile_table(profile: Profile) -> RenderableType:
    """Return two rows per layer: milliseconds at each batch size (forward, backward), and bytes.

    The bytes are of the output and the saved activations of a sample, and of the weights and the working memory.
    """
    table = new_table()
    table.add_column("layer", no_wrap=True)
    table.add_column("output\nsaved", justify="right", no_wrap=True)
    table.add_column("weights\nworking", justify="right", no_wrap=True)
    table.add_column("batch of", no_wrap=True)
    for size in profile.batch_sizes:
        table.add_column(str(size), justify="right", no_wrap=True)
    for number, layer in enumerate(profile.layers, start=1):
        sizes = (format_bytes(layer.output_bytes), format_bytes(layer.parameter_bytes))
        memory = (format_bytes(layer.saved_bytes), format_bytes(layer.working_bytes))
        table.add_row(f"{number} {layer.name}", *sizes, "forward", *map(_milliseconds, layer.forward_s))
        table.add_row("", *memory, "backward", *map(_milliseconds, layer.backward_s))
    title = f"{profile.model} in {profile.dtype}, milliseconds: {profile.how}"
    lines: list[RenderableType] = [Text(f"\n{title}"), Text(profile.machine), table]
    if not profile.whole:
        here, total = len(profile.layers), profile.network_layers
        lines.append(Text(f"These are the first {here} of {total} layers; more do not fit into memory."))
    return Group(*lines)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def leakage_table(leakage: LeakageTable) -> RenderableType:
    """Return one row per cut: the distance correlation, and the pixel correlation and PSNR of each attack."""
    table = new_table()
    table.add_column("P", justify="right", no_wrap=True)
    table.add_column("layer", no_wrap=True)
    table.add_column("distance\ncorrelation", justify="right", no_wrap=True)
    for name in leakage.attacks:
        table.add_column(f"{name}: pixel\ncorrelation", justify="right", no_wrap=True)
        table.add_column("PSNR\ndB", justify="right", no_wrap=True)
    for row in as_rows(leakage)[1:]:
        table.add_row(*row)
    whole = len(leakage.layers)
    table.add_row(str(whole), leakage.layers[-1], *["-"] * (1 + 2 * len(leakage.attacks)))
    words = [f"\n{leakage.subject}", *how_lines(leakage)]
    return Group(*(Text(line) for line in words), table, Text(last_line(leakage)))


def datasets_table(datasets: Sequence[DatasetInfo], folder: Path) -> RenderableType:
    """Return one row per dataset: what it is, and where it is; below them, the folder where they are looked for."""
    table = new_table()
    for title, where in (("name", "left"), ("train", "right"), ("test", "right"), ("image", "right")):
        table.add_column(title, justify=where, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("classes", justify="right", no_wrap=True)
    table.add_column("here", overflow="fold")
    for info in datasets:
        counts = [f"{count:,}" if count else "any" for count in (info.train, info.test)]
        shape = "x".join(map(str, info.shape)) if info.train else "any"
        classes = str(info.classes) if info.train else "any"
        table.add_row(info.name, *counts, shape, classes, dataset_place(info))
    looked = Text(f"Looked in {folder}; PIPAR_DATA or --path names another folder.", overflow="fold")
    return Group(table, looked, Text("To download one: pipar data get NAME"))


_STATES = {"ok": "green", "advice": "yellow", "problem": "bold red"}


def findings_table(findings: Sequence[Finding]) -> RenderableType:
    """Return one row per check, with its advice below what was found, and a summary."""
    table = new_table(header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in findings:
        words = Text(one.found, overflow="fold")
        if one.advice:
            words.append(f"\n{one.advice}", style="" if one.state == "problem" else "dim")
        table.add_row(one.check, Text(one.state, style=_STATES[one.state]), words)
    problems = [one for one in findings if one.state == "problem"]
    count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
    return Group(table, Text(f"\nTo fix: {count}." if problems else "\npipar works here."))


def dataset_place(info: DatasetInfo) -> str:
    """Return where a dataset is, or how to get it."""
    if info.builtin:
        return "built in"
    if info.found is not None:
        return str(info.found)
    size = format_bytes(sum(file.size_bytes for file in info.files))
    return f"no ({size} to download)"

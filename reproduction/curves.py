"""Line charts: losses by epoch, seconds by batch size, growth with the number of devices, cost of changing links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING

from reproduction.drawing import (
    BLACK,
    LOOKS,
    PUBLISHED,
    SECONDS,
    Look,
    Panel,
    Row,
    Rows,
    distinct,
    having,
    is_as_in_the_paper,
    legend,
    look_of,
    mark_published,
    name_axes,
    name_of,
    panels,
    short,
)
from reproduction.published import published

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: A linear axis cannot show values whose ratio exceeds this.
_TOO_FAR_APART = 20


def draw_losses(rows: Rows) -> Figure:
    """Return Fig. 8 or 9: validation losses by epoch: mean and range over the seeds.

    Equal curves overlap: each one is thinner than the one below it.
    """
    from matplotlib.ticker import MaxNLocator

    figure, found = panels(having(rows, "val_loss"), across="network", down="data")
    for panel in found:
        methods = distinct(panel.rows, "method")
        for number, method in enumerate(methods):
            _loss_curve(panel, method, look_of(method, methods), width=1.2 + 1.4 * (len(methods) - 1 - number))
        panel.axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        name_axes(panel.axes, across="epoch", up="validation loss")
    legend(figure)
    return figure


def _loss_curve(panel: Panel, method: str, look: Look, *, width: float) -> None:
    own = [row for row in panel.rows if row["method"] == method]
    epochs = distinct(own, "epoch")
    losses = [[row["val_loss"] for row in own if row["epoch"] == epoch] for epoch in epochs]
    panel.axes.plot(
        epochs, [mean(each) for each in losses], color=look.colour, linestyle=look.dashes, linewidth=width,
        label=name_of(method),
    )  # fmt: skip
    lowest, highest = [min(each) for each in losses], [max(each) for each in losses]
    panel.axes.fill_between(epochs, lowest, highest, color=look.colour, alpha=0.15, linewidth=0)


def draw_batch_sizes(rows: Rows) -> Figure:
    """Return Fig. 10 or 11: seconds per epoch by batch size, a panel for each link."""
    figure, found = panels(having(rows, "seconds"), across="link")
    for panel in found:
        _lines_by_method(panel, "batch_size", "seconds")
        name_axes(panel.axes, across="batch size B", up=SECONDS)
    legend(figure)
    return figure


#: What grows with the number of devices: the title of a panel, the columns whose sum it shows, and their unit.
_GROWING = (
    ("epoch", ("seconds",), SECONDS),
    ("traffic of an epoch", ("up_GB", "down_GB"), "GB up and down"),
    ("server", ("server_GB",), "GB of models"),
    ("planning", ("planning_s",), "s of one core"),
)


def draw_scale(rows: Rows) -> Figure:
    """Return what grows with the number of devices that share a server; the paper has no such figure."""
    grown: list[Row] = [
        {**row, "of": f"{name_of(row['network'])}, {what}", "value": sum(row[name] for name in columns), "unit": unit}
        for what, columns, unit in _GROWING
        for row in having(rows, *columns)
    ]
    figure, found = panels(grown, across="link", down="of")
    for panel in found:
        _lines_by_method(panel, "devices", "value", not_run="forecast from a sample")
        name_axes(panel.axes, across="devices that share one server", up=panel.rows[0]["unit"])
    legend(figure)
    return figure


def _lines_by_method(panel: Panel, across: str, up: str, *, not_run: str = "") -> None:
    """Draw a line for each method, over a logarithmic axis."""
    methods = distinct(panel.rows, "method")
    for method in methods:
        own = [row for row in panel.rows if row["method"] == method]
        _line(panel.axes, own, across, up, method, look_of(method, methods))
    _mark_not_run(panel, not_run)
    _mark_values(panel.axes, distinct(panel.rows, across))
    _scale_lines(panel.axes, [row[up] for row in panel.rows])


def _line(axes: Axes, rows: Rows, across: str, up: str, name: str, look: Look) -> None:
    """Draw a line from row to row; marks of rows that were not run are hollow."""
    own = sorted(rows, key=lambda row: row[across])
    places = [row[across] for row in own], [row[up] for row in own]
    axes.plot(
        *places, color=look.colour, linestyle=look.dashes, marker=look.marker, markersize=4, label=name_of(name)
    )  # fmt: skip
    if hollow := [row for row in own if not _is_run(row)]:
        axes.plot(
            [row[across] for row in hollow], [row[up] for row in hollow], linestyle="none", marker=look.marker,
            markersize=4, markerfacecolor="white", markeredgecolor=look.colour, label=f"_{name_of(name)}, not run",
        )  # fmt: skip


def _mark_not_run(panel: Panel, words: str) -> None:
    """Explain hollow marks in the legend, if there are any."""
    if not all(map(_is_run, panel.rows)):
        panel.axes.plot(
            [], [], linestyle="none", marker="o", markersize=4, markerfacecolor="white", markeredgecolor=BLACK,
            label=words,
        )  # fmt: skip


def _is_run(row: Row) -> bool:
    return bool(row.get("is_run", True))


def _mark_values(axes: Axes, values: Sequence[float]) -> None:
    """Make the horizontal axis logarithmic, with a mark at each of these values, and a number where there is room."""
    axes.set_xscale("log")
    axes.set_xticks(values, [short(value) if value in _apart(values) else "" for value in values])
    axes.minorticks_off()


def _apart(values: Sequence[float]) -> list[float]:
    """Return values that are at least a tenth of the logarithmic axis apart."""
    kept = list(values[:1])
    for value in values[1:]:
        if math.log(value / kept[-1]) >= 0.1 * math.log(values[-1] / values[0]) - 1e-9:
            kept.append(value)
    return kept


def _scale_lines(axes: Axes, values: Sequence[float]) -> None:
    """Use a logarithmic axis if a linear one could not show all values."""
    positive = [value for value in values if value > 0]
    if positive and max(positive) > _TOO_FAR_APART * min(positive):
        axes.set_yscale("log")
        axes.set_ylim(min(positive) / 2, max(positive) * 2)
    elif positive:
        axes.set_ylim(0, max(positive) * 1.1)
    axes.grid(axis="y", linewidth=0.3, color="0.8")


def draw_bandwidth(rows: Rows) -> Figure:
    """Return Fig. 14: the cost of replanning in percent of the training, by the minutes between changes."""
    figure, found = panels(having(rows, "overhead_percent"), across="network")
    for panel in found:
        _line(panel.axes, panel.rows, "minutes", "overhead_percent", "pipar", LOOKS["pipar"])
        _mark_not_run(panel, "computed from shorter intervals")
        _mark_published_overhead(panel)
        _mark_values(panel.axes, distinct(panel.rows, "minutes"))
        panel.axes.set_yscale("log")
        panel.axes.grid(axis="y", linewidth=0.3, color="0.8")
        name_axes(panel.axes, across="minutes between changes", up="overhead (% of training)")
    legend(figure)
    return figure


def _mark_published_overhead(panel: Panel) -> None:
    if not is_as_in_the_paper(panel.rows[0]):
        return
    hourly = [said for said in published().about("bandwidth") if said.models == (panel.rows[0]["network"],)]
    every_minute = [published().statement("overhead-1-min")] if hourly else []
    points = [(minutes, said.high) for minutes, said in zip((60, 1), hourly + every_minute, strict=False) if said.high]
    across, up = [minutes for minutes, _ in points], [percent for _, percent in points]
    mark_published(panel.axes, across, up, f"{PUBLISHED} (1 min: most of all)")

"""Figures of lines: losses by epochs, seconds by batch sizes and by devices, overheads by how often links change."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING

from pipar.reproduce.drawing import (
    LOOKS,
    PUBLISHED,
    SECONDS,
    Look,
    Panel,
    Rows,
    distinct,
    having,
    legend,
    look_of,
    mark_published,
    name_axes,
    name_of,
    panels,
    scale_heights,
    short,
)
from pipar.reproduce.published import published

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_losses(rows: Rows) -> Figure:
    """Return Fig. 8 or 9: validation losses epoch by epoch, the mean over the seeds and the span between them.

    Curves that are equal lie on each other: each one is thinner than the one below it.
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
    """Return Fig. 10 or 11: epochs by the size of a batch."""
    return _epochs_by(rows, "batch_size", "batch size B")


def draw_scale(rows: Rows) -> Figure:
    """Return epochs by the number of devices that share a server; the paper has no such figure."""
    return _epochs_by(rows, "devices", "devices that share one server", down="network")


def _epochs_by(rows: Rows, column: str, words: str, *, down: str | None = None) -> Figure:
    """Return a line of seconds for each method over what stands in a column, a panel for each link."""
    figure, found = panels(having(rows, "seconds"), across="link", down=down)
    for panel in found:
        _lines(panel, "method", column, "seconds")
        name_axes(panel.axes, across=words, up=SECONDS)
    legend(figure)
    return figure


def _lines(panel: Panel, series: str, across: str, up: str) -> None:
    """Draw a line for each value of a column, over a logarithmic axis."""
    names = distinct(panel.rows, series)
    for name in names:
        own = sorted((row for row in panel.rows if row[series] == name), key=lambda row: row[across])
        _line(panel.axes, [row[across] for row in own], [row[up] for row in own], name, look_of(name, names))
    _mark_values(panel.axes, distinct(panel.rows, across))
    scale_heights(panel.axes, [row[up] for row in panel.rows])


def _line(axes: Axes, across: Sequence[float], up: Sequence[float], name: str, look: Look) -> None:
    axes.plot(
        across, up, color=look.colour, linestyle=look.dashes, marker=look.marker, markersize=4, label=name_of(name)
    )  # fmt: skip


def _mark_values(axes: Axes, values: Sequence[float]) -> None:
    """Make the axis across logarithmic, with a mark at each of these values and no other."""
    axes.set_xscale("log")
    axes.set_xticks(values, [short(value) for value in values])
    axes.minorticks_off()


def draw_bandwidth(rows: Rows) -> Figure:
    """Return Fig. 14: what choosing again costs, in percent of the training, by the minutes between two changes."""
    figure, found = panels(having(rows, "overhead_percent"), across="network")
    for panel in found:
        own = sorted(panel.rows, key=lambda row: row["minutes"])
        minutes = [row["minutes"] for row in own]
        _line(panel.axes, minutes, [row["overhead_percent"] for row in own], "pipar", LOOKS["pipar"])
        _mark_published_overhead(panel)
        _mark_values(panel.axes, minutes)
        panel.axes.set_yscale("log")
        panel.axes.grid(axis="y", linewidth=0.3, color="0.8")
        name_axes(panel.axes, across="minutes between changes", up="overhead (% of training)")
    legend(figure)
    return figure


def _mark_published_overhead(panel: Panel) -> None:
    hourly = [said for said in published().about("bandwidth") if said.models == (panel.rows[0]["network"],)]
    every_minute = [published().statement("overhead-1-min")] if hourly else []
    points = [(minutes, said.high) for minutes, said in zip((60, 1), hourly + every_minute, strict=False) if said.high]
    across, up = [minutes for minutes, _ in points], [percent for _, percent in points]
    mark_published(panel.axes, across, up, f"{PUBLISHED} (1 min: most of all)")

"""Maps of every P and N: how long an epoch takes, which pair was chosen and which is the best."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reproduction.drawing import (
    GREEN,
    LOGARITHMIC,
    VERMILLION,
    Panel,
    Rows,
    distinct,
    having,
    legend,
    name_of,
    panels,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_selection(rows: Rows) -> Figure:
    """Return a map of every P and N, darker is faster, with the chosen pair and the best one marked."""
    titled = [{**row, "of": f"{name_of(row['network'])}, {name_of(row['data'])}"} for row in having(rows, "seconds")]
    figure, found = panels(titled, across="link", down="of")
    for panel in found:
        _map(figure, panel)
    legend(figure)
    return figure


def _map(figure: Figure, panel: Panel) -> None:
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter

    axes, rows = panel.axes, panel.rows
    counts, cuts = distinct(rows, "micro_batches"), distinct(rows, "split_point")
    seconds = np.full((len(cuts), len(counts)), np.nan)
    for row in rows:
        seconds[cuts.index(row["split_point"]), counts.index(row["micro_batches"])] = row["seconds"]
    image = axes.imshow(seconds, aspect="auto", origin="lower", cmap="cividis", norm=LogNorm(), interpolation="nearest")
    words = f"s per epoch, {LOGARITHMIC}"
    bar = figure.colorbar(image, ax=axes, label=words, format=FuncFormatter(lambda value, _: short(value)))
    bar.ax.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: short(value) if f"{value:e}"[0] in "235" else ""))
    best = min(rows, key=lambda row: row["seconds"])
    _mark_pairs(axes, counts, cuts, [best], "best", {"marker": "*", "s": 90, "color": VERMILLION, "zorder": 3})
    chosen = [row for row in rows if row.get("chosen")]
    ring = {"marker": "o", "s": 130, "facecolors": "none", "edgecolors": GREEN, "linewidths": 2, "zorder": 4}
    _mark_pairs(axes, counts, cuts, chosen, "chosen", ring)
    _number(axes.set_xticks, counts)
    _number(axes.set_yticks, cuts)
    axes.set_xlabel("micro-batches N, those that were tried")
    axes.set_ylabel("split point P")


def _mark_pairs(axes: Axes, counts: list[int], cuts: list[int], rows: Rows, label: str, looks: dict[str, Any]) -> None:
    across = [counts.index(row["micro_batches"]) for row in rows]
    up = [cuts.index(row["split_point"]) for row in rows]
    axes.scatter(across, up, label=label, **looks)


def _number(set_ticks: Callable[..., Any], values: list[int]) -> None:
    """Label some of the values on the axis: there is room for about eight."""
    step = max(1, len(values) // 8)
    set_ticks(range(0, len(values), step), [str(value) for value in values[::step]])

"""Dot plots: the score of each chosen plan, and the accuracy of each seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reproduction.drawing import (
    BLACK,
    LOOKS,
    PUBLISHED,
    SMALL_PRINT,
    VERMILLION,
    Panel,
    Rows,
    having,
    legend,
    mark_published,
    name_axes,
    name_of,
    panels,
)
from reproduction.published import published

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The minimum score required here; the paper prints its own minimum.
WANTED = 0.98


def draw_scores(rows: Rows) -> Figure:
    """Return the scores of Table VII or VIII, a line for each training, with the paper's minimum and ours.

    A score is the seconds of the best epoch over those of the chosen one: further left is worse.
    """
    titled = [{**row, "of": "epoch by the best plan over epoch by the chosen one"} for row in having(rows, "score")]
    figure, found = panels(titled, across="of")
    for panel in found:
        figure.set_size_inches(6.4, 1.2 + 0.2 * len(titled))
        _dots(panel)
    legend(figure)
    return figure


def _dots(panel: Panel) -> None:
    axes, rows, look = panel.axes, panel.rows, LOOKS["pipar"]
    lines = range(len(rows))
    scores = [row["score"] for row in rows]
    axes.plot(scores, lines, linestyle="none", marker=look.marker, color=look.colour, label=name_of("pipar"), zorder=3)
    printed = [(row["its_score"], line) for line, row in enumerate(rows) if row.get("its_score") is not None]
    # A little below: most of both are 1 and would overlap.
    places = [score for score, _ in printed], [line + 0.25 for _, line in printed]
    mark_published(axes, *places, f"the paper's plans, {PUBLISHED}")
    _mark_thresholds(panel, least=min([*scores, *(score for score, _ in printed)]))
    axes.set_yticks(lines, [", ".join(name_of(row[key]) for key in ("network", "data", "link")) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)  # the first row on top, as in the table
    axes.grid(axis="y", linewidth=0.3, color="0.8")
    name_axes(axes, across="score, 1 is the best plan of all")


def _mark_thresholds(panel: Panel, *, least: float) -> None:
    """Draw the paper's minimum score and the one required here, with room for both."""
    reached = published().statement("score").low
    assert reached is not None, "the paper prints its lowest score"
    for score, colour, dashes, words in (
        (reached, BLACK, ":", "lowest, " + PUBLISHED),
        (WANTED, VERMILLION, "--", "wanted here"),
    ):
        panel.axes.axvline(score, color=colour, linestyle=dashes, linewidth=1, label=f"{score:g} {words}")
    panel.axes.set_xlim(min(reached, least) - 0.005, 1.004)


# --- accuracies


def draw_accuracies(rows: Rows) -> Figure:
    """Return Tables V and VI as a figure: a panel for each training, the test accuracy of every seed and method.

    A line is the mean of a method's seeds. The paper's accuracies, of longer trainings, are left out: on their
    scale the differences between methods would be invisible.
    """
    figure, found = panels(rows, across="network", down="data")
    for panel in found:
        _seeds(panel)
    legend(figure)
    return figure


def _seeds(panel: Panel) -> None:
    axes, (row,) = panel.axes, panel.rows
    methods = [method for method in LOOKS if method in row["of_seeds"]]
    for at, method in enumerate(methods):
        look, percent = LOOKS[method], row["of_seeds"][method]
        beside = [at + 0.12 * (number - (len(percent) - 1) / 2) for number in range(len(percent))]
        axes.plot(beside, percent, linestyle="none", marker=look.marker, color=look.colour, label=name_of(method))
        axes.hlines(row[method], at - 0.3, at + 0.3, color=look.colour, linestyle=look.dashes)
        axes.annotate(
            f"{row[method]:.2f}", (at + 0.32, row[method]), va="center", fontsize=SMALL_PRINT, annotation_clip=False
        )
    axes.set_xticks(range(len(methods)), [name_of(method) for method in methods])
    axes.set_xlim(-0.5, len(methods) - 0.3)
    name_axes(axes, up="test accuracy (%)")

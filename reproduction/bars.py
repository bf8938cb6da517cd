"""Bar charts: seconds, idle seconds, and the seconds that noise adds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import TYPE_CHECKING

from reproduction.drawing import (
    BLACK,
    PUBLISHED,
    PURPLE,
    SECONDS,
    SKY,
    SMALL_PRINT,
    VERMILLION,
    Panel,
    Places,
    Row,
    Rows,
    distinct,
    filled,
    having,
    is_as_in_the_paper,
    legend,
    look_of,
    mark_published,
    name_axes,
    name_groups,
    name_of,
    panels,
    scale_heights,
    short,
)
from reproduction.published import published

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_times(rows: Rows) -> Figure:
    """Return Fig. 4 or 5: epochs by link and method, how much shorter they are, and the paper's values for pipar."""
    figure, found = panels(rows, across="network", down="data")
    for panel in found:
        _bars(panel, "link", _printed_seconds)
    legend(figure)
    return figure


def draw_heterogeneous(rows: Rows) -> Figure:
    """Return Fig. 12: epochs with equal boards, and with half of them at half speed."""
    figure, found = panels(rows, across="link", down="network")
    for panel in found:
        _bars(panel, "boards", lambda _: None)
    legend(figure)
    return figure


def _bars(panel: Panel, group: str, printed: Callable[[Row], float | None]) -> None:
    """Draw a bar for each group and method; above it its seconds, and how many times faster it is: "FL/1.6".

    If the paper prints a bar's seconds, they are marked next to the bar: above it, the mark would hide the number.
    """
    axes, rows = panel.axes, panel.rows
    places = Places(distinct(rows, group), distinct(rows, "method"))
    drawn = having(rows, group, "method", "seconds")
    tops = [row["seconds"] for row in drawn]
    for method in places.series:
        own = [row for row in drawn if row["method"] == method]
        at, heights = [places.at(row[group], method) for row in own], [row["seconds"] for row in own]
        axes.bar(at, heights, places.width, label=name_of(method), **filled(look_of(method, places.series)))
        marks = {places.beside(row[group], method): seconds for row in own if (seconds := printed(row)) is not None}
        tops += marks.values()
        mark_published(axes, list(marks), list(marks.values()), f"{name_of(method)}, {PUBLISHED} (right of its bar)")
        for x, row in zip(at, own, strict=True):
            _write_above(axes, x, row["seconds"], _with_speed_up(row, _compared_with(drawn, group, row)))
    _explain_speed_ups(axes)
    _mark_missing(axes, rows, group, places)
    scale_heights(axes, tops)
    name_groups(axes, places.groups)
    name_axes(axes, up=SECONDS)


def _write_above(axes: Axes, at: float, height: float, text: str) -> None:
    """Write a bar's numbers right above it."""
    axes.annotate(
        text, (at, height), xytext=(0, 1), textcoords="offset points", ha="center", va="bottom", fontsize=SMALL_PRINT
    )  # fmt: skip


def _printed_seconds(row: Row) -> float | None:
    """Return the seconds that the paper's tables have for a row; they have only pipar on the paper's testbed."""
    if row["method"] != "pipar" or not is_as_in_the_paper(row):
        return None
    said = published().selection(row["network"], row["data"], row["link"])
    return None if said is None else said.epoch_s


def _compared_with(rows: Rows, group: str, row: Row) -> Row:
    """Return the row of the same group with the first method, which is fl if there is one."""
    own = [one for one in rows if one[group] == row[group]]
    first = distinct(own, "method")[0]
    return next(one for one in own if one["method"] == first)


def _with_speed_up(row: Row, base: Row) -> str:
    if row is base:
        return short(row["seconds"])
    shorter = base["seconds"] / row["seconds"]
    return f"{short(row['seconds'])}\n{name_of(base['method'])}/{shorter:.{1 if shorter < 10 else 0}f}"


def _explain_speed_ups(axes: Axes) -> None:
    """Explain the text above bars in the legend."""
    axes.plot([], [], linestyle="none", label="FL/2: half of the time of FL")


def _mark_missing(axes: Axes, rows: Rows, group: str, places: Places) -> None:
    for row in rows:
        if row.get("seconds") is None and row.get(group) is not None:
            axes.annotate(
                "does not fit", (places.at(row[group], row["method"]), 0), xycoords=axes.get_xaxis_transform(),
                xytext=(0, 3), textcoords="offset points", rotation=90, ha="center", va="bottom", fontsize=SMALL_PRINT,
            )  # fmt: skip


def draw_idle_times(rows: Rows) -> Figure:
    """Return Fig. 6 or 7: how long the server (upward) and the devices (downward) are idle in an epoch."""
    figure, found = panels(rows, across="network", down="data")
    for panel in found:
        _mirrored_bars(panel)
    legend(figure)
    return figure


def _mirrored_bars(panel: Panel) -> None:
    axes, rows = panel.axes, having(panel.rows, "server_idle_s", "device_idle_s")
    places = Places(distinct(panel.rows, "link"), distinct(panel.rows, "method"))
    for method in places.series:
        own, look = [row for row in rows if row["method"] == method], look_of(method, places.series)
        at = [places.at(row["link"], method) for row in own]
        for side, sign, label in (("server_idle_s", 1, name_of(method)), ("device_idle_s", -1, "_devices")):
            heights = [row[side] for row in own]
            signed = [sign * height for height in heights]
            bars = axes.bar(at, signed, places.width, label=label, **filled(look))
            axes.bar_label(bars, [short(height) for height in heights], fontsize=SMALL_PRINT, padding=1)
    _scale_mirrored(axes, rows)
    axes.axhline(0, color=BLACK, linewidth=0.6)
    name_groups(axes, places.groups)
    name_axes(axes, up="idle s: server up, devices down")


def _scale_mirrored(axes: Axes, rows: Rows) -> None:
    """Give both directions room for their numbers, on an axis without a sign."""
    from matplotlib.ticker import FuncFormatter

    up, down = (max((row[side] for row in rows), default=0.0) for side in ("server_idle_s", "device_idle_s"))
    if room := 0.15 * (up + down):
        axes.set_ylim(-down - room, up + room)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(abs(value))))
    axes.grid(axis="y", linewidth=0.3, color="0.8")


#: Colours of the seconds that each mechanism adds; the epoch without noise has the colour of its method.
_ADDED = (VERMILLION, PURPLE, SKY)
_WITHOUT = "none"


def draw_privacy(rows: Rows) -> Figure:
    """Return Fig. 13: epochs without noise, and on top the seconds that each mechanism adds."""
    figure, found = panels(having(rows, "seconds"), across="link", down="network")
    for panel in found:
        _stacked_bars(panel)
    legend(figure)
    return figure


def _stacked_bars(panel: Panel) -> None:
    """Draw a bar for each method and mechanism: the epoch without noise, and on top the seconds that noise adds."""
    axes, rows = panel.axes, panel.rows
    methods = distinct(rows, "method")
    mechanisms = sorted(distinct(rows, "mechanism"), key=lambda one: one != _WITHOUT)  # the one without noise first
    places = Places(methods, mechanisms)
    width = 0.92 * places.width  # bars of one colour are side by side
    without = {row["method"]: row["seconds"] for row in rows if row["mechanism"] == _WITHOUT}
    colours = dict(zip((one for one in mechanisms if one != _WITHOUT), cycle(_ADDED), strict=False))
    for row in rows:
        at, base = places.at(row["method"], row["mechanism"]), without.get(row["method"], 0.0)
        label = name_of(row["method"]) if row["mechanism"] == _WITHOUT else "_the same"
        axes.bar(at, min(base, row["seconds"]), width, label=label, **filled(look_of(row["method"], methods)))
        if row["mechanism"] != _WITHOUT:
            added, colour = row["seconds"] - base, colours[row["mechanism"]]
            bars = axes.bar(at, max(added, 0.0), width, bottom=base, color=colour, label=f"+ {row['mechanism']}")
            # Vertical text: horizontal numbers are wider than bars.
            axes.bar_label(bars, [_signed(added)], fontsize=SMALL_PRINT, padding=2, rotation=90)
    axes.set_ylim(0, 1.3 * max(row["seconds"] for row in rows))
    axes.grid(axis="y", linewidth=0.3, color="0.8")
    name_groups(axes, methods)
    name_axes(axes, up=SECONDS)


def _signed(value: float) -> str:
    """Return a number with its sign: with another plan, an epoch with noise may be shorter."""
    return f"{'-' if value < 0 else '+'}{short(abs(value))}"

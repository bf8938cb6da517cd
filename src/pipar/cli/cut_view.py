"""The cuts of a network as a table: what crosses each of them, and why other places are not offered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipar.cli.tables import new_table
from pipar.cutting.cut_points import Cut, CutList, NotOffered
from pipar.units import format_bytes

_SOURCES = {
    "children": "Cuts after the children of an nn.Sequential",
    "named": "Cuts after the modules in model.cut_points",
    "recorded": "Cuts between the operations that torch.export recorded",
    "whole": "No cuts: model.cut_points is empty",
}


def cuts_view(found: CutList) -> RenderableType:
    """Return the whole output of `pipar cuts`."""
    lines: list[RenderableType] = [Text(f"\n{_SOURCES[found.source]}", style="bold")]
    if found.cuts:
        lines.append(cuts_table(found))
    elif found.source != "whole":
        lines.append(Text("No cut is offered: the network can be trained whole only, with --method fl or with P = Q."))
    refused = [one for one in found.not_offered if not one.is_thinned]
    if refused:
        lines += [Text("\nNot offered", style="bold"), _refused_table(refused)]
    return Group(*lines, *summary_lines(found))


def summary_lines(found: CutList) -> list[Text]:
    """Return how cuts were thinned, if they were, and what P = Q means."""
    thinning = [Text(found.thinning)] if found.thinning else []
    return [*thinning, Text(f"P = {found.layers} is the whole network on the device: nothing is cut.")]


def cuts_table(found: CutList) -> Table:
    """Return one row per cut; what crosses is shown where it is known, else only its bytes."""
    known = any(cut.crossing for cut in found.cuts)
    table = new_table()
    table.add_column("P", justify="right", no_wrap=True)
    table.add_column("after", overflow="fold")
    if known:
        table.add_column("crosses", overflow="fold")
        table.add_column("gradient", overflow="fold")
    table.add_column("bytes\na sample", justify="right", no_wrap=True)
    for cut in found.cuts:
        details = [_tensors(cut), _gradients(cut)] if known else []
        table.add_row(str(cut.split_point), cut.after, *details, format_bytes(cut.size_bytes))
    return table


def _tensors(cut: Cut) -> str:
    """Return the tensors that cross; equal ones once, with their number."""
    counts = Counter(map(str, cut.crossing))
    return ", ".join(name if count == 1 else f"{count} of {name}" for name, count in counts.items())


def _gradients(cut: Cut) -> str:
    """Return "yes" or "no", or the tensors without one."""
    without = dict.fromkeys(str(one) for one in cut.crossing if not one.has_gradient)
    if not without or not any(one.has_gradient for one in cut.crossing):
        return "no" if without else "yes"
    return f"not {', '.join(without)}"


def _refused_table(refused: Iterable[NotOffered]) -> Table:
    """Return one row per group of neighbouring places with the same reason."""
    table = new_table()
    table.add_column("after", overflow="fold")
    table.add_column("places", justify="right", no_wrap=True)
    table.add_column("because", overflow="fold")
    for one in refused:
        after = one.first if one.first == one.last else f"{one.first} ... {one.last}"
        table.add_row(after, str(one.places), one.reason)
    return table

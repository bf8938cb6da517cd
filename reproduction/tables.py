"""The tables of an experiment: its rows as Markdown and CSV, and the comparison with the paper, line by line."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pipar.errors import InputError
from pipar.storage.whole_files import write_atomically
from reproduction.experiment import UNSAID, Compared, Experiment, Found, Row
from reproduction.published import Statement

#: Shown for a missing value.
_NOTHING = "-"
#: Tolerance of a single printed number, or of a largest one ("up to 34.6x").
NEAR = 0.25


def write_tables(experiment: Experiment, rows: Sequence[Row], folder: Path, *, quick: bool = False) -> list[Path]:
    """Write NAME/table.md, table.csv, comparison.md and the figures; return the files."""
    place = folder / experiment.name
    texts = {
        "table.md": page(experiment, rows, quick=quick),
        "table.csv": as_csv(rows, experiment.columns),
        "comparison.md": comparison(experiment.title, experiment.compare(rows)),
    }
    _write(place, texts)
    drawn = experiment.plot(rows, place) if experiment.plot is not None else ()
    return [*(place / name for name in texts), *drawn]


def write_comparisons(compared: Mapping[str, Sequence[Compared]], folder: Path) -> Path:
    """Write comparison.md of several experiments, by their titles; return it."""
    _write(folder, {"comparison.md": "\n".join(comparison(title, lines) for title, lines in compared.items())})
    return folder / "comparison.md"


def _write(place: Path, texts: Mapping[str, str]) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name, content in texts.items():
            write_atomically(place / name, content.encode())
    except OSError as error:
        raise InputError(f"Cannot write {place}: {error.strerror}.") from None


def page(experiment: Experiment, rows: Sequence[Row], *, quick: bool = False) -> str:
    """Return the table with its title and notes."""
    notes = [experiment.notes, ""] if experiment.notes else []
    words = f"`python -m reproduction {experiment.name}{' --quick' if quick else ''}`."
    command = f"{words} `run` names the cells in `cells.jsonl` that a row comes from, by hash."
    shown = [name for name in experiment.columns if any(row.get(name) is not None for row in rows)]
    return "\n".join([f"# {experiment.title}", "", command, "", *notes, as_markdown(rows, shown)])


def as_markdown(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Return a Markdown table; numbers are right-aligned."""
    numeric = {name: any(isinstance(row.get(name), int | float) for row in rows) for name in columns}
    lines = [
        _line(name.replace("_", " ") for name in columns),
        _line("---:" if numeric[name] else "---" for name in columns),
        *(_line(text(row.get(name)) for name in columns) for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def text(value: Any) -> str:
    """Return a value as a table shows it: a number with four digits, a dash for a missing value."""
    match value:
        case None:
            return _NOTHING
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        case int():
            return f"{value:,}" if abs(value) >= 10_000 else str(value)
        case Mapping() | list() | tuple():
            return ", ".join(map(str, value))
    return str(value)


def as_csv(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Return the rows as CSV, with all digits."""
    written = io.StringIO()
    table = csv.writer(written, lineterminator="\n")
    table.writerow(columns)
    table.writerows([row.get(name, "") for name in columns] for row in rows)
    return written.getvalue()


# --- comparison with the paper


def against(
    statement: Statement,
    values: Iterable[Found],
    *,
    what: str = "",
    below: str = "",
    above: str = "",
    within: float = 0.0,
    better: Literal["more", "less"] | None = None,
    is_fitted: bool = False,
) -> Compared:
    """Compare a statement of the paper with all of our values that it is about.

    "At least" is compared with our smallest value, a range with both ends of ours. "Up to" is a value that the paper
    reached: our largest has to be near it. If more or less is `better`, our worst value counts.
    """
    found = sorted(values)
    up_to = statement.low is None
    is_range = not up_to and statement.high is not None and better is None
    ends = found[-1:] if up_to or better == "less" else found[:1]
    if is_range and found and found[0].value != found[-1].value:
        ends = [found[0], found[-1]]
    return Compared(
        place=statement.place,
        what=what or statement.what,
        paper=str(statement),
        ours=ends[0].value if ends else None,
        low=statement.high if up_to else statement.low,
        high=statement.high,
        unit=statement.unit,
        most=ends[1].value if len(ends) > 1 else None,
        within=NEAR if up_to else within,
        better=better,
        below=below,
        above=above,
        run=runs(ends),
        is_fitted=is_fitted,
    )


def runs(found: Iterable[Found]) -> str:
    """Return the hashes of the cells of several numbers, each once."""
    return " ".join(dict.fromkeys(cell for each in found for cell in each.run.split()))


def comparison(title: str, lines: Sequence[Compared]) -> str:
    """Return the page with each statement of the paper, our value, and the verdict."""
    head = [f"# {title}: the paper and ours", ""]
    if not lines:
        return "\n".join([*head, "The paper has no numbers for this.", ""])
    rows: list[Row] = [
        {
            "where": line.place,
            "what": line.what,
            "paper": line.paper,
            "ours": _ours(line),
            "ratio": line.ratio,
            "verdict": _verdict(line),
            "run": line.run,
        }
        for line in lines
    ]
    table = as_markdown(rows, ("where", "what", "paper", "ours", "ratio", "verdict", "run"))
    return "\n".join([*head, f"{tally(lines)}.", "", _VERDICTS, "", table])


_VERDICTS = (
    f'"Up to" is a value that the paper reached: our largest value is inside if it differs by at most '
    f"{100 * NEAR:.0f} %. The same tolerance applies to seconds that the paper prints. A value better than the "
    "paper's is marked better, not inside. `ratio` is ours divided by the paper's; `run` names the cells in "
    "`cells.jsonl` that ours comes from, by hash. Statements that the testbed was fitted to are marked fitted and not "
    "counted, nor are lines about which the paper says nothing."
)


def _verdict(line: Compared) -> str:
    if line.paper == UNSAID and line.verdict == "inside":
        return _NOTHING if line.low is line.high is None else "holds"
    fitted = "fitted, " if line.is_fitted else ""
    return f"{fitted}{line.verdict}: {line.why}" if line.why else f"{fitted}{line.verdict}"


def tally(lines: Sequence[Compared]) -> str:
    """Return the number of lines inside the paper's range, better, and not run, in words."""
    counted = [line for line in lines if line.is_counted]
    fitted, unsaid = sum(line.is_fitted for line in lines), sum(line.paper == UNSAID for line in lines)
    inside, better, left = (
        sum(line.verdict == verdict for line in counted) for verdict in ("inside", "better", "not run")
    )
    more = (f", {better} better" if better else "") + (f", {left} not run" if left else "")
    more += f"; the testbed was fitted to {fitted} more" if fitted else ""
    more += f"; about {unsaid} more it says nothing" if unsaid else ""
    return f"{inside} of {len(counted)} lines are inside the paper's range{more}"


def _ours(line: Compared) -> str:
    if line.ours is None:
        return _NOTHING
    most = f" to {text(line.most)}" if line.most is not None else ""
    return f"{text(line.ours)}{most} {line.unit}".strip()

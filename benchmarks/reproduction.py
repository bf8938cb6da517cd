"""The paper's evaluation, run and checked in: `results/reproduction` has tables, comparisons, figures and cells.

`python -m benchmarks reproduction` runs `python -m reproduction all --quick` from nothing, for minutes.
`python -m benchmarks reproduction_full` runs every experiment without --quick, for hours, in the folder
`runs/reproduction`, and resumes there after an interruption. Its tables replace quick ones, and no quick run replaces
them. `python -m benchmarks.reproduction time-small --quick` updates one experiment.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reproduction
from benchmarks.record import RESULTS, Claim
from pipar.profiling.cache import machine_fingerprint
from reproduction.catalog import ALL, EXPERIMENTS
from reproduction.cell_file import FILE as CELLS
from reproduction.cell_file import read_cells, write_cells
from reproduction.durations import FILE as DURATIONS
from reproduction.experiment import LEARNING
from reproduction.learning import EQUAL

PLACE = RESULTS / "reproduction"
#: Folder in which long runs are made and resumed.
KEPT = Path("runs/reproduction")
#: Maximum seconds of the quick set on two cores, and of the full set of timing experiments.
MOST_QUICK_S, MOST_TIMING_S = 20 * 60.0, 3 * 3600.0
_CORES = 2
#: The file next to an experiment's tables that says how and when they were made.
ABOUT = "run.json"
_HASH = re.compile(r"\b[0-9a-f]{16}\b")

Document = dict[str, Any]


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    """Run the quick set from nothing, and check it in."""
    seconds = {ALL: _timed_s([ALL, "--quick"], folder)}
    took = Claim(
        f"python -m reproduction all --quick, {os.cpu_count()} processes", seconds[ALL], "s", most=MOST_QUICK_S
    )
    document = _document([ALL, "--quick"], folder)
    publish(document, folder)
    return [took, *claims(document, PLACE)], {"seconds": seconds, "experiments": _tallies(document)}


def measure_full(_: Path) -> tuple[list[Claim], dict[str, object]]:
    """Run everything that is missing, and check it in."""
    is_new = not (KEPT / CELLS).exists()
    seconds = {name: _timed_s([name], KEPT) for name in EXPERIMENTS}
    document = _document([ALL], KEPT)
    publish(document, KEPT)
    took = [Claim("core seconds of the full timing set / 2", timing_cpu_s(KEPT) / _CORES, "s", most=MOST_TIMING_S)]
    if is_new:  # otherwise some of them had been run before
        waited_s = sum(taken for name, taken in seconds.items() if not _learns(name))
        took += [Claim(f"the full timing set, {os.cpu_count()} processes", waited_s, "s", most=MOST_TIMING_S)]
    return [*took, *claims(document, PLACE)], {"seconds": seconds, "experiments": _tallies(document)}


def _learns(name: str) -> bool:
    return any(cell.how in LEARNING for cell in EXPERIMENTS[name].cells(False))


def timing_cpu_s(folder: Path) -> float:
    """Return the seconds of one core that all different cells of the full timing set took."""
    hashes = {cell.hash for name, of in EXPERIMENTS.items() if not _learns(name) for cell in of.cells(False)}
    records = read_cells(folder)
    return sum(float(records[cell]["cpu_s"]) for cell in sorted(hashes))


def _timed_s(words: Sequence[str], folder: Path) -> float:
    """Run the command with its progress, and return its seconds."""
    began = time.monotonic()
    subprocess.run(_command(words, folder), check=True)
    return time.monotonic() - began


def _document(words: Sequence[str], folder: Path) -> Document:
    """Return the JSON document of finished experiments; nothing is run again for it."""
    done = subprocess.run([*_command(words, folder), "--json"], check=True, stdout=subprocess.PIPE, text=True)
    content: Document = json.loads(done.stdout)
    return content


def _command(words: Sequence[str], folder: Path) -> list[str]:
    return [sys.executable, "-m", "reproduction", *words, "-o", str(folder)]


# --- what is claimed of it


def claims(document: Document, place: Path) -> list[Claim]:
    """Return the claims about an evaluation, from its comparisons and the files that are checked in."""
    by_name = {of["name"]: of for of in document["experiments"]}
    lines = [line for of in by_name.values() for line in of["comparison"]]
    outside = [line for line in lines if line["verdict"] in ("below", "above", "wider")]
    drawn = [name for name, of in by_name.items() if any(file.endswith(".png") for file in of["files"])]
    to_draw = [name for name in by_name if EXPERIMENTS[name].plot is not None]
    found = [
        Claim("cases in which pipar is slower than fl or sfl", _counted(lines, "pipar takes longer"), "", most=0),
        Claim(
            "cases in which they tie although pipar cuts the network", _counted(lines, "which has cut the network"), ""
        ),
        Claim(
            "cases in which the server is idle longer with pipar",
            _counted(lines, "the server is idle longer with pipar"),
            "",
            most=0,
        ),
        Claim("statements of the paper compared with our results", len(lines), ""),
        Claim("of these, outside the paper's range", len(outside), ""),
        Claim("of these, without a reason", sum(not line["why"] for line in outside), "", most=0),
        Claim("experiments without their figures", len(set(to_draw) - set(drawn)), "", most=0),
        Claim("runs that are named in a table but not checked in", len(missing(place)), "", most=0),
    ]
    if "accuracy" in by_name:
        shares = [abs(row["difference"]) / row["spread"] for row in by_name["accuracy"]["rows"]]
        found.append(
            Claim("(accuracy of pipar - better of fl and sfl) / difference between seeds", max(shares), "", most=1)
        )
    if "equality" in by_name:
        apart = max(row["largest_difference"] for row in by_name["equality"]["rows"])
        found.append(Claim("largest difference of weights by fl, sfl and pipar, float64", apart, "", most=EQUAL))
    return found


def _counted(lines: Iterable[Mapping[str, Any]], words: str) -> float:
    return sum(float(line["ours"]) for line in lines if words in line["what"])


def _tallies(document: Document) -> dict[str, dict[str, int]]:
    """Return the number of lines of each experiment by verdict, of those that the paper makes a statement about."""
    found: dict[str, dict[str, int]] = {}
    for of in document["experiments"]:
        counts = found.setdefault(of["name"], {})
        for line in of["comparison"]:
            if line["is_counted"]:
                counts[line["verdict"]] = counts.get(line["verdict"], 0) + 1
    return found


# --- what is checked in


@dataclass(frozen=True)
class Checked:
    """The checked-in tables of one experiment, and their origin."""

    name: str
    title: str
    is_quick: bool
    date: str
    machine: str
    cells: int
    cpu_s: float | None
    figures: Sequence[str]
    verdicts: Mapping[str, int]

    @property
    def command(self) -> str:
        return f"python -m reproduction {self.name}{' --quick' if self.is_quick else ''}"

    def lines(self) -> Iterator[str]:
        """Yield its part of the page."""
        took = "" if self.cpu_s is None else f", {self.cpu_s:.0f} s of one core"
        yield from (f"## {self.name}", "", self.title + ".", "")
        yield f"{self.date}, {self.machine}, `{self.command}`: {self.cells} cells{took}."
        yield f"[Table]({self.name}/table.md), [CSV]({self.name}/table.csv), [the paper and ours]({self._compared})."
        yield ""
        for figure in self.figures:
            yield from (f"![{self.title}]({self.name}/{figure})", "")

    @property
    def _compared(self) -> str:
        return f"{self.name}/comparison.md"


def publish(document: Document, folder: Path, place: Path = PLACE) -> None:
    """Copy tables, comparisons, figures and their cells; update the page, and the durations that `list` shows.

    Tables of a full run are kept if this one was quick. Cells that no table names any more are removed.
    """
    durations = _json(folder / DURATIONS)
    for of in document["experiments"]:
        if document["quick"] and _is_full(place / of["name"]):
            continue
        _copy(of, folder, place, durations, quick=document["quick"])
    named = set().union(*(named_cells(table.parent) for table in place.glob("*/table.csv")))
    records = {**read_cells(place), **read_cells(folder)}
    write_cells(place, (record for cell, record in records.items() if cell in named))
    (place / "README.md").write_text(page(place), "utf-8")
    if place == PLACE:
        _keep_durations(durations)


def _is_full(place: Path) -> bool:
    return (place / ABOUT).exists() and not _json(place / ABOUT)["is_quick"]


def _copy(of: Document, folder: Path, place: Path, durations: Document, *, quick: bool) -> None:
    """Replace an experiment's files."""
    into, size = place / of["name"], "quick" if quick else "full"
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    files = [Path(file) for file in of["files"] if not file.endswith(".svg")]  # ten times as large as PNG
    for file in files:
        shutil.copy(folder / of["name"] / file.name, into / file.name)
    took = durations.get(of["name"], {}).get(size, {})
    about = {
        "name": of["name"],
        "title": of["title"],
        "is_quick": quick,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine_fingerprint(),
        "cells": len(EXPERIMENTS[of["name"]].cells(quick)),
        "cpu_s": took.get("cpu_s"),
        "figures": sorted(file.name for file in files if file.suffix == ".png"),
        "verdicts": _tallies({"experiments": [of]})[of["name"]],
    }
    (into / ABOUT).write_text(json.dumps(about, indent=1) + "\n", "utf-8")


def named_cells(place: Path) -> set[str]:
    """Return the cells that an experiment's table and its comparison name."""
    rows = csv.DictReader(io.StringIO((place / "table.csv").read_text("utf-8")))
    compared = (place / "comparison.md").read_text("utf-8")
    return {cell for row in rows for cell in row["run"].split()} | set(_HASH.findall(compared))


def missing(place: Path = PLACE) -> list[str]:
    """Return the cells that tables name and that have no line with configuration and result next to them."""
    named = set().union(*(named_cells(table.parent) for table in place.glob("*/table.csv")))
    return sorted(named - read_cells(place).keys())


def page(place: Path) -> str:
    """Return the page that shows everything, in the order of `python -m reproduction list`."""
    found = [Checked(**_json(place / name / ABOUT)) for name in EXPERIMENTS if (place / name / ABOUT).exists()]
    head = [
        "# Results of the paper's evaluation",
        "",
        "Tables, comparisons and figures of `python -m reproduction`, written by "
        "`python -m benchmarks reproduction` (quick) and `python -m benchmarks reproduction_full`. Every row of a "
        "table and every line of a comparison names its cells by hash: each is a line of "
        "[cells.jsonl](cells.jsonl) with configuration and result. "
        "[How to run the evaluation](../../../docs/reproduction.md) explains the columns.",
        "",
        "| experiment | set | inside | better | outside, with a reason |",
        "|---|---|---:|---:|---:|",
    ]
    rows = [
        f"| [{of.name}](#{of.name}) | {'quick' if of.is_quick else 'full'} | {_count(of, 'inside')} "
        f"| {_count(of, 'better')} | {_count(of, 'below', 'above', 'wider')} |"
        for of in found
    ]
    return "\n".join([*head, *rows, "", *(line for of in found for line in of.lines())])


def _count(of: Checked, *verdicts: str) -> int:
    return sum(of.verdicts.get(verdict, 0) for verdict in verdicts)


def _keep_durations(measured: Document) -> None:
    """Write the durations to the package, where `python -m reproduction list` reads them."""
    file = Path(reproduction.__file__).with_name(DURATIONS)
    noted = _json(file)
    merged = {name: {**noted.get(name, {}), **measured.get(name, {})} for name in {**noted, **measured}}
    file.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n", "utf-8")


def _json(file: Path) -> Document:
    content: Document = json.loads(file.read_text("utf-8"))
    return content


def main(words: list[str]) -> None:
    """Run one experiment, or all, in the folder of long runs, and check it in."""
    _timed_s(words, KEPT)
    document = _document(words, KEPT)
    publish(document, KEPT)
    for claim in claims(document, PLACE):
        print(claim)


if __name__ == "__main__":
    main(sys.argv[1:])

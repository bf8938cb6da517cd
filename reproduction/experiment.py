"""An experiment: trainings to run, a table of the results, and a comparison with the paper."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from reproduction.sources import counted_images, counted_libraries, counted_sources

#: Kinds of cells that train with the mathematics, on images with torch.
LEARNING = ("train", "alike")
#: Shown where the paper has no statement.
UNSAID = "says nothing"
#: A row of a table, by column.
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One configuration and how it is run. `labels` are columns that name it; they do not change its hash."""

    how: str  # one of RUNNERS in `reproduction/cells.py`
    config: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)  # needed to run it, in addition to the configuration
    labels: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def hash(self) -> str:
        """Identifies the cell by everything its result depends on, including the sources that compute it."""
        content: dict[str, Any] = {"how": self.how, "config": self.config, "options": self.options}
        content["sources"] = counted_sources()
        if self.how in LEARNING:
            data = self.config["data"]
            content |= {"libraries": counted_libraries(), "images": counted_images(data["name"], data.get("path"))}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        words = [str(label) for label in self.labels.values() if not isinstance(label, bool)]
        return " ".join(words) or self.hash


@dataclass(frozen=True)
class Outcome:
    """A cell that was run, and its result; `was_kept` if it had been run before."""

    cell: Cell
    result: Mapping[str, Any]
    was_kept: bool = False
    cpu_s: float | None = None  # when it was run

    @property
    def row(self) -> Row:
        """Labels and results together, and the hash of the cell that they come from."""
        return {**self.cell.labels, **self.result, "run": self.cell.hash}


def a_row_each(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return a row for each cell."""
    return [outcome.row for outcome in outcomes]


class Found(NamedTuple):
    """A number of ours, and the hashes of the cells that it comes from."""

    value: float
    run: str


@dataclass(frozen=True)
class Compared:
    """One statement of the paper, and ours; `low` and `high` are its range, None where it gives no bound.

    `within` is the tolerance of a printed number that is not a range. A line states before anything is run why ours
    would be `below` or `above`, so that no result outside the range is without a reason.
    """

    place: str  # in the paper
    what: str
    paper: str  # as it is printed
    ours: float | None  # None: not run here
    low: float | None = None
    high: float | None = None
    unit: str = ""
    most: float | None = None  # the upper end if ours is a range, too
    within: float = 0.0
    better: Literal["more", "less"] | None = None
    below: str = ""
    above: str = ""
    run: str = ""  # hashes of the cells that ours comes from
    is_fitted: bool = False  # the testbed was fitted to this statement: it only checks the fit

    def __post_init__(self) -> None:
        may_be_below = self.low is not None and self.better != "less"
        may_be_above = self.high is not None and self.better != "more"
        assert self.below or not may_be_below, f"'{self.what}' does not say why ours would be below"
        assert self.above or not may_be_above, f"'{self.what}' does not say why ours would be above"

    @property
    def is_counted(self) -> bool:
        """Whether the paper has a statement that our testbed was not fitted to."""
        return self.paper != UNSAID and not self.is_fitted

    @property
    def verdict(self) -> str:
        """ "inside", "better", "below", "above", or "wider" if ours leaves the paper's range on both sides."""
        if self.ours is None:
            return "not run"
        least, most = self.ours, self.ours if self.most is None else self.most
        below = self.low is not None and least < self.low - abs(self.low) * self.within
        above = self.high is not None and most > self.high + abs(self.high) * self.within
        if (below and self.better == "less") or (above and self.better == "more"):
            return "better"
        words = {(False, False): "inside", (True, False): "below", (False, True): "above", (True, True): "wider"}
        return words[below, above]

    @property
    def why(self) -> str:
        """The reason if ours is outside the paper's range; empty if it is not."""
        return {"below": self.below, "above": self.above, "wider": self._why_wider}.get(self.verdict, "")

    @property
    def _why_wider(self) -> str:
        return "; ".join(dict.fromkeys((self.below, self.above)))

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's, if that is a single number or bound."""
        is_range = None not in (self.low, self.high) and self.low != self.high
        bound = self.high if self.low is None else self.low
        if self.ours is None or self.most is not None or is_range or not bound:
            return None
        return self.ours / bound


def compare_nothing(rows: Sequence[Row]) -> list[Compared]:
    """The paper has no statement about it."""
    del rows
    return []


@dataclass(frozen=True)
class Experiment:
    """What `python -m reproduction NAME` runs. `cells(True)` returns fewer of them, for --quick.

    `columns` are those of `rows` that the tables show, in order; the last one is
    `run`, the hashes of the cells that a row comes from. `plot` draws rows into a folder and returns the files.
    """

    name: str
    title: str
    cells: Callable[[bool], Sequence[Cell]]
    columns: Sequence[str]
    compare: Callable[[Sequence[Row]], list[Compared]] = compare_nothing
    plot: Callable[[Sequence[Row], Path], Sequence[Path]] | None = None
    rows: Callable[[Sequence[Outcome]], list[Row]] = a_row_each
    notes: str = ""  # shown above its table

    def __post_init__(self) -> None:
        assert self.columns[-1] == "run", f"the table of {self.name} does not name the cells of its numbers"

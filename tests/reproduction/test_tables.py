"""Tables have every digit or four of them; the paper's statements are compared with ours, line by line."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.made_up_cells import cells

from pipar.errors import InputError
from reproduction.experiment import UNSAID, Compared, Experiment, Found, Outcome
from reproduction.published import published
from reproduction.tables import against, as_csv, as_markdown, comparison, page, tally, text, write_tables

#: A line that states why it would be outside.
explained = partial(Compared, below="too little", above="too much")


def found(*values: float) -> Iterable[Found]:
    return [Found(value, f"run{value:g}") for value in values]


ROWS = [{"network": "vgg5", "s": 1.23456789, "plan": "P=1 | N=2"}, {"network": "vgg16", "s": None}]


def test_markdown_has_four_digits_and_a_dash_for_missing_values() -> None:
    assert as_markdown(ROWS, ("network", "s", "plan")).splitlines() == [
        "| network | s | plan |",
        "| --- | ---: | --- |",
        "| vgg5 | 1.235 | P=1 / N=2 |",
        "| vgg16 | - | - |",
    ]


def test_csv_has_every_digit() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(ROWS, ("network", "s")))))
    assert [float(row["s"]) for row in rows if row["s"]] == [1.23456789]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(12345.6, "12346"), (0.00012345, "0.0001234"), (10_000, "10,000"), (9_999, "9999"), (True, "yes"), (None, "-")],
)
def test_a_value_is_shown_with_four_digits(value: object, shown: str) -> None:
    assert text(value) == shown


@pytest.mark.parametrize(
    ("ours", "low", "high", "within", "verdict"),
    [
        (2.0, 1.4, 3.4, 0.0, "inside"),
        (1.3, 1.4, 3.4, 0.0, "below"),
        (3.5, 1.4, 3.4, 0.0, "above"),
        (99.0, None, 64.1, 0.0, "above"),
        (1.0, None, 64.1, 0.0, "inside"),
        (0.97, 0.96, None, 0.0, "inside"),
        (12.0, 10.0, 10.0, 0.25, "inside"),
        (13.0, 10.0, 10.0, 0.25, "above"),
        (-0.3, -0.2, 2.07, 0.0, "below"),
        (None, 1.0, None, 0.0, "not run"),
    ],
)
def test_ours_is_inside_the_papers_range_or_not(
    ours: float | None, low: float | None, high: float | None, within: float, verdict: str
) -> None:
    assert explained("V", "what", "", ours, low, high, within=within).verdict == verdict


def test_a_range_of_ours_can_leave_the_papers_on_both_sides() -> None:
    wider = explained("V", "what", "", 1.0, 1.4, 3.4, most=5.0)
    assert (wider.verdict, wider.why) == ("wider", "too little; too much")
    assert explained("V", "what", "", 1.5, 1.4, 3.4, most=5.0).verdict == "above"


@pytest.mark.parametrize(
    ("low", "high", "ratio"),
    [(10.0, 10.0, 0.5), (None, 50.0, 0.1), (2.5, None, 2.0), (1.0, 2.0, None), (0.0, 0.0, None)],
)
def test_the_ratio_is_that_to_a_number_or_a_bound(low: float | None, high: float | None, ratio: float | None) -> None:
    assert explained("V", "what", "", 5.0, low, high).ratio == ratio


@pytest.mark.parametrize(
    ("low", "high", "why", "needs"),
    [
        (1.0, None, {"above": "too much"}, "below"),
        (None, 1.0, {"below": "too little"}, "above"),
        (1.0, 1.0, {"above": "too much", "better": "more"}, "below"),
        (1.0, 1.0, {"below": "too little", "better": "less"}, "above"),
    ],
)
def test_a_line_that_could_be_outside_without_a_reason_is_refused(
    low: float | None, high: float | None, why: dict[str, Any], needs: str
) -> None:
    with pytest.raises(AssertionError, match=f"does not say why ours would be {needs}"):
        Compared("V", "what", "", 1.0, low, high, **why)
    assert Compared("V", "what", "", 1.0, low, high, **{**why, needs: "for a reason"}).verdict == "inside"


def test_at_least_is_compared_with_our_smallest_and_a_range_with_both_ends() -> None:
    at_least, span = (published().statement(name) for name in ("score", "speed-up-fl-vgg5"))
    smallest = against(at_least, found(0.9, 1.0), below="why")
    assert (smallest.ours, smallest.run) == (0.9, "run0.9")
    both = against(span, found(1.5, 3.0, 2.0), below="why", above="why")
    assert (both.ours, both.most, both.verdict, both.run) == (1.5, 3.0, "inside", "run1.5 run3")
    assert against(span, [], below="why", above="why").verdict == "not run"


@pytest.mark.parametrize(("largest", "verdict"), [(5.6, "below"), (25.0, "below"), (30.0, "inside"), (45.0, "above")])
def test_up_to_is_reached_only_by_a_value_near_it(largest: float, verdict: str) -> None:
    line = against(published().statement("speed-up"), found(1.0, largest), below="the server is full", above="why")
    assert (line.paper, line.ours, line.verdict) == ("up to 34.6 x", largest, verdict)
    assert line.ratio == pytest.approx(largest / 34.6)
    assert ("the server is full" in comparison("Times", [line])) == (verdict == "below")


def test_a_value_better_than_the_papers_is_marked_better() -> None:
    optimal, cost = published().statement("optimal-plans"), published().statement("planning-cost")
    assert [against(optimal, found(value), below="why", better="more").verdict for value in (80.0, 83.3, 95.0)] == [
        "below", "inside", "better",
    ]  # fmt: skip
    assert [against(cost, found(value), above="why", better="less").verdict for value in (10.0, 30.0)] == [
        "better", "above",
    ]  # fmt: skip
    assert against(cost, found(1.0, 30.0), above="why", better="less").ours == 30.0


def test_a_comparison_counts_lines_inside_and_gives_reasons_for_the_others() -> None:
    a, b, c = (explained("V-B", f"time of {which}", "10 s", s, 10.0, 10.0, "s", within=0.25, run=which)
               for which, s in (("A", 9.0), ("B", 30.0), ("C", 2.0)))  # fmt: skip
    told = comparison("Times", [a, b, replace(c, better="less")])
    assert "1 of 3 lines are inside the paper's range, 1 better." in told
    assert "| V-B | time of A | 10 s | 9 s | 0.9 | inside | A |" in told
    assert "| V-B | time of B | 10 s | 30 s | 3 | above: too much | B |" in told
    assert "| V-B | time of C | 10 s | 2 s | 0.2 | better | C |" in told


def test_a_table_without_the_cells_of_its_numbers_is_refused() -> None:
    with pytest.raises(AssertionError, match="does not name the cells"):
        Experiment("made-up", "Made up", lambda _: [], ("seed", "s"))


@pytest.mark.parametrize(("quick", "command"), [(True, "made-up --quick`"), (False, "made-up`")])
def test_a_table_names_the_command_that_writes_it(quick: bool, command: str) -> None:
    assert f"`python -m reproduction {command}" in page(
        Experiment("made-up", "Made up", lambda _: [], ("run",)), [], quick=quick
    )


def test_every_experiment_leaves_a_table_a_csv_and_a_comparison(tmp_path: Path) -> None:
    experiment = Experiment("made-up", "Made up", lambda quick: cells(*range(1 if quick else 2)), ("seed", "s", "run"))
    outcomes = [Outcome(cell, {"s": 2.5}) for cell in experiment.cells(False)]
    files = write_tables(experiment, experiment.rows(outcomes), tmp_path)
    assert [file.name for file in files] == ["table.md", "table.csv", "comparison.md"]
    assert outcomes[0].cell.hash in (tmp_path / "made-up" / "table.md").read_text()
    assert "The paper has no numbers for this." in (tmp_path / "made-up" / "comparison.md").read_text()


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "made-up").write_text("a file")
    with pytest.raises(InputError, match="Cannot write"):
        write_tables(Experiment("made-up", "Made up", lambda _: [], ("run",)), [], tmp_path)


def test_a_line_without_a_statement_of_the_paper_is_not_counted_as_inside() -> None:
    lines = [
        Compared("V", "said", "2 x", 2.0, 2.0, 2.0, below="why", above="why"),
        Compared("-", "ours alone", UNSAID, 7.0),
        Compared("-", "wanted", UNSAID, 0.0, 0.0, 1.0, below="why", above="why"),
    ]
    assert tally(lines) == "1 of 1 lines are inside the paper's range; about 2 more it says nothing"
    verdicts = [row.split(" | ")[5] for row in comparison("Title", lines).splitlines()[-3:]]
    assert verdicts == ["inside", "-", "holds"]

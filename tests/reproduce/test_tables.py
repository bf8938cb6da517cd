"""Tables have every digit or four of them; what the paper says is held against ours, line by line."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from made_up_cells import cells

from pipar.errors import InputError
from pipar.reproduce.experiment import Compared, Experiment, Outcome
from pipar.reproduce.published import published
from pipar.reproduce.tables import against, as_csv, as_markdown, comparison, text, write_tables

ROWS = [{"network": "vgg5", "s": 1.23456789, "plan": "P=1 | N=2"}, {"network": "vgg16", "s": None}]


def test_markdown_has_four_digits_and_a_dash_for_nothing() -> None:
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
def test_a_value_is_shown_short(value: object, shown: str) -> None:
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
    assert Compared("V", "what", "", ours, low, high, within=within).verdict == verdict


def test_a_range_of_ours_can_leave_the_papers_on_both_sides() -> None:
    assert Compared("V", "what", "", 1.0, 1.4, 3.4, most=5.0).verdict == "wider"
    assert Compared("V", "what", "", 1.5, 1.4, 3.4, most=5.0).verdict == "above"


@pytest.mark.parametrize(
    ("low", "high", "ratio"),
    [(10.0, 10.0, 0.5), (None, 50.0, 0.1), (2.5, None, 2.0), (1.0, 2.0, None), (0.0, 0.0, None)],
)
def test_the_ratio_is_that_to_a_number_or_a_bound(low: float | None, high: float | None, ratio: float | None) -> None:
    assert Compared("V", "what", "", 5.0, low, high).ratio == ratio


def test_up_to_is_held_against_our_largest_and_at_least_against_our_smallest() -> None:
    up_to, at_least, span = (published().statement(name) for name in ("server-idle-fl", "score", "speed-up-fl-vgg5"))
    assert against(up_to, [2.0, 70.0]).ours == 70.0
    assert against(up_to, [2.0, 70.0]).verdict == "above"
    assert against(at_least, [0.9, 1.0]).ours == 0.9
    both = against(span, [1.5, 3.0, 2.0])
    assert (both.ours, both.most, both.verdict) == (1.5, 3.0, "inside")
    assert against(span, []).verdict == "not run"


def test_what_is_better_than_the_papers_number_is_inside() -> None:
    optimal, cost = published().statement("optimal-plans"), published().statement("planning-cost")
    assert [against(optimal, [value], better="more").verdict for value in (80.0, 83.3, 95.0)] == [
        "below", "inside", "inside",
    ]  # fmt: skip
    assert [against(cost, [value], better="less").verdict for value in (10.0, 30.0)] == ["inside", "above"]


def test_a_comparison_counts_what_is_inside_and_says_why_something_is_not() -> None:
    lines = [
        Compared("V-B", "time of A", "10 s", 9.0, 10.0, 10.0, "s", within=0.25, why="unused"),
        Compared("V-B", "time of B", "10 s", 30.0, 10.0, 10.0, "s", within=0.25, why="the server is full"),
    ]
    page = comparison("Times", lines)
    assert "1 of 2 lines are inside what the paper says." in page
    assert "| V-B | time of A | 10 s | 9 s | 0.9 | inside |" in page
    assert "| V-B | time of B | 10 s | 30 s | 3 | above: the server is full |" in page


def test_every_experiment_leaves_a_table_a_csv_and_a_comparison(tmp_path: Path) -> None:
    experiment = Experiment("made-up", "Made up", lambda quick: cells(*range(1 if quick else 2)), ("seed", "s", "run"))
    outcomes = [Outcome(cell, {"s": 2.5}) for cell in experiment.cells(False)]
    files = write_tables(experiment, experiment.rows(outcomes), tmp_path)
    assert [file.name for file in files] == ["table.md", "table.csv", "comparison.md"]
    assert outcomes[0].cell.key in (tmp_path / "made-up" / "table.md").read_text()
    assert "The paper has no numbers for this." in (tmp_path / "made-up" / "comparison.md").read_text()


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "made-up").write_text("a file")
    with pytest.raises(InputError, match="Cannot write"):
        write_tables(Experiment("made-up", "Made up", lambda _: [], ("run",)), [], tmp_path)

"""The checked-in results of the paper's evaluation are complete, from the named runs, and replaced correctly."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.made_up_cells import TINY

from benchmarks import reproduction
from pipar.settings.config_file import config_from
from reproduction import catalog
from reproduction.__main__ import main
from reproduction.cell_file import FILE, read_cells, write_cells
from reproduction.efficiency import METHODS, TIME_SMALL, by_all_methods

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run an experiment of tiny trainings in `tmp_path`, and return its document."""
    tiny = replace(
        TIME_SMALL,
        name="tiny",
        title="Tiny",
        cells=lambda quick: by_all_methods([TINY] if quick else [replace(TINY, link="4g")]),
    )
    monkeypatch.setitem(catalog.EXPERIMENTS, "tiny", tiny)

    def command(*words: str) -> dict[str, Any]:
        with pytest.raises(SystemExit) as ended:
            main(["tiny", *words, "--json", "-o", str(tmp_path / "out"), "--processes", "1"])
        assert ended.value.code == 0
        told: dict[str, Any] = json.loads(capfd.readouterr().out)
        return told

    return command


@pytest.mark.slow
def test_tables_figures_and_the_cells_that_they_name_are_copied(run: Run, tmp_path: Path) -> None:
    told, place = run("--quick"), tmp_path / "place"
    reproduction.publish(told, tmp_path / "out", place)
    named = reproduction.named_cells(place / "tiny")
    assert read_cells(place).keys() == named
    assert list(read_cells(place)) == sorted(named)
    assert len(named) == 3
    text = (place / "README.md").read_text()
    assert "`python -m reproduction tiny --quick`: 3 cells, 0 s of one core." in text
    figures = sorted(path.name for path in (place / "tiny").glob("*.png"))
    assert figures
    assert all(f"(tiny/{name})" in text for name in figures)
    shown = {claim.what: claim for claim in reproduction.claims(told, place)}
    assert all(claim.holds for claim in shown.values())
    write_cells(place, list(read_cells(place).values())[1:])
    (gone,) = [claim for claim in reproduction.claims(told, place) if "not checked in" in claim.what]
    assert (gone.value, gone.holds) == (1, False)


@pytest.mark.slow
def test_a_full_run_replaces_a_quick_one_but_not_the_reverse(run: Run, tmp_path: Path) -> None:
    out, place = tmp_path / "out", tmp_path / "place"
    reproduction.publish(run("--quick"), out, place)
    before = reproduction.named_cells(place / "tiny")
    reproduction.publish(run(), out, place)
    after = reproduction.named_cells(place / "tiny")
    assert before.isdisjoint(after)
    assert read_cells(place).keys() == after
    reproduction.publish(run("--quick"), out, place)
    assert reproduction.named_cells(place / "tiny") == after
    assert "`python -m reproduction tiny`: 3 cells" in (place / "README.md").read_text()


@pytest.mark.slow
def test_a_line_outside_without_a_reason_or_a_slower_pipar_fails_the_claim(run: Run, tmp_path: Path) -> None:
    told = run("--quick")
    reproduction.publish(told, tmp_path / "out", tmp_path / "place")
    (slower,) = [line for line in told["experiments"][0]["comparison"] if "takes longer" in line["what"]]
    slower |= {"ours": 2.0, "verdict": "above", "why": ""}
    broken = [claim for claim in reproduction.claims(told, tmp_path / "place") if not claim.holds]
    assert [claim.value for claim in broken] == [2, 1]


@pytest.mark.slow
def test_every_checked_in_number_has_its_cell() -> None:
    assert reproduction.missing() == []


@pytest.mark.slow
def test_every_checked_in_line_is_a_cell_with_configuration_and_result() -> None:
    lines = [json.loads(line) for line in (reproduction.PLACE / FILE).read_text("utf-8").splitlines()]
    hashes = [line["hash"] for line in lines]
    assert hashes == sorted(set(hashes)) == list(read_cells(reproduction.PLACE))
    for line in lines:
        assert list(line) == ["hash", "how", "options", "config", "cpu_s", "result"]
        config_from(line["config"])


def test_checked_in_seconds_are_those_of_their_runs() -> None:
    records = read_cells(reproduction.PLACE)
    tables = sorted(reproduction.PLACE.glob("time-*/table.csv"))
    assert [table.parent.name for table in tables] == ["time-large", "time-small"]
    for table in tables:
        rows = list(csv.DictReader(table.read_text("utf-8").splitlines()))
        assert rows
        for row in rows:
            for method, cell in zip(METHODS, row["run"].split(), strict=True):
                seconds = records[cell]["result"].get("seconds")
                assert row[f"{method}_s"] == str(seconds or ""), (table, row)

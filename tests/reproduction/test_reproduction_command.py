"""`python -m reproduction` as a user types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.made_up_cells import TINY

from pipar.privacy import accounting
from reproduction import catalog, durations
from reproduction.__main__ import main
from reproduction.cell_file import read_cells
from reproduction.command import _missing
from reproduction.efficiency import TIME_SMALL, by_all_methods
from reproduction.learning import ACCURACY
from reproduction.privacy import PRIVACY

Told = tuple[int, str, str]


@pytest.fixture
def pipar(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Told]:
    """Run `python -m reproduction` with an experiment of two tiny trainings, and return its code and what it wrote."""
    tiny = replace(
        TIME_SMALL,
        name="tiny",
        title="Tiny",
        cells=lambda quick: by_all_methods([TINY] if quick else [TINY, replace(TINY, link="4g")]),
    )
    monkeypatch.setattr(catalog, "EXPERIMENTS", {"tiny": tiny})

    def command(*words: str) -> Told:
        with pytest.raises(SystemExit) as ended:
            main([*words])
        captured = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    return command


@pytest.mark.slow
def test_an_experiment_leaves_tables_and_is_not_run_twice(pipar: Callable[..., Told], tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    code, told, lines = pipar("tiny", "-o", out, "--processes", "1")
    assert (code, len(lines.splitlines())) == (0, 6)
    assert lines.splitlines()[0].startswith("1 of 6  tiny: vgg5 mnist wifi 2 fl  (about ")
    assert told.startswith("tiny: 2 rows, ")
    table = (tmp_path / "out" / "tiny" / "table.md").read_text()
    cells = read_cells(tmp_path / "out")
    assert len(cells) == 6
    assert all(cell in table for cell in cells)
    assert pipar("tiny", "-o", out, "--processes", "1") == (0, told, "")


@pytest.mark.slow
def test_a_document_has_rows_and_comparisons(pipar: Callable[..., Told], tmp_path: Path) -> None:
    code, told, lines = pipar("tiny", "--quick", "--json", "-o", str(tmp_path), "--processes", "1")
    document = json.loads(told)
    assert (code, lines, document["quick"]) == (0, "", True)
    (experiment,) = document["experiments"]
    assert experiment["rows"][0]["pipar_s"] <= experiment["rows"][0]["fl_s"]
    (slower,) = [line for line in experiment["comparison"] if "takes longer" in line["what"]]
    assert (slower["ours"], slower["verdict"], slower["why"]) == (0.0, "inside", "")
    assert all(line["run"] for line in experiment["comparison"])
    is_outside = [line["verdict"] in ("below", "above", "wider") for line in experiment["comparison"]]
    assert [bool(line["why"]) for line in experiment["comparison"]] == is_outside
    assert any(is_outside), "two boards with forty images each are not what the paper has measured"


def test_an_unknown_option_suggests_no_setting_because_there_is_none(pipar: Callable[..., Told]) -> None:
    code, told, lines = pipar("list", "--epochs", "3")
    assert (code, told) == (2, "")
    assert "No such option '--epochs'" in lines
    assert "--set" not in lines


def test_the_list_has_every_experiment(pipar: Callable[..., Told]) -> None:
    code, told, _ = pipar("list")
    assert code == 0
    assert "tiny" in told
    sizes = {"cells": {"quick": 3, "full": 6}, "cpu_s": {"quick": None, "full": None}}
    assert json.loads(pipar("list", "--json")[1]) == [{"name": "tiny", "title": "Tiny", **sizes}]


@pytest.mark.slow
def test_the_list_has_the_times_of_the_same_cells(
    pipar: Callable[..., Told], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipar("tiny", "--quick", "-o", str(tmp_path), "--processes", "1")
    noted = json.loads((tmp_path / durations.FILE).read_text())
    assert noted == {"tiny": {"quick": {"cells": 3, "cpu_s": pytest.approx(0, abs=60)}}}
    measured = {"tiny": {"quick": {"cells": 3, "cpu_s": 600.0}, "full": {"cells": 5, "cpu_s": 9.0}}}
    monkeypatch.setattr(durations, "_measured", lambda: measured)
    (told,) = json.loads(pipar("list", "--json")[1])
    assert told["cpu_s"] == {"quick": 600.0, "full": None}, "those of five cells are not those of six"
    assert "10 min" in pipar("list")[1]


@pytest.mark.slow
def test_the_time_left_is_that_of_the_cells_to_run(pipar: Callable[..., Told], tmp_path: Path) -> None:
    out = str(tmp_path)
    pipar("tiny", "--quick", "-o", out, "--processes", "1")
    _, _, lines = pipar("tiny", "-o", out, "--processes", "1")
    assert [line.partition(" ")[0] for line in lines.splitlines()] == ["4", "5", "6"]
    assert lines.splitlines()[-1].endswith("(about 0 s left)")


@pytest.mark.slow
def test_shared_and_kept_cells_do_not_count_as_time_left(pipar: Callable[..., Told], tmp_path: Path) -> None:
    tiny = catalog.EXPERIMENTS["tiny"]
    assert len(_missing([tiny, replace(tiny, name="twice")], tmp_path, quick=False)) == 6
    pipar("tiny", "--quick", "-o", str(tmp_path), "--processes", "1")
    missing = _missing([tiny, replace(tiny, name="twice")], tmp_path, quick=False)
    assert sorted(missing) == sorted(cell.hash for cell in tiny.cells(False)[3:])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["tinny"], "'tinny' is not an experiment (did you mean 'tiny'?); choose from tiny and all."),
        (["tiny", "--processes", "0"], "0 is not in the range"),
        (["tiny", "-o", "/dev/null/x"], "Cannot make the folder /dev/null/x"),
        ([], "Missing argument 'NAME'"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], sentence: str, pipar: Callable[..., Told]) -> None:
    code, told, lines = pipar(*words)
    assert (code, told, len(lines.splitlines())) == (2, "", 1)
    assert sentence in lines


@pytest.mark.slow
def test_experiments_that_lack_something_are_named_and_left_out_before_anything_is_run(
    pipar: Callable[..., Told], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy = replace(PRIVACY, name="noisy")
    monkeypatch.setattr(catalog, "EXPERIMENTS", {**catalog.EXPERIMENTS, "noisy": noisy, "images": ACCURACY})
    monkeypatch.setattr(accounting, "is_installed", lambda: False)
    monkeypatch.setenv("PIPAR_DATA", str(tmp_path / "nothing"))
    code, told, said = pipar("all", "--quick", "-o", str(tmp_path / "out"), "--processes", "1")
    assert code == 2
    assert told.startswith("tiny: 1 rows, ")
    first, second, *_, last = said.splitlines()
    assert first.startswith("noisy is skipped. Noise on updates needs the package dp-accounting")
    assert second.startswith("accuracy is skipped. mnist is not complete in ")
    assert last.endswith(
        "Not run: noisy, accuracy. Install what they need (see above), then run the same command again."
    )
    alone = pipar("noisy", "--quick", "-o", str(tmp_path / "out"))
    assert (alone[0], alone[1]) == (2, "")
    assert "Noise on updates needs the package dp-accounting" in alone[2]


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_shows_the_command_as_it_is_typed(option: str, pipar: Callable[..., Told]) -> None:
    code, told, lines = pipar(option)
    assert (code, lines) == (0, "")
    assert told.startswith("Usage: python -m reproduction [OPTIONS] NAME\n")

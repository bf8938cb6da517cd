"""`pipar report`, and the pages that runs write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.small_runs import SETTINGS

import pipar
from pipar.cli import cli, main
from pipar.events import Event, ReportFailed, ReportWritten
from pipar.launch import simulated
from pipar.report import try_write_comparison, writing
from pipar.settings.config_file import load_config

#: A method with nothing to plan.
QUICK = (*SETTINGS, 'run.method="fl"')
WORDS = [word for setting in SETTINGS for word in ("--set", setting)]


def invoke(words: Sequence[str]) -> Result:
    return CliRunner().invoke(cli, list(words), obj="pipar " + " ".join(words), catch_exceptions=False)


@pytest.fixture
def folder(runs: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs["pipar"], tmp_path / "run"))


@pytest.mark.slow
def test_the_last_line_of_a_run_or_comparison_is_the_path_of_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path))
    done = invoke(["compare", "--timing-only", "--methods", "fl,sl", "--name", "try", *WORDS])
    assert "".join(done.stdout.split()).endswith(f"Report:{tmp_path}/try-comparison/report.html")
    for name in ("try-fl", "try-sl", "try-comparison"):
        assert "<title>vgg5 on digits" in (tmp_path / name / "report.html").read_text()
    done = invoke(["run", "--timing-only", "--method", "fl", "--json", *WORDS])
    printed = json.loads(done.stdout)
    assert printed["report"] == f"{tmp_path}/vgg5-digits-fl/report.html"
    assert Path(printed["report"]).exists()


@pytest.mark.slow
def test_report_rewrites_the_page_of_a_run(folder: Path) -> None:
    (folder / "report.html").unlink()
    assert invoke(["report", str(folder)]).stdout.strip() == f"{folder}/report.html"
    assert (folder / "report.html").stat().st_size > 1_000_000


@pytest.mark.slow
def test_several_runs_are_written_as_one_page_to_the_given_file(runs: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "both.html"
    done = invoke(["report", str(runs["fl"]), str(runs["pipar"]), "--output", str(page), "--json"])
    assert json.loads(done.stdout) == {"report": str(page), "runs": [str(runs["fl"]), str(runs["pipar"])]}
    assert "vgg5 on digits: fl, pipar" in page.read_text()


@pytest.mark.slow
def test_a_folder_without_a_run_or_an_unwritable_output_is_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, sentence in (
        ([str(tmp_path / "nothing")], "does not exist"),
        ([str(folder), "--output", str(tmp_path / "no" / "page.html")], "Cannot write"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["report", *words])
        said = capsys.readouterr()
        assert stopped.value.code == 2
        assert sentence in said.err
        assert len(said.err.splitlines()) == 1


def test_a_page_that_cannot_be_written_does_not_fail_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> dict[str, Any]:
        raise ZeroDivisionError("in the page")

    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path))
    monkeypatch.setattr(writing, "content", broken)
    events: list[Event] = []
    result = pipar.run(world="timing-only", settings=QUICK, report=True, observe=events.append)
    (failed,) = [event for event in events if isinstance(event, ReportFailed)]
    assert "ZeroDivisionError: in the page" in failed.reason
    assert result.report is None
    assert len(result.epochs) == 2
    assert try_write_comparison([result.folder], load_config(None, QUICK), events.append) is None
    assert not list(tmp_path.glob("*-comparison")), "an empty folder is left"


def test_an_interrupted_run_has_a_page_of_its_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **words: Any) -> None:
        train(*arguments, **words)
        raise KeyboardInterrupt

    train = simulated.simulate_training
    events: list[Event] = []
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path))
    monkeypatch.setattr(simulated, "simulate_training", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipar.run(world="timing-only", settings=QUICK, report=True, observe=events.append)
    (written,) = [event.path for event in events if isinstance(event, ReportWritten)]
    assert written == f"{tmp_path}/vgg5-digits-fl/report.html"
    assert not (tmp_path / "vgg5-digits-fl" / "outlook.json").exists()


def test_a_run_in_python_writes_no_page_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path))
    assert pipar.run(world="timing-only", settings=QUICK).report is None

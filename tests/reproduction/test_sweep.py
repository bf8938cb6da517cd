"""Finished cells are kept and not run again; the end of a sweep loses none of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.made_up_cells import TINY, cells
from support.waiting import PATIENCE_S, until

from pipar.errors import InputError
from pipar.settings.config_file import config_from
from reproduction.cell_file import FILE, append_outcome, read_cells
from reproduction.experiment import Cell
from reproduction.sweep import sweep


class Runs:
    """Runs cells without doing anything, remembers their seeds, and is interrupted before one of them."""

    def __init__(self, until: int | None = None) -> None:
        self.seeds: list[int] = []
        self._until = until

    def __call__(self, how: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        del how, options
        if config["run"]["seed"] == self._until:
            raise KeyboardInterrupt
        self.seeds.append(config["run"]["seed"])
        return {"fits": True, "seconds": float(config["run"]["seed"])}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return _instead(monkeypatch, Runs())


def _instead(monkeypatch: pytest.MonkeyPatch, runs: Runs) -> Runs:
    monkeypatch.setattr("reproduction.sweep.run_cell", runs)
    return runs


@pytest.mark.slow
def test_cells_in_the_folder_are_read_and_the_others_are_run(runs: Runs, tmp_path: Path) -> None:
    first = list(sweep(cells(1, 2), tmp_path))
    second = list(sweep(cells(1, 2, 3), tmp_path))
    assert runs.seeds == [1, 2, 3]
    assert [outcome.was_kept for outcome in first + second] == [False, False, True, True, False]
    assert [outcome.result["seconds"] for outcome in second] == [1.0, 2.0, 3.0]


def test_a_row_names_the_line_of_its_cell_which_has_the_configuration(runs: Runs, tmp_path: Path) -> None:
    (outcome,) = sweep(cells(7), tmp_path)
    kept = json.loads((tmp_path / FILE).read_text())
    assert list(kept) == ["hash", "how", "options", "config", "cpu_s", "result"], (
        "no labels: experiments have their own"
    )
    assert (kept["hash"], kept["how"], kept["options"]) == (outcome.row["run"], "timing", {})
    assert config_from(kept["config"]).run.seed == 7
    assert kept["result"] == {"fits": True, "seconds": 7.0}
    assert runs.seeds == [7]


def test_the_duration_of_a_cell_is_kept_with_it(runs: Runs, tmp_path: Path) -> None:
    (first,) = sweep(cells(1), tmp_path)
    (again,) = sweep(cells(1), tmp_path)
    assert first.cpu_s is not None
    assert (again.was_kept, again.cpu_s) == (True, first.cpu_s)
    assert runs.seeds == [1]


DAMAGED = ["", "{cut", "[]", '{"hash": "HASH", "config": {}, "result": 3}', '{"hash": "HASH", "result": {}}', "\xff"]


@pytest.mark.slow
@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_line_is_run_again_and_the_others_are_not(damaged: str, runs: Runs, tmp_path: Path) -> None:
    list(sweep(cells(1, 2, 3), tmp_path))
    lines = (tmp_path / FILE).read_bytes().splitlines(keepends=True)
    lines[1] = damaged.replace("HASH", cells(2)[0].hash).encode("latin-1") + b"\n"
    (tmp_path / FILE).write_bytes(b"".join(lines))
    again = list(sweep(cells(1, 2, 3), tmp_path))
    assert [outcome.was_kept for outcome in again] == [True, True, False]
    assert runs.seeds == [1, 2, 3, 2]


@pytest.mark.slow
@pytest.mark.parametrize("torn", [1, 40, -1])
def test_a_last_line_that_a_crash_truncated_does_not_damage_later_lines(torn: int, runs: Runs, tmp_path: Path) -> None:
    list(sweep(cells(1), tmp_path))
    whole = (tmp_path / FILE).read_bytes()
    list(sweep(cells(2), tmp_path))
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[: len(whole) + torn if torn > 0 else torn])
    list(sweep(cells(2, 3), tmp_path))
    assert len(list(sweep(cells(1, 2, 3), tmp_path))) == 3
    assert runs.seeds == ([1, 2, 2, 3] if torn > 0 else [1, 2, 3]), "without its line break a line is whole"


def test_a_disk_that_is_full_in_mid_line_is_one_sentence_and_the_cell_is_run_again(runs: Runs, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(InputError, match=r"Cannot write .*cells\.jsonl: No space left on device\."):
            list(sweep(cells(1), tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / FILE).stat().st_size == 100
    assert [outcome.was_kept for outcome in sweep(cells(1), tmp_path)] == [False]
    assert [outcome.was_kept for outcome in sweep(cells(1), tmp_path)] == [True]
    assert runs.seeds == [1, 1]


def test_the_last_of_two_lines_with_one_hash_counts(runs: Runs, tmp_path: Path) -> None:
    (outcome,) = sweep(cells(1), tmp_path)
    append_outcome(tmp_path, replace(outcome, result={"fits": True, "seconds": 5.0}))
    (again,) = sweep(cells(1), tmp_path)
    assert (again.result["seconds"], len((tmp_path / FILE).read_text().splitlines())) == (5.0, 2)
    assert runs.seeds == [1]


def test_two_cells_with_one_configuration_are_run_once(runs: Runs, tmp_path: Path) -> None:
    one, other = cells(1)[0], Cell("timing", cells(1)[0].config, labels={"called": "otherwise"})
    found = list(sweep([one, other], tmp_path))
    assert runs.seeds == [1]
    assert [outcome.row["seconds"] for outcome in found] == [1.0, 1.0]
    assert found[1].row["called"] == "otherwise"


@pytest.mark.slow
def test_an_interruption_keeps_finished_cells_and_the_next_sweep_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = _instead(monkeypatch, Runs(until=3))
    with pytest.raises(KeyboardInterrupt):
        list(sweep(cells(1, 2, 3, 4), tmp_path))
    resumed = _instead(monkeypatch, Runs())
    assert len(list(sweep(cells(1, 2, 3, 4), tmp_path))) == 4
    assert (interrupted.seeds, resumed.seeds) == ([1, 2], [3, 4])


def test_with_other_sources_everything_is_run_again(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list(sweep(cells(1), tmp_path))
    monkeypatch.setattr("reproduction.experiment.counted_sources", lambda: "another version")
    list(sweep(cells(1), tmp_path))
    assert runs.seeds == [1, 1]


def test_results_computed_while_sources_are_edited_are_not_kept(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coming = sweep(cells(1, 2), tmp_path)
    next(coming)
    monkeypatch.setattr("reproduction.sources._sources_on_disk", lambda: "another version")
    with pytest.raises(InputError, match="have changed since this command started"):
        next(coming)
    assert runs.seeds == [1, 2]
    assert len(read_cells(tmp_path)) == 1


def test_trained_cells_depend_on_libraries_and_images_and_timed_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def keys() -> list[str]:
        return [Cell(how, {"data": {"name": "mnist"}}).hash for how in ("train", "alike", "timing")]

    def changed(name: str) -> list[bool]:
        before = keys()
        monkeypatch.setattr(f"reproduction.experiment.{name}", lambda *_: "others")
        return [one != other for one, other in zip(before, keys(), strict=True)]

    assert changed("counted_libraries") == [True, True, False]
    assert changed("counted_images") == [True, True, False]


def test_the_hash_of_a_cell_covers_what_it_depends_on_but_not_its_labels() -> None:
    one = Cell("timing", {"run": {"seed": 1}}, {"a": 1}, {"x": 1})
    assert one.hash == Cell("timing", {"run": {"seed": 1}}, {"a": 1}, {"x": 2}).hash
    others = [
        Cell("plan", {"run": {"seed": 1}}, {"a": 1}),
        Cell("timing", {"run": {"seed": 2}}, {"a": 1}),
        Cell("timing", {"run": {"seed": 1}}, {"a": 2}),
    ]
    assert len({one.hash, *(other.hash for other in others)}) == 4


def test_a_folder_that_is_not_writable_is_reported_in_one_sentence(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(InputError, match=r"Cannot write .*cells\.jsonl: Is a directory\."):
        list(sweep(cells(1), tmp_path))
    assert runs.seeds == [1]


@pytest.mark.slow
@pytest.mark.usefixtures("own_fork_server")
def test_two_processes_give_the_results_of_one_and_leave_no_process_running(tmp_path: Path) -> None:
    tiny = [Cell("timing", {**TINY.tree(), "run": {**TINY.tree()["run"], "seed": seed}}) for seed in (1, 2, 3)]

    def found(folder: str, processes: int) -> dict[str, Any]:
        outcomes = sweep(tiny, tmp_path / folder, processes=processes)
        return {outcome.cell.hash: {**outcome.result, "planning_s": 0.0} for outcome in outcomes}

    assert found("two", 2) == found("one", 1)
    reader = sweep(tiny, tmp_path / "left", processes=2)
    next(reader)
    reader.close()  # the caller stops reading
    assert not [child for child in multiprocessing.active_children() if child.is_alive()]


@pytest.mark.slow
def test_ctrl_c_keeps_finished_cells_prints_how_to_continue_and_exits_with_130(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "reproduction", "testbed", "--quick", "--processes", "2", "-o", "out"]
    environment = {**os.environ, "CI": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            until(lambda: read_cells(tmp_path / "out") or process.poll(), "the first result")
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    kept = len(read_cells(tmp_path / "out"))
    assert process.returncode == 130
    said = r"Stopped. (\d+) of (\d+) results are in out/: run the same command again to continue."
    stopped = re.fullmatch(said, told.splitlines()[-1])
    assert stopped is not None
    assert int(stopped[1]) == kept < int(stopped[2])

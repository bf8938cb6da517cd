"""`python -m simulation` as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.waiting import PATIENCE_S, until

from simulation.__main__ import main
from simulation.campaign import Report, try_seed
from simulation.command import simulate_worlds


@pytest.mark.slow
def test_the_command_reports_that_all_invariants_held() -> None:
    result = CliRunner().invoke(
        simulate_worlds, ["--seeds", "1", "--rounds", "1", "--devices", "2"], standalone_mode=False
    )
    assert result.return_value == 0
    assert "1 worlds" in result.output
    assert "all invariants held" in result.output


@pytest.mark.slow
def test_the_command_reports_the_seed_that_failed_and_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(seed: int, devices: int, rounds: int, *, verbose: bool = False) -> Report:  # noqa: ARG001
        return Report(seed, "fl", "", 1.0, ("a fault",), 0, "weights are finite", "0.weight is not.", "fl", ("last",))

    monkeypatch.setattr("simulation.campaign.try_seed", fails)
    result = CliRunner().invoke(simulate_worlds, ["--seeds", "2", "--first", "5"], standalone_mode=False)
    assert result.return_value == 1
    assert "Seed 6 violates 'weights are finite': 0.weight is not." in result.output
    assert "python -m simulation --seed 6 --verbose" in result.output
    shown = json.loads(CliRunner().invoke(simulate_worlds, ["--seed", "5", "--json"], standalone_mode=False).output)
    assert shown["failed"] == [5]


@pytest.mark.slow
def test_a_verbose_seed_reports_all_events() -> None:
    report = try_seed(1, 2, 1, verbose=True)
    assert report.holds
    assert any("RoundOver" in event for event in report.events)
    assert try_seed(1, 2, 1).events == ()
    assert try_seed(1, 2, 1).digest == report.digest


def test_verbose_needs_a_seed() -> None:
    result = CliRunner().invoke(simulate_worlds, ["--verbose"])
    assert result.exit_code == 2
    assert "--verbose prints the events of one world: add its --seed." in result.output


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_shows_the_command_as_it_is_typed(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([option])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("Usage: python -m simulation [OPTIONS]\n")


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_exits_130() -> None:
    command = [sys.executable, "-m", "simulation", "--seeds", "1000", "--processes", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    out_of = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=out_of, stderr=out_of, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            until(lambda: len(_workers(process.pid)) == 2 or process.poll(), "the worker processes")
            workers = _workers(process.pid)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the children, too
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert (process.returncode, out, err.strip()) == (130, "", "Stopped.")
    until(lambda: not any(Path("/proc", worker).exists() for worker in workers), "the end of the worker processes")


def _workers(pid: int) -> list[str]:
    """Return the worker processes: the children of the process's fork server."""
    return [worker for child in _children(pid) for worker in _children(child)]


def _children(pid: int | str) -> list[str]:
    return Path("/proc", str(pid), "task", str(pid), "children").read_text().split()

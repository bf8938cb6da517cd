"""Tests do not depend on how they are started, nor on each other: shared code is in tests/support."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import support
from support.programs import place
from support.waiting import PATIENCE_S, until

TESTS = Path(__file__).parent
ROOT = TESTS.parent
#: Signals that nohup, a shell that starts background jobs, or a service manager might ignore.
IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)
SHOW = "import os; print(open('/proc/self/status').read(), *os.environ)"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_programs_of_tests_get_signals_and_have_no_settings_of_the_user() -> None:
    command = [sys.executable, "-c", SHOW]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=True).stdout
    for mask in ("SigIgn", "SigBlk"):
        held_back = int(re.findall(rf"^{mask}:\s+(\w+)$", shown, re.M)[0], base=16)
        assert [number.name for number in IGNORED if held_back >> (number - 1) & 1] == []
    assert {"PIPAR_TRACEBACK", "COLUMNS", "NO_COLOR"} & set(shown.splitlines()[-1].split()) == set()


def test_ctrl_c_interrupts_a_test() -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def ignore_signals() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
def test_both_are_true_in_tests_that_are_started_with_signals_ignored(workers: str) -> None:
    others = "programs_of_tests_get_signals or interrupts_a_test"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", workers, __file__, "-k", others]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PIPAR_TRACEBACK": "1", "COLUMNS": "200", "NO_COLOR": "1"},
        preexec_fn=ignore_signals, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


# --- hangs

HANGING = """
import pytest
from support import hangs, waiting

waiting.PATIENCE_S = 0.1

@pytest.mark.parametrize("number", range(5))
def test_hangs(number):
    if number != 1:
        waiting.until(lambda: False, "nothing", waiting.PATIENCE_S)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_ends_when_a_second_test_hangs(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING, "utf-8")
    plugins = ["-p", "support.hangs", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, "-n", workers, "--dist", "loadfile", "--rootdir", ".", "."]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(TESTS)}, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert "2 tests hung for 0.1 s or more, lastly test_hanging.py::test_hangs[2]" in done.stdout, done.stderr
    assert "2 failed, 1 passed" in done.stdout


@pytest.mark.parametrize("load", [0.5, 40.0])
def test_time_counts_less_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch, load: float) -> None:
    now_s, asked = 0.0, 0

    def later(seconds: float) -> None:
        nonlocal now_s, asked
        now_s, asked = now_s + 100 * seconds, asked + 1

    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "sleep", later)
    with pytest.raises(AssertionError, match="waited 100 s for a sign"):
        until(lambda: False, "a sign", 100.0)
    assert asked == pytest.approx(50 * max(1.0, load / 4), abs=2)


IN_VAIN = """
import time
def wait_in_vain():
    print("begun", flush=True)
    time.sleep(1e6)
wait_in_vain()
"""


@pytest.mark.slow
def test_a_program_that_hangs_ends_with_what_it_does(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(IN_VAIN, "utf-8")
    with place(tmp_path, tmp_path, {}) as somewhere:
        program = somewhere.run("python", "hanging.py")
        program.says(r"begun")
        assert "line 5 in wait_in_vain" in program.last_words()
        assert program.poll() == -signal.SIGABRT


# --- shared modules


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.slow
def test_no_module_imports_a_test_module() -> None:
    test_module = re.compile(r"(.*\.)?(test_\w+|conftest)")
    found = {
        str(path.relative_to(TESTS)): list(filter(test_module.fullmatch, imported(path)))
        for path in TESTS.rglob("*.py")
    }
    assert {name: modules for name, modules in found.items() if modules} == {}


def test_the_map_of_support_names_every_module() -> None:
    modules = {path.stem for path in (TESTS / "support").glob("*.py")} - {"__init__"}
    lines = re.findall(r"^    (\w+(?:, \w+)*)  ", support.__doc__ or "", re.MULTILINE)
    assert sorted(name for line in lines for name in line.split(", ")) == sorted(modules)

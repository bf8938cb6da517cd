"""Tests do not depend on how they are started, nor on each other: shared code is in tests/support."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import support
from support.waiting import PATIENCE_S

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

"""Shell completion, through click's protocol and in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.waiting import PATIENCE_S

from pipar.cli import main
from pipar.cli.command_group import COMPLETION_VARIABLE
from pipar.cli.completion import SHELLS, join_words
from pipar.methods import METHODS
from pipar.settings.config import DATASETS, MODELS
from pipar.settings.links import NAMED_LINKS
from pipar.settings.values import TRACKERS

Complete = Callable[..., list[str]]


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Complete:
    """Complete the last of these words, as bash splits them; files are "file"."""

    def candidates(*words: str) -> list[str]:
        monkeypatch.setenv(COMPLETION_VARIABLE, "bash_complete")
        monkeypatch.setenv("COMP_WORDS", " ".join(["pipar", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        with pytest.raises(SystemExit) as ended:
            main([])
        captured = capfd.readouterr()
        assert (ended.value.code, captured.err) == (0, "")
        lines = [line.partition(",") for line in captured.out.splitlines() if line]
        return [value if kind == "plain" else kind for kind, _, value in lines]

    return candidates


@pytest.mark.parametrize(
    ("words", "candidates"),
    [
        (["comp"], ["compare", "completion"]),
        (["run", "--method", ""], list(METHODS)),
        (["run", "--method", "sf"], ["sfl", "sfl2"]),
        (["run", "--model", ""], list(MODELS)),
        (["plan", "--data", ""], list(DATASETS)),
        (["run", "--link", "4"], [name for name in NAMED_LINKS if name.startswith("4")]),
        (["server", "--tracker", ""], list(TRACKERS)),
        (["compare", "--methods", "fl,sl,s"], ["fl,sl,sfl", "fl,sl,sfl2"]),
        (["data", "get", "cif"], ["cifar10", "cifar100"]),
        (["leakage", "--attacks", "small,d"], ["small,decoder"]),
        (["completion", ""], list(SHELLS)),
        (["run", "--set", "wire.e"], ["wire.encoding="]),
        (["run", "--set", "wire.encoding", "=", "sp"], ["sparse", "sparse-planes"]),
        (["run", "--set", "model.norm", "="], ["batch", "group", "none"]),
        (["run", "--set", "=", "plan.replan", "=", "t"], ["true"]),
        (["run", "--set", "plan.micro_batches=a"], ["plan.micro_batches=auto"]),
        (["run", "--set", "devices.profile", "=", "raspberry-pi-3"], ["raspberry-pi-3b"]),
        (["run", "--set", "server.aggregator", "=", "kr"], ["krum"]),
        (["run", ""], ["file"]),
        (["run", "--dashboard", "127.0.0.1", ":", "80", ""], ["file"]),
        (["nonsense", "x"], []),
    ],
)  # fmt: skip
def test_known_names_are_completed(words: list[str], candidates: list[str], complete: Complete) -> None:
    assert complete(*words) == candidates


def test_folders_of_runs_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complete: Complete) -> None:
    for name in ("a-fl", "a-pipar", "no-run"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        if name != "no-run":
            (tmp_path / "runs" / name / "config.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PIPAR_RUNS", raising=False)
    assert complete("report", "") == ["runs/a-fl", "runs/a-pipar"]
    assert complete("report", "runs/a-fl", "runs/a-p") == ["runs/a-pipar"]
    assert complete("report", "/elsewhere") == ["dir"]


@pytest.mark.parametrize(
    ("words", "joined"),
    [
        (["pipar", "run"], (["pipar", "run"], False)),
        (["pipar", "--set", "a.b", "=", "c"], (["pipar", "--set", "a.b=c"], True)),
        (["pipar", "--set", "a.b", "="], (["pipar", "--set", "a.b="], True)),
        (["pipar", "--set", "a.b", "=", "c", ""], (["pipar", "--set", "a.b=c", ""], False)),
        (["pipar", "--listen", "[", "::", "1]", ":", "80", "x"], (["pipar", "--listen", "[::1]:80", "x"], False)),
        (["pipar", "--set", "a.b", "=", "c", ":", "d"], (["pipar", "--set", "a.b=c:d"], True)),
    ],
)
def test_words_that_bash_has_split_are_joined(words: list[str], joined: tuple[list[str], bool]) -> None:
    assert join_words(words) == joined


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_a_shell_asks_pipar(shell: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", shell])
    script = capfd.readouterr().out
    assert ended.value.code == 0
    assert f"{COMPLETION_VARIABLE}={shell}_complete" in script
    assert "pipar" in script


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_a_real_bash_completes_keys_and_values_and_quotes_nothing(tmp_path: Path) -> None:
    program = tmp_path / "pipar"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m pipar "$@"\n', "utf-8")
    program.chmod(0o755)
    script = """
        source <(pipar completion bash) || exit 3
        complete -p pipar
        compopt() { echo "option $2"; }   # bash allows it in an interactive completion only
        ask() {
            COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
            _pipar_completion pipar
            printf '<%s>' "${COMPREPLY[@]}"
            echo
        }
        ask pipar run --set run.met
        ask pipar run --set run.method = sf
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "complete -o nosort -F _pipar_completion pipar",
        "option nospace",
        "<run.method=>",
        "<sfl><sfl2>",
    ]
    assert done.stderr == ""

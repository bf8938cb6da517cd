"""What a training imports, and when the fork server starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import PATIENCE_S

import pipar
from pipar.events import LOADING, Event, Preparing

_TINY = {
    "run": {"epochs": 1, "batch_size": 10},
    "devices": [{"count": 2, "profile": "raspberry-pi-5"}],
    "server": {"profile": "i7-11850h"},
    "data": {"samples_per_device": 20, "validation": 10, "test": 10},
}
_MEASURING = ("Measuring the layers", "Measuring loading, messages and crowded cores")


def printed(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_a_virtual_training_does_not_import_the_compiler_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path))
    script = f"import pipar, sys; pipar.run({_TINY}, world='virtual'); "
    assert printed(script + "print('torch' in sys.modules, 'torch._dynamo' in sys.modules)") == "True False"


@pytest.mark.slow
def test_what_child_processes_have_in_advance_is_neither_the_compiler_nor_grpc() -> None:
    script = "import gc, sys, pipar.launch.preloaded; "
    wanted = ("torch", "pipar.launch.assemble", "torch._dynamo", "grpc")
    found = printed(
        script + f"print([name in sys.modules for name in {wanted}], gc.isenabled(), gc.get_freeze_count() > 0)"
    )
    assert found == "[True, True, False, False] True True"


@pytest.mark.slow
@pytest.mark.usefixtures("measured_at_once")
def test_a_training_tells_its_steps_in_order_and_measures_a_network_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    measured = {key: value for key, value in _TINY.items() if key not in ("devices", "server")}

    def steps() -> list[str]:
        told: list[str] = []

        def observe(event: Event) -> None:
            step = event.what if isinstance(event, Preparing) else type(event).__name__
            if step not in told:
                told.append(step)

        pipar.run(measured, world="virtual", settings=["devices.count=2"], observe=observe)
        return [step for step in told if step in (*_MEASURING, LOADING, "Planning", "Started", "Joined", "EpochResult")]

    assert steps() == [LOADING, *_MEASURING, "Planning", "Started", "Joined", "EpochResult"]
    assert steps() == [LOADING, "Planning", "Started", "Joined", "EpochResult"]


@pytest.mark.slow
def test_the_fork_server_starts_before_torch_is_imported() -> None:
    script = """
import sys, pipar
import pipar.launch.run as run
class Ended(Exception): pass
def started(*, own_optimizer):
    print(own_optimizer, "torch" in sys.modules)
    raise Ended
run.start_fork_server = started
for settings in ([], ["optimizer.factory=own:optimizer"]):
    try:
        pipar.run(settings=settings)
    except Ended:
        pass
"""
    assert printed(script).splitlines() == ["False False", "True False"]

"""Attackers with certificates of the server's authority, against a real server while two honest devices train.

`python -m benchmarks hostility` does the same with 100,000 damaged frames and 10,000 conversations.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.credentials import certs
from support.deployments import check_nothing_is_left, check_weights
from support.programs import Place, address_of, place

from benchmarks.hostility import HONEST, ROGUES, Attack, Victim, training

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("measured_at_once")]

FRAMES, CONVERSATIONS = 150, 30
FEW = ROGUES[:20]


def small_training() -> dict[str, Any]:
    """Return the training of the benchmark with a network of the tests, which has the same activations."""
    tree = training()
    tree["run"]["name"] = "it"
    tree["model"]["factory"] = "support.gated:rectified"
    tree["plan"]["split_point"] = 2
    return tree


@pytest.fixture
def here(tmp_path: Path, profiles: Path) -> Iterator[Place]:
    with place(tmp_path, profiles, small_training()) as made:
        certs("init", "--folder", str(tmp_path / "certs"))
        certs("issue", *HONEST, *FEW, "--folder", str(tmp_path / "certs"))
        yield made


def test_hostile_frames_and_conversations_change_nothing_for_honest_devices(
    here: Place, profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(profiles))
    server = here.server("--certs", "certs")
    address = address_of(server)
    devices = [here.device(name, address, "--certs", "certs") for name in HONEST]
    victim = Victim(here.folder / "train.toml", here.folder / "certs", here.run_folder / "rounds.jsonl", FEW)
    attack = Attack(victim, FRAMES, CONVERSATIONS, steps=1)
    asyncio.run(attack.run(server.pid, address))
    assert attack.sent >= FRAMES
    assert attack.held >= CONVERSATIONS
    assert attack.rounds_meanwhile > 0
    assert attack.sizes[-1].open_files <= attack.sizes[0].open_files + 5
    for program in (server, *devices):
        program.signal(signal.SIGTERM)
    assert [program.ends() for program in (server, *devices)] == [0, 0, 0]
    assert "Traceback" not in server.text()
    assert {frozenset(entry["counted"]) for entry in here.rounds()} == {frozenset(HONEST)}
    small = small_training()
    small["run"]["epochs"] = len(here.rounds())
    check_weights(here, small)
    check_nothing_is_left(here)

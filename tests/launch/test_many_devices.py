"""Many devices at one real server; `python -m benchmarks many_devices` has 200 of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import many_devices


@pytest.mark.slow
@pytest.mark.usefixtures("measured_at_once")
def test_thirty_devices_in_one_process_complete_a_round_at_one_server(
    tmp_path: Path, profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(profiles))  # where the server finds profiles that are measured here
    monkeypatch.chdir(Path(__file__).parents[2])  # where `benchmarks` is found by the server's process
    claims, _ = many_devices.measure(tmp_path, devices=30, first=10)
    assert [claim for claim in claims if not claim.holds] == []

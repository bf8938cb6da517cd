"""The benchmark of sampling, with few devices: what the server holds does not depend on those that are not drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import sampling


@pytest.mark.slow
def test_the_servers_tensors_do_not_grow_with_devices_that_are_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    few, _ = sampling.train(6, rounds=4, drawn=3)
    many, job = sampling.train(48, rounds=16, drawn=3)
    assert many.most_replicas == few.most_replicas == 3
    assert many.most_bytes == few.most_bytes
    assert set(many.draws) == set(job.sizes)
    assert set(many.draws.values()) == {1}

"""Fixtures of the report's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.small_runs import SETTINGS

import pipar


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The folders of one training by four methods, with their pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPAR_RUNS", str(tmp_path_factory.mktemp("runs")))
        results = pipar.compare(
            methods=["fl", "sl", "sfl", "pipar"], world="timing-only", settings=SETTINGS, report=True
        )
        yield {method: result.folder for method, result in results.items()}

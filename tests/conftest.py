"""What all tests may ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread: the last bits depend on their number."""
    from pipar.nn import runtime  # brings torch, which most tests do without

    with runtime.one_thread():
        yield


@pytest.fixture(scope="session")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs of all tests keep the profiles of their networks: each is measured once, by one worker."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "profiles"
    folder.mkdir(exist_ok=True)
    return folder

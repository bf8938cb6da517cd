"""Where the tests find real datasets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipar.data.catalog import dataset_info, find

BESIDE_THE_PROJECT = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.fixture
def real_data() -> Path:
    """The folder of real datasets: $PIPAR_DATA, else the one next to the project; else the test is skipped."""
    folder = Path(os.environ.get("PIPAR_DATA", BESIDE_THE_PROJECT))
    if not folder.is_dir():
        pytest.skip(f"no datasets in {folder}: set PIPAR_DATA to run this test")
    return folder


@pytest.fixture
def real_dataset(request: pytest.FixtureRequest, real_data: Path) -> str:
    """The name of a dataset (by indirect parametrisation) that is installed; else the test is skipped."""
    name = str(request.param)
    if find(dataset_info(name), real_data) is None:
        pytest.skip(f"{name} is not in {real_data}")
    return name

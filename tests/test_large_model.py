"""A model of 100 MB in real processes: their memory is a few times its size, and no copy may be added to that."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.large_model import LAYER_BYTES, peaks

#: Measured with two devices: 11 to 12, which is more than the five or so that are needed; no more may be added.
MOST_COPIES_IN_SERVER = 13.0
MOST_COPIES_IN_DEVICE = 7.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_large_model_is_trained_in_bounded_memory(tmp_path: Path) -> None:
    bare, large = (peaks(tmp_path, layers, devices=2) for layers in (0, 1))
    server, device = ((after - before) / LAYER_BYTES for after, before in zip(large[:2], bare[:2], strict=True))
    print(f"server {server:.1f}, device {device:.1f} times the model")
    assert server < MOST_COPIES_IN_SERVER
    assert device < MOST_COPIES_IN_DEVICE

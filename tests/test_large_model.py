"""A model of 40 MB in real processes: their memory is a few times its size, and no copy may be added to that."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.large_model import MOST_IN_DEVICE, MOST_IN_SERVER, copies, model_bytes, peaks

_LAYERS, _SIDE = 4, 1600  # a layer of 1600 x 1600 float32 is 10 MB
#: Beside copies of the model: more of Python and gRPC is in use, and arrays of the allocator are torn.
_BESIDE = 0.7


@pytest.mark.slow
def test_a_large_model_is_trained_in_bounded_memory(tmp_path: Path) -> None:
    bare, large = (peaks(tmp_path, layers, _SIDE, devices=2) for layers in (0, _LAYERS))
    server, device = copies(bare, large, model_bytes(_LAYERS, _SIDE))
    print(f"server {server:.2f}, device {device:.2f} times the model")
    assert server < MOST_IN_SERVER + _BESIDE
    assert device < MOST_IN_DEVICE + _BESIDE

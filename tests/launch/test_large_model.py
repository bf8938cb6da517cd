"""A model of 100 MB in real processes: their memory is a few times its size, and no further copy may be added."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.large_model import MOST_IN_DEVICE, MOST_IN_SERVER, copies, model_bytes, peaks

_LAYERS, _SIDE = 4, 2500  # a layer of 2500 x 2500 float32 is 25 MB
#: For frames in transit and sums in float64, which do not grow with the model.
_BESIDE = 0.4
_NOT_MEASURED = [
    "server.profile=i7-11850h",
    "devices.profile=i7-11850h",
]  # times of layers do not matter here


@pytest.mark.slow
def test_a_large_model_is_trained_in_bounded_memory(tmp_path: Path) -> None:
    bare, large = (peaks(tmp_path, layers, _SIDE, 2, _NOT_MEASURED) for layers in (0, _LAYERS))
    server, device = copies(bare, large, model_bytes(_LAYERS, _SIDE))
    print(f"server {server:.2f}, device {device:.2f} times the model")
    assert server < MOST_IN_SERVER + _BESIDE
    assert device < MOST_IN_DEVICE + _BESIDE

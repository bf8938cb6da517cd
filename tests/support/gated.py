"""A small network whose training can be held from outside, so that a test knows when a program is in mid-epoch.

Programs find it by `model.factory`. A program whose environment has GATE=NAME stops in its part of the network for as
long as $GATES/NAME.hold exists, and says so with $GATES/NAME.held. A number in it is that of the batches that may pass.
"""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn


class Gate(nn.Module):
    """Passes its input on, after waiting while its gate is closed."""

    passed = 0  # by all gates of this program

    def forward(self, x: Tensor) -> Tensor:
        # Lanes train in threads of their own; the main thread only checks the network before the training.
        trains = torch.is_grad_enabled() and threading.current_thread() is not threading.main_thread()
        if "GATE" in os.environ and trains:
            hold, held = (Path(os.environ["GATES"], f"{os.environ['GATE']}.{word}") for word in ("hold", "held"))
            while _lets_pass(hold) <= Gate.passed:
                held.touch()
                time.sleep(0.01)
            held.unlink(missing_ok=True)
            Gate.passed += 1
        return x


def _lets_pass(hold: Path) -> float:
    try:
        return int(hold.read_text("utf-8") or 0)
    except FileNotFoundError:
        return math.inf


def network() -> nn.Sequential:
    """Return a network of five layers for grey images of any size; its first layer and its last one are gates."""
    return nn.Sequential(
        Gate(),
        nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.GroupNorm(2, 4)),
        nn.Flatten(),
        nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)),
        Gate(),
    )


def rectified() -> nn.Sequential:
    """Return such a network whose second layer ends in a ReLU."""
    layers = list(network())
    layers[1] = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())
    return nn.Sequential(*layers)


def other_network() -> nn.Sequential:
    """Return another network, for images of 4 x 4."""
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(12, 10))

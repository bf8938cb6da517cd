"""What a simulated server may hold for a device that is away."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipar.events import Away, RoundOver, RoundRestarted
from simulation.memory_bounds import LOOK_EVERY_S, MemoryBounds
from simulation.scenario import draw_scenario
from simulation.tiny_training import Training


def test_a_device_of_a_round_that_starts_over_may_be_away_until_the_later_deadline() -> None:
    scenario = replace(draw_scenario(1, 5, 5), resume_window_s=0.0, round_deadline_s=4.0)
    bounds = MemoryBounds(scenario, Training.of(scenario).profile)
    name = sorted(scenario.samples)[0]
    channel, inbox = SimpleNamespace(held_bytes=0), SimpleNamespace(size_bytes=0)
    session = cast(Any, SimpleNamespace(device=name, channel=channel, inbox=inbox))

    def seconds_until_gone() -> float:
        bounds.observe(Away(name, math.inf))  # what the server says does not count
        for look in range(100):
            if [most.places for _, most in bounds.of_server([session], {})] == [0]:
                return look * LOOK_EVERY_S
        return math.inf

    assert seconds_until_gone() == pytest.approx(4.0, abs=2 * LOOK_EVERY_S)
    bounds.observe(RoundRestarted(1, 8.0))
    assert seconds_until_gone() == pytest.approx(8.0, abs=2 * LOOK_EVERY_S)
    bounds.observe(RoundOver(1, {}, {}, {}))
    assert seconds_until_gone() == pytest.approx(4.0, abs=2 * LOOK_EVERY_S)

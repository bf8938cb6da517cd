"""A server on a busy machine waits longer for its devices, which may be on the same one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipar.events import ignore
from pipar.execution.clock import run_virtually
from pipar.server.learned_timeouts import ChosenTimeouts, LearnedTimeouts
from pipar.transport.heartbeat import Waking


class _Session:
    device = "a"
    allowance = SimpleNamespace(activation_bytes=0, model_bytes=0)


async def _waited_s() -> list[float]:
    timeouts, session = LearnedTimeouts(ChosenTimeouts(), ignore), cast("Any", _Session())
    timeouts.round_is_over(1.0)
    waited_s = [timeouts.resume_window_s(session)]
    for late_s, passed_s in ((0.001, 0.0), (0.3, 0.0), (0.0, 600.0), (60.0, 0.0)):
        await asyncio.sleep(passed_s)
        timeouts.woke_late(late_s)
        waited_s.append(timeouts.resume_window_s(session))
    return waited_s


def test_timers_that_fire_late_lengthen_what_is_waited_for_a_while() -> None:
    before, hardly, late, later, very = run_virtually(_waited_s())
    assert before == hardly == 1.5
    assert late == pytest.approx(1.5 + 20 * 0.3)
    assert later == pytest.approx(1.5, abs=0.01)
    assert very == pytest.approx(1.5 + 30.0)


def test_a_sleep_returns_how_much_too_late_it_woke() -> None:
    times = iter([0.0, 0.7, 0.7])
    waking = Waking(lambda: next(times))
    assert asyncio.run(cast("Any", waking.sleep(0.0))) == 0.7
    assert waking.late_at == 0.7

"""Which devices' spans a deployment keeps, whose devices are not known when it starts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.hand_made_job import job

from pipar.execution.spans import SERVER
from pipar.methods import Plan
from pipar.server.message_limits import MessageLimits
from pipar.settings.config_file import config_from
from pipar.wire.orders import Orders


@pytest.mark.parametrize(("trace", "kept"), [("auto", 200), ("sampled", 20), ("off", 0)])
def test_a_deployment_keeps_the_spans_of_a_limited_number_of_devices(trace: str, kept: int) -> None:
    sample = replace(job(), config=config_from({"run": {"trace": trace}}), specs=()).sample_of_traced_devices()
    assert sample is not None
    for _ in range(2):
        assert [n for n in range(1000) if f"pi-{n}" in sample] == list(range(kept))
        assert (SERVER in sample) == (kept > 0)


def test_a_full_trace_has_all_devices() -> None:
    full = replace(job(), config=config_from({"run": {"trace": "full"}}), specs=())
    assert full.sample_of_traced_devices() is None


@pytest.mark.parametrize(("copies", "state_bytes"), [(0.0, 1000), (1.0, 1000), (2.5, 2500)])
def test_a_device_may_send_as_much_state_as_its_optimiser_keeps(copies: float, state_bytes: int) -> None:
    allowed: list[Any] = []
    learner: Any = SimpleNamespace(part_bytes=lambda _, **__: 1, model_bytes=lambda: 1000)
    session: Any = SimpleNamespace(device="a", introduction=SimpleNamespace(samples=1), allow=allowed.append)
    network = replace(job().server_profile, state_copies=copies)
    MessageLimits(learner, network).set(session, Orders(1, Plan(1, 8), 2, 1, False, keep_state=True))
    assert allowed[0].state_bytes == state_bytes


def test_a_device_that_claims_many_samples_may_not_send_a_large_trace() -> None:
    allowed: list[Any] = []
    learner: Any = SimpleNamespace(part_bytes=lambda _, **__: 1, model_bytes=lambda: 1)
    introduction = SimpleNamespace(samples=100_000_000)
    session: Any = SimpleNamespace(device="a", introduction=introduction, allow=allowed.append)
    MessageLimits(learner, job().server_profile).set(session, Orders(1, Plan(1, 8), 2, 1, False, False))
    assert allowed[0].trace_bytes <= 2_250_000

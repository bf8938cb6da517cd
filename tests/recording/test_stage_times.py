"""The recorded times of work, where a link's measured rate is too low."""

from __future__ import annotations

import pytest

from pipar.execution.spans import COMPUTE, DOWNLINK, IO, Span
from pipar.recording.micro_batch_sizes import Places
from pipar.recording.stage_times import DeviceModel, LinkModel, Sent, Sizes, stage_times
from pipar.transport.shaping import Rates


def span(lane: str, kind: str, start: float, end: float, *, iteration: int = 0, micro_batch: int = 0) -> Span:
    return Span("pi", lane, kind, 1, iteration, micro_batch, start, end)


@pytest.mark.parametrize("rate_bps", [4e9, 40e6, 1e6])
def test_work_does_not_include_the_wait_for_a_model_that_came_earlier_than_its_link_allows(rate_bps: float) -> None:
    """A machine that was busy shows too low a rate, and then work on a model begins before it could have arrived."""
    spans = [
        span(COMPUTE, "step", 0.9, 1.0, iteration=1),
        span(DOWNLINK, "model", 3.40, 3.41),
        span(COMPUTE, "install", 3.41, 3.42),
        span(DOWNLINK, "control", 3.42, 3.42),
        span(IO, "load", 3.43, 3.45, iteration=1),
    ]
    down = LinkModel(Rates((rate_bps,)), 0.0, Sizes(0.0, 1_000_000), Sent(0, 1_000_000))
    model = DeviceModel(Places(), LinkModel(Rates((rate_bps,)), 0.0, Sizes(0.0, 0)), down, computed_until=1.0)
    times = stage_times(spans, {"pi": model}, shares_model=False).devices["pi"]
    assert {key.partition("/")[0]: series.mean_s < 0.06 for key, series in times.items()} == {
        "step": False, "install": True, "load": True,
    }  # fmt: skip

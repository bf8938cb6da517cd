"""How the soaks judge and draw memory and open files."""

from __future__ import annotations

import pytest

from benchmarks.resource_picture import picture
from simulation.resources import Sample, growth, sample


def samples(rss: float, files: float) -> list[Sample]:
    """Return a process that grows by these amounts from one of forty samples to the next, after it has started."""
    return [Sample(at, int(1e8 + rss * at), int(20 + files * at)) for at in range(40)]


def test_growth_is_from_the_second_quarter_to_the_last() -> None:
    assert growth(samples(0, 0)) == (1.0, 0.0)
    factor, files = growth(samples(1e6, 0.5))
    assert factor == pytest.approx(1.35 / 1.15)
    assert files == 10
    started = [Sample(-1, 1, 0)] * 10
    assert growth([*started, *samples(0, 0)[:30]]) == (1.0, 0.0)


def test_a_process_can_be_sampled() -> None:
    one = sample(3.0)
    assert one.at == 3.0
    assert one.rss_bytes > 1e6
    assert one.open_files > 0


def test_every_series_has_a_line_in_both_panels() -> None:
    drawn = picture("A soak", "round", {"one": samples(0, 0), "two": samples(1e6, 1)})
    assert drawn.count("<polyline") == 4
    assert "resident memory, MiB" in drawn
    assert "A soak" in drawn

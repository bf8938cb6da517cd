"""Fixtures of the planner's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pipar.profiling.profile import LayerProfile, Profile

MakeProfile = Callable[..., Profile]


@pytest.fixture(scope="session")
def make_profile() -> MakeProfile:
    """Return a maker of profiles from (forward, backward, output bytes, parameter bytes) of a full batch."""

    def make(layers: Sequence[tuple[float, float, int, int]], batch_size: int = 100, **overheads: float) -> Profile:
        return Profile(
            model="hand",
            dtype="float32",
            batch_sizes=(batch_size,),
            layers=tuple(
                LayerProfile(f"layer{place}", (forward,), (backward,), output, parameters)
                for place, (forward, backward, output, parameters) in enumerate(layers, start=1)
            ),
            **overheads,  # type: ignore[arg-type]
        )

    return make

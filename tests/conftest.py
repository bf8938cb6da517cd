"""What all tests may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread: the last bits depend on their number."""
    from pipar.nn import runtime  # brings torch, which most tests do without

    with runtime.one_thread():
        yield

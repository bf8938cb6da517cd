"""Fixtures of all tests."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Generator, Iterator
from logging.handlers import BufferingHandler
from multiprocessing import forkserver
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from support import surroundings
from support.hangs import pytest_runtest_makereport  # noqa: F401

# The duration of an example depends on the load of the machine. A submitted change is judged by the same examples each
# time; developers get others.
settings.register_profile(
    "any load", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("any load")


def pytest_sessionstart() -> None:
    """Begin as in a plain terminal, also in each worker of pytest-xdist."""
    surroundings.forget()
    # As many threads as cores in each of several workers would mostly wait for each other.
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector away from thousands of tests and from torch, where it spends a tenth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def log_records(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """What pipar logs during a test; pytest's own way, which is off, costs every test two milliseconds."""
    log, handler = logging.getLogger("pipar"), BufferingHandler(capacity=1000)
    monkeypatch.setattr(log, "level", logging.INFO)
    log.addHandler(handler)
    yield handler.buffer
    log.removeHandler(handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread: the last bits depend on their number."""
    from pipar.nn import runtime  # brings torch, which most tests do without

    with runtime.one_thread():
        yield


@pytest.fixture
def measured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure networks in a fraction of a second, and so imprecisely: for tests that only need some profile."""
    from pipar.job.profiles import measured_profile
    from pipar.profiling import repeated_timing

    monkeypatch.setattr(repeated_timing, "PAUSE_S", 0.0)
    monkeypatch.setitem(measured_profile.__kwdefaults__, "budget_s", 0.1)


@pytest.fixture(scope="session")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs of all tests keep the profiles of their networks: each is measured once, by one worker."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "profiles"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def own_fork_server() -> Iterator[None]:
    """End the fork server after a test: a process has only one, and this one lacks a real run's preloaded modules."""
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]

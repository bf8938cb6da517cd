"""A server keeps some of its open files for itself."""

from __future__ import annotations

import asyncio
import resource

import pytest

from pipar.transport import open_files
from pipar.transport.grpc_listener import Listener
from pipar.transport.interface import Transport
from pipar.transport.limits import Limits


@pytest.mark.parametrize(
    ("files", "connections"),
    [(20_000, 4096), (4352, 4096), (4351, 4095), (1024, 768), (512, 256), (256, 128), (64, 32), (1, 1)],
)
def test_connections_leave_files_for_the_rest_of_the_process(files: int, connections: int) -> None:
    assert open_files.most_connections(4096, files) == connections


class _System:
    """The limits of a process."""

    def __init__(self, soft: int, hard: int) -> None:
        self.limits = (soft, hard)

    def getrlimit(self, _: int) -> tuple[int, int]:
        return self.limits

    def setrlimit(self, _: int, limits: tuple[int, int]) -> None:
        self.limits = limits


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 524_288), (8192, 524_288)),
        ((1024, 4096), (4096, 4096)),
        ((1024, 1024), (1024, 1024)),
        ((20_000, 20_000), (20_000, 20_000)),
        ((1024, resource.RLIM_INFINITY), (8192, resource.RLIM_INFINITY)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)),
    ],
)
def test_the_limit_is_raised_as_far_as_the_system_allows(
    before: tuple[int, int], after: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    system = _System(*before)
    monkeypatch.setattr(resource, "getrlimit", system.getrlimit)
    monkeypatch.setattr(resource, "setrlimit", system.setrlimit)
    raised = open_files.raise_limit()
    assert system.limits == after
    assert raised == open_files.limits()[0]


def test_the_default_number_of_connections_fits_what_a_server_asks_for() -> None:
    assert open_files.most_connections(Limits().connections, open_files.WANTED_FILES) == Limits().connections


def test_a_listener_accepts_no_more_connections_than_leave_files(monkeypatch: pytest.MonkeyPatch) -> None:
    async def accept(transport: Transport, _: str | None) -> None:
        raise AssertionError(transport)

    async def main() -> list[int]:
        listeners = [Listener(accept), Listener(accept, limits=Limits(connections=5))]
        for listener in listeners:
            await listener.stop()
        return [listener.most_connections for listener in listeners]

    monkeypatch.setattr(open_files, "limits", lambda: (1024, 1024))
    assert asyncio.run(main()) == [768, 5]

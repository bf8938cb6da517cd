"""Ends a run in which several tests hang: each costs minutes, and the first ones show what is wrong."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from support import waiting

#: Of each worker; the run ends when one worker has had them.
MOST = 2
_HUNG = pytest.StashKey[int]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.duration >= waiting.PATIENCE_S:
        stash = item.session.stash
        stash[_HUNG] = stash.get(_HUNG, 0) + 1
        if stash[_HUNG] == MOST:
            item.session.shouldstop = f"{MOST} tests hung for {waiting.PATIENCE_S:g} s or more, lastly {item.nodeid}"
    return report

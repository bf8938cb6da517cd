"""Results of epochs in little memory, unchanged."""

from __future__ import annotations

import json
import math
import tracemalloc

import pytest

from pipar.events import EpochResult
from pipar.storage.epoch_log import EpochLog
from pipar.storage.packed_rows import PackedRows


def result(epoch: int, devices: int = 3) -> EpochResult:
    return EpochResult(
        epoch, 1 / 3, 40, math.nan, math.inf, None, 100, 2**60, 0.1, 2.0, 5.0, 0.5, 0.25, {"device": 1 / 7},
        device_bytes={f"raspberry-pi-{n}": [1_000_000 * n + epoch, 2_000_000 * n + epoch] for n in range(devices)},
    )  # fmt: skip


@pytest.mark.parametrize("count", [5, 64, 200])
def test_results_are_read_back_unchanged(count: int) -> None:
    given = [result(epoch) for epoch in range(1, count + 1)]
    log = EpochLog(given[:3])
    for one in given[3:]:
        log.append(one)
    assert str(list(log)) == str(given)  # nan differs from itself
    assert str(log[-1]) == str(given[-1])
    assert str(log[1:3]) == str(given[1:3])
    assert str(log.rows()) == str([one.to_dict() for one in given])
    assert (len(log), bool(EpochLog())) == (count, False)


@pytest.mark.slow
def test_a_log_of_many_devices_takes_little_memory() -> None:
    def taken(make: type[list[EpochResult]] | type[EpochLog]) -> int:
        tracemalloc.start()
        try:
            kept = make()
            for epoch in range(50):
                kept.append(result(epoch, devices=200))
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    assert taken(EpochLog) < taken(list) / 3


def test_rows_that_are_read_again_can_be_continued_and_a_copy_does_not_change() -> None:
    rows = PackedRows({"epoch": number} for number in range(100))
    copied = rows.copy()
    again = PackedRows.read(json.loads(json.dumps(rows.to_json())))
    for one in (rows, again):
        one.append({"epoch": 100})
    assert again == rows == [{"epoch": number} for number in range(101)]
    assert (len(copied), copied[-1], copied[70]) == (100, {"epoch": 99}, {"epoch": 70})
    assert PackedRows.read([]) == PackedRows() == []

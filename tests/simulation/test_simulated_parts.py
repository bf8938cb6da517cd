"""The parts around the programs: damaged frames, the disk, the clock and the comparison of models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipar.errors import ProtocolError
from pipar.execution.clock import VirtualTimeLoop
from pipar.storage.checkpoint import Disk
from pipar.wire.frames import cut_message, unpack_frame
from pipar.wire.messages import Kind, Message, json_body
from simulation.disk import UnreliableDisk
from simulation.invariants import EXACT, Violation, aggregate_is_the_mean, allowed_error
from simulation.network import damage


def test_a_mean_that_is_one_bit_off_is_exact_and_one_that_is_a_millionth_off_is_not() -> None:
    state = {"weight": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    near = {"weight": torch.nextafter(state["weight"], torch.zeros(2, dtype=torch.float64))}
    aggregate_is_the_mean(1, near, state)
    for wrong in (state["weight"] + 1e-6, state["weight"] * torch.nan):
        with pytest.raises(Violation, match="the model of round 1"):
            aggregate_is_the_mean(1, {"weight": wrong}, state)


def test_a_round_that_magnifies_rounding_allows_more_but_never_a_millionth() -> None:
    assert allowed_error([1e-16, 2e-16]) == EXACT
    assert allowed_error([1e-14, 5e-13]) == pytest.approx(1e-11)
    assert allowed_error([1e-3]) < 1e-8


def test_damaged_frames_are_refused_or_read_as_frames() -> None:
    import random

    frame = next(cut_message(Message(Kind.HELLO, body=json_body({"name": "a"})), 1, 0))
    refused = 0
    for seed in range(200):
        try:
            unpack_frame(damage(frame, random.Random(seed)))
        except ProtocolError:
            refused += 1
    assert 40 < refused < 200


def test_a_jump_of_the_clock_makes_timers_late() -> None:
    loop = VirtualTimeLoop()
    fired: list[float] = []
    loop.call_at(1.0, lambda: fired.append(loop.time()))
    loop.call_soon(loop.leap, 5.0)
    loop.call_at(6.0, loop.stop)
    loop.run_forever()
    loop.close()
    assert fired == [5.0]


def test_a_disk_without_power_loses_data_that_was_not_synced(tmp_path: Path) -> None:
    disk = UnreliableDisk(lambda: None)
    assert isinstance(disk, Disk)
    for name, synced in (("whole", True), ("half", False)):
        with disk.create(tmp_path / name) as file:
            disk.write(file, memoryview(bytes(100)))
            if synced:
                disk.sync(file)
    disk.lose_unsynced()
    assert [(tmp_path / name).stat().st_size for name in ("whole", "half")] == [100, 50]

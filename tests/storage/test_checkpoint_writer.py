"""Saving during a training: the devices are told that it is over when it can no longer be lost."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.server_world import Named, World, honest, train

from pipar.events import Event, Saved, SaveFailed
from pipar.execution.clock import run_virtually
from pipar.privacy.budget import PrivacyAccountant
from pipar.settings.config_file import config_from
from pipar.storage.checkpoint import Checkpoints, Disk, identity_of, latest
from pipar.storage.checkpoint_writer import CheckpointWriter
from pipar.storage.epoch_log import EpochLog
from pipar.storage.packed_rows import PackedRows
from pipar.wire.messages import EMPTY


class FullDisk(Disk):
    """A disk on which this number of writes fail."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def step(self) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, file: FileIO, data: memoryview) -> None:
        self.step()
        super().write(file, data)


class Folder:
    """A run's folder, as far as checkpoints need it, with a model on the same disk."""

    def __init__(self, disk: FullDisk) -> None:
        self.accountant = PrivacyAccountant(None)
        self.plans: dict[str, Any] = {}
        self.epochs = EpochLog()
        self.round_log = PackedRows()
        self.partly: dict[int, Any] = {}
        self.drawn: dict[str, int] = {}
        self.equivalence_reasons: tuple[str, ...] = ()
        self.models = 0
        self._disk = disk

    def write_model(self, _: object) -> None:
        self._disk.step()
        self.models += 1


class SlowLane:
    """A lane on which everything takes half a second."""

    async def run(self, step: tuple[object, Callable[[], Any]]) -> Any:
        await asyncio.sleep(0.5)
        return step[1]()


def writer(path: Path, disk: FullDisk, events: list[Event], *, every: int = 1) -> tuple[CheckpointWriter, Folder]:
    config, folder = config_from({"server": {"checkpoint_every": every}}), Folder(disk)
    job: Any = SimpleNamespace(config=config, sizes={})
    learner: Any = SimpleNamespace(snapshot=lambda: EMPTY, packed_state=lambda: EMPTY)
    lane, run_folder, checkpoints = cast(Any, SlowLane()), cast(Any, folder), Checkpoints(path, disk=disk)
    made = CheckpointWriter(checkpoints, learner, run_folder, job=lambda: job, lane=lane, observe=events.append)
    return made, folder


def watched(named: Named, over: Callable[[], None]) -> Named:
    """Return the device with a call when it was told that the training is over."""
    name, live = named

    async def life(world: World) -> None:
        await live(world)
        over()

    return name, life


@pytest.mark.parametrize("every", [1, 3, 0])
def test_devices_are_told_that_the_training_is_over_when_it_is_saved(tmp_path: Path, every: int) -> None:
    disk = FullDisk(0)
    events: list[Event] = []
    saved_then: list[int] = []
    checkpointer, folder = writer(tmp_path, disk, events, every=every)

    class FullAtTheEnd:
        save_if_due = checkpointer.save_if_due

        async def save_end(self, epoch: int) -> None:
            disk.failures = 9
            await checkpointer.save_end(epoch)

    def over() -> None:
        found = latest(tmp_path, identity_of(config_from({})), print)
        saved_then.append(folder.models if not every else 0 if found is None else found.round)

    outcome = train([watched(honest("a"), over), watched(honest("b"), over)], epochs=2, checkpointer=FullAtTheEnd())
    assert outcome.failure is None
    assert saved_then == ([1, 1] if not every else [2, 2])
    failed = [event.reason for event in events if isinstance(event, SaveFailed)]
    if every != 1:  # otherwise the last round is saved before its end
        assert sum("No space left on device" in reason for reason in failed) == 9
        assert sum("devices wait until it is saved" in reason for reason in failed) == 9


def run(main: Awaitable[None]) -> None:
    async def started() -> None:
        await main

    run_virtually(started())


def test_a_checkpoint_that_could_not_be_saved_is_tried_again_after_the_next_round(tmp_path: Path) -> None:
    disk = FullDisk(2)
    events: list[Event] = []
    checkpointer, _ = writer(tmp_path, disk, events, every=10)

    async def rounds() -> None:
        for epoch in range(1, 15):
            await checkpointer.save_if_due(epoch, last=False)
            await checkpointer.finish()

    run(rounds())
    assert [event.epoch for event in events if isinstance(event, SaveFailed)] == [10, 11]
    assert [event.epoch for event in events if isinstance(event, Saved)] == [12]


def test_a_server_that_is_stopped_while_its_disk_is_full_does_not_wait_for_space(tmp_path: Path) -> None:
    disk = FullDisk(1000)
    events: list[Event] = []
    checkpointer, _ = writer(tmp_path, disk, events)

    async def stopped() -> None:
        ending = asyncio.ensure_future(checkpointer.save_end(1))
        await asyncio.sleep(100.0)
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        tried, began_s = len(events), asyncio.get_running_loop().time()
        await checkpointer.save_if_due(1, last=True)
        await checkpointer.finish()
        assert len(events) == tried + 1
        assert asyncio.get_running_loop().time() - began_s < 5.0

    run(stopped())

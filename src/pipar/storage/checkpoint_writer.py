"""Saving a training behind its rounds, and finding it again: what a server needs to go on after a crash."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pipar.config import Config
from pipar.errors import CheckpointError
from pipar.events import Observer, Saved, SaveFailed
from pipar.execution.lanes import Lanes
from pipar.execution.stages import Work
from pipar.job.job import Job
from pipar.storage.checkpoint import Checkpoint, Checkpoints, identity_of, is_due
from pipar.storage.run_folder import RunFolder
from pipar.wire.messages import Body


class SupportsSnapshot(Protocol):
    """A learner whose state can be copied."""

    def snapshot(self) -> Body: ...


class CheckpointWriter:
    """Saves a checkpoint every few rounds. The copy is taken between two rounds, and written beside the next one."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        learner: SupportsSnapshot,
        folder: RunFolder,
        *,
        config: Config,
        job: Callable[[], Job],
        lane: Lanes,
        observe: Observer,
        done: int = 0,
    ) -> None:
        self._checkpoints = checkpoints
        self._learner = learner
        self._folder = folder
        self._config = config
        self._job = job
        self._lane = lane
        self._observe = observe
        self._saving: asyncio.Task[None] | None = None
        self._kept = done  # the last round that was copied
        self._kept_spent = folder.accountant.as_notes()

    async def keep(self, epoch: int, *, last: bool) -> None:
        """Save the state behind a round if that is due; returns when it is copied."""
        if last:  # a copy that cannot be saved is no reason not to try again
            await self.finish()
        every, spent = self._config.server.checkpoint_every, self._folder.accountant.as_notes()
        # Of a round that is not over, what devices have sent of it is to be known nevertheless.
        is_new = epoch > self._kept or (epoch == self._kept > 0 and spent != self._kept_spent)
        if not is_new or (not is_due(epoch, every) and not (last and every)):
            return
        self._kept, self._kept_spent = epoch, spent
        await self.finish()
        tensors = await self._lane.run((Work("save", epoch), self._learner.snapshot))
        job = self._job()
        checkpoint = Checkpoint(
            round=epoch,
            tensors=tensors,
            identity=identity_of(self._config),
            plans=dict(self._folder.plans),
            samples=dict(job.sizes),
            metrics=[result.to_dict() for result in self._folder.epochs],
            round_log=list(self._folder.round_log),
            notes={
                "partly": {str(number): taught for number, taught in self._folder.partly.items()},
                "spent": spent,
            },
        )
        self._saving = asyncio.get_running_loop().create_task(self._save(checkpoint))

    async def finish(self) -> None:
        """Return when what was copied is saved."""
        if self._saving is not None:
            await asyncio.shield(self._saving)

    async def _save(self, checkpoint: Checkpoint) -> None:
        work = Work("save", checkpoint.round, size_bytes=checkpoint.tensors.size_bytes)
        try:
            path: Path = await self._lane.run((work, lambda: self._checkpoints.save(checkpoint)))
        except CheckpointError as error:  # the training is worth more than its checkpoint
            self._kept = min(self._kept, checkpoint.round - 1)  # whoever asks again may find room
            self._observe(SaveFailed(checkpoint.round, str(error)))
        else:
            self._observe(Saved(checkpoint.round, str(path)))

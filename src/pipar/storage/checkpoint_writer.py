"""Saving checkpoints during training, so that a server can resume after a crash."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pipar.errors import CheckpointError, StorageError
from pipar.events import Observer, Saved, SaveFailed
from pipar.execution.lanes import Lanes
from pipar.execution.work import Work
from pipar.job.job import Job
from pipar.storage.checkpoint import Checkpoint, Checkpoints, identity_of, is_due
from pipar.storage.run_folder import RunFolder
from pipar.storage.whole_files import cannot_write, next_wait_s
from pipar.wire.messages import Body


class SupportsSnapshot(Protocol):
    """A learner that can copy its state, and its global model."""

    def snapshot(self) -> Body: ...

    def packed_state(self) -> Body: ...


class CheckpointWriter:
    """Saves a checkpoint every few rounds: copies the state between two rounds and writes it during the next one."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        learner: SupportsSnapshot,
        folder: RunFolder,
        *,
        job: Callable[[], Job],
        lane: Lanes,
        observe: Observer,
        done: int = 0,
    ) -> None:
        self._checkpoints = checkpoints
        self._learner = learner
        self._folder = folder
        self._job = job
        self._lane = lane
        self._observe = observe
        self._saving: asyncio.Task[None] | None = None
        self._copied = done  # the last round whose state was copied
        self._has_failed = False  # the last save did
        self._copied_spent = folder.accountant.as_notes()

    async def save_if_due(self, epoch: int, *, last: bool) -> None:
        """Save the state after a round if a checkpoint is due; return when the state is copied."""
        if last:  # if the copy before cannot be saved, this one is tried
            await self.finish()
        every, spent = self._job().config.server.checkpoint_every, self._folder.accountant.as_notes()
        # Privacy that devices have spent in an unfinished round is saved too.
        is_new = epoch > self._copied or (epoch == self._copied > 0 and spent != self._copied_spent)
        is_wanted = is_due(epoch, every) or (every > 0 and (last or self._has_failed))
        if not is_new or not is_wanted:
            return
        self._copied, self._copied_spent = epoch, spent
        await self.finish()
        tensors = await self._lane.run((Work("save", epoch), self._learner.snapshot))
        job = self._job()
        checkpoint = Checkpoint(
            round=epoch,
            tensors=tensors,
            identity=identity_of(job.config),
            plans=dict(self._folder.plans),
            samples=dict(job.sizes),
            metrics=self._folder.epochs.packed(),
            round_log=self._folder.round_log.copy(),
            notes={
                "partly": {str(number): taught for number, taught in self._folder.partly.items()},
                "spent": spent,
                **({"drawn": dict(self._folder.drawn)} if self._folder.drawn else {}),
                "equivalence_reasons": list(self._folder.equivalence_reasons),
            },
        )
        self._saving = asyncio.get_running_loop().create_task(self._save(checkpoint))

    async def save_end(self, epoch: int) -> None:
        """Return when the training after its last round can no longer be lost, however often that has to be tried.

        Without checkpoints it is the model that is saved.
        """
        wait_s = None
        while not await self._try_to_save_end(epoch):
            wait_s = next_wait_s(wait_s)
            self._observe(
                SaveFailed(
                    epoch,
                    f"The training is over, and its devices wait until it is saved. Next attempt: in {wait_s:g} s.",
                )
            )
            await asyncio.sleep(wait_s)

    async def _try_to_save_end(self, epoch: int) -> bool:
        if self._job().config.server.checkpoint_every:
            await self.save_if_due(epoch, last=True)
            await self.finish()
            return self._copied >= epoch
        try:
            await self._lane.run((Work("save", epoch), self._write_model))
        except StorageError as error:
            self._observe(SaveFailed(epoch, str(error)))
            return False
        return True

    def _write_model(self) -> None:
        try:
            self._folder.write_model(self._learner.packed_state())
        except OSError as error:
            raise StorageError(cannot_write("model.safetensors", error)) from None

    async def finish(self) -> None:
        """Return when the last copy is saved, or could not be."""
        if self._saving is not None:
            await asyncio.shield(self._saving)

    async def _save(self, checkpoint: Checkpoint) -> None:
        work = Work("save", checkpoint.round, size_bytes=checkpoint.tensors.size_bytes)
        try:
            path: Path = await self._lane.run((work, lambda: self._checkpoints.save(checkpoint)))
        except CheckpointError as error:  # the training continues without this checkpoint
            self._copied = min(self._copied, checkpoint.round - 1)  # there may be space when it is saved again
            self._has_failed = True
            self._observe(SaveFailed(checkpoint.round, str(error)))
        else:
            self._has_failed = False
            self._observe(Saved(checkpoint.round, str(path)))

"""The best global model of a training so far: on disk from its validation on, so that it takes no memory.

A file of the folder `best` is one model. Its name has the round and the validation loss, as in
`round-000012_0.4312.safetensors`: so both survive a crash together with the weights.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipar.storage.whole_files import PRIVATE, remove_partial_files, write_atomically
from pipar.wire.messages import EMPTY, Body

_NAME = re.compile(r"round-(\d{6,})_(.+)\.safetensors")


@dataclass(frozen=True, order=True)
class Kept:
    """One model that was the best of its time; of equal losses, the earlier model is the better one."""

    loss: float
    round: int
    model: Body = field(default=EMPTY, compare=False, repr=False)  # until it is written

    @property
    def name(self) -> str:
        return f"round-{self.round:06d}_{self.loss!r}.safetensors"


class BestModel:
    """Keeps the model with the lowest validation loss.

    A crash undoes the rounds after the last checkpoint, so the best model before them stays until `note_safe`. Of the
    rounds between two checkpoints, which are `every` rounds apart, only the best is needed.
    """

    def __init__(self, folder: Path, every: int = 1) -> None:
        self._folder = folder / "best"
        self._every = max(1, every)
        self._written = _found(self._folder)
        self._pending: Kept | None = None  # the best one, while the disk is full
        self._safe_round = 0.0
        self._failure: OSError | None = None
        remove_partial_files(self._folder)

    @property
    def best(self) -> Kept | None:
        """The best model so far; None before the first validation."""
        known = [*self._written.values(), *([] if self._pending is None else [self._pending])]
        return min(known, default=None)

    def start_over(self) -> None:
        """Forget the models of an earlier training in this folder."""
        self._forget(list(self._written))

    def resume(self, done: int) -> None:
        """Forget the models of rounds that are trained again."""
        self._forget([number for number in self._written if number > done])

    def offer(self, number: int, loss: float, model: Body) -> None:
        """Keep the global model of a round if its loss is the lowest so far; a full disk is tried again next time."""
        new = Kept(loss, number, model)
        if math.isfinite(loss) and (self.best is None or new < self.best):
            self._pending = new
        try:
            self.write()
        except OSError as error:
            self._failure = error
        self._forget_worse()

    def write(self) -> None:
        """Write the best model, if it is not on disk yet."""
        if self._pending is None:
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        write_atomically(self._folder / self._pending.name, *self._pending.model.buffers, mode=PRIVATE)
        self._written[self._pending.round] = Kept(self._pending.loss, self._pending.round)
        self._pending = None

    def note_safe(self, number: float) -> None:
        """No crash can undo the rounds up to this one."""
        # Files are removed at the next offer, in the thread that writes them.
        self._safe_round = max(self._safe_round, number)

    def read(self) -> Body | None:
        """Return the best model; None if there is none. Raises OSError if its file cannot be read."""
        best = self.best
        if best is None:
            return None
        return best.model if best is self._pending else _read(self._folder / best.name)

    def remove(self) -> None:
        """Remove all files: the training cannot be resumed, and its models are saved."""
        self.start_over()
        with suppress(OSError):  # a folder that stays does no harm
            self._folder.rmdir()

    def take_failure(self) -> OSError | None:
        """Return why the best model could not be written since this was last asked, if it could not."""
        failure, self._failure = self._failure, None
        return failure

    def _forget_worse(self) -> None:
        """Remove every model that no checkpoint needs any more."""
        groups: dict[float, list[Kept]] = {}
        for kept in self._written.values():
            safe = kept.round <= self._safe_round
            groups.setdefault(-1 if safe else (kept.round - 1) // self._every, []).append(kept)
        needed = {min(group).round for group in groups.values()}
        self._forget([number for number in self._written if number not in needed])

    def _forget(self, numbers: list[int]) -> None:
        for number in numbers:
            with suppress(OSError):  # an old file that stays does no harm
                (self._folder / self._written.pop(number).name).unlink(missing_ok=True)


def _found(folder: Path) -> dict[int, Kept]:
    """Return the models in a folder, by round."""
    try:
        names = [match for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) is not None]
    except OSError:
        return {}
    found = [Kept(loss, int(match[1])) for match in names if (loss := _number(match[2])) is not None]
    return {kept.round: kept for kept in found}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read(path: Path) -> Body:
    content = bytearray(path.stat().st_size)  # writable: tensors use it without a copy
    with path.open("rb") as file:
        file.readinto(content)
    return Body.of(content, encoding="safetensors")

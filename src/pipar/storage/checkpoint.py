"""Checkpoints: a training as it was when a round was over, to go on from. One file each, whole or not there at all.

A file is a header, JSON and the bytes of a safetensors file; `docs/checkpoints.md` describes them. Nothing here knows
of torch or of an event loop: saving may run in any thread, one checkpoint of a folder at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from pipar.config import Config
from pipar.errors import CheckpointError, InputError
from pipar.methods import Plan
from pipar.wire.messages import Body

MAGIC = b"PIPARCKP"
VERSION = 1

#: Magic, version, SHA-256 of all that follows it: the lengths of JSON and tensors, then these themselves.
_START = struct.Struct("<8sI32s")
_LENGTHS = struct.Struct("<QQ")
_HEADER_BYTES = _START.size + _LENGTHS.size
_NAME = re.compile(r"round-(\d{6,})\.pipar")
_PARTIAL = ".partial"
_NOISE = "noise on updates, by [privacy],"
#: What a checkpoint means that says nothing of it: it is of a version in which there was nothing else.
_BEFORE = {_NOISE: False}


@dataclass(frozen=True)
class Checkpoint:
    """A training right behind a round: all that the server needs to go on with the next one."""

    round: int  # the last one that is complete
    tensors: Body  # safetensors: what a learner's `snapshot` gives and its `restore` takes
    identity: Mapping[str, Any]  # of the training, by `identity_of`
    plans: Mapping[str, Plan]  # that are in force, by device
    samples: Mapping[str, int]  # that each device has
    metrics: Sequence[Mapping[str, Any]] = ()  # the results of the epochs that were complete, in order
    round_log: Sequence[Mapping[str, int]] = ()  # of each round: who counted, with how many samples
    notes: Mapping[str, Any] = field(default_factory=dict)  # what else is to be found again; JSON

    @property
    def trained_samples(self) -> int:
        """How many samples have gone into the global model."""
        return sum(sum(counted.values()) for counted in self.round_log)


def is_due(number: int, every: int) -> bool:
    """Say if a checkpoint is to be saved behind this round; `every` = 0 is never."""
    return every > 0 and number % every == 0


def identity_of(config: Config) -> dict[str, Any]:
    """Return what a training must have in common with a checkpoint to go on from it, by "section.key".

    Other devices, links, plans, learning rates or more epochs are the same training; another network, method, seed or
    other data is not: what is held out now may have been trained on.
    """
    sections = {
        "run": config.run.model_dump(mode="json", include={"method", "seed"}),
        "model": config.model.model_dump(mode="json"),
        "data": config.data.model_dump(mode="json", exclude={"path", "samples_per_device"}),
        "server": config.server.model_dump(mode="json", include={"aggregator", "aggregation"}),
    }
    identity = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    # Rounds without noise cannot be taken back, and no epsilon is true of them; how much there is of it may change.
    return {**identity, _NOISE: config.privacy.clips}


# --- saving


class Disk:
    """What saving asks of the file system, a method for each operation: where tests let it fail."""

    def make_folder(self, folder: Path) -> None:
        """Make a folder that stays, if it is not there."""
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            self.sync_folder(folder.parent)

    def create(self, path: Path) -> FileIO:
        return FileIO(path, "w")

    def write(self, file: FileIO, data: memoryview) -> None:
        while len(data):  # the system takes 2 GiB at a time
            data = data[file.write(data) :]

    def sync(self, file: FileIO) -> None:
        """Return when what was written has reached the disk."""
        os.fsync(file.fileno())

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def sync_folder(self, folder: Path) -> None:
        """Return when the names in a folder have reached the disk."""
        if os.name == "nt":  # folders cannot be opened there
            return
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        path.unlink()


class Checkpoints:
    """The checkpoints of one run, in a folder of their own; the last `keep` of them stay.

    Making one removes what a crash in the middle of saving has left behind, so only one process at a time may save to
    a folder. Reading, by `latest`, changes nothing and may happen at any time.
    """

    def __init__(self, folder: Path, keep: int = 3, disk: Disk | None = None) -> None:
        assert keep >= 1
        self.folder = folder
        self._keep = keep
        self._disk = disk or Disk()
        for partial in folder.glob(f".*{_PARTIAL}"):
            with contextlib.suppress(OSError):  # it is in nobody's way
                self._disk.remove(partial)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Save a checkpoint and return its file. When this returns, it outlives a loss of power.

        A CheckpointError says that it could not be saved, as on a full disk: what was saved before is still there.
        Files of later rounds are removed: they could not be read, or the training did not go on from them.
        """
        content = _content(checkpoint)
        path = self.folder / f"round-{checkpoint.round:06d}.pipar"
        partial = path.with_name(f".{path.name}{_PARTIAL}")
        try:
            self._disk.make_folder(self.folder)
            self._write(partial, [memoryview(content), *checkpoint.tensors.buffers], len(content))
            self._disk.rename(partial, path)
            self._disk.sync_folder(self.folder)
        except OSError as error:
            with contextlib.suppress(OSError):  # not there, or no longer under this name
                self._disk.remove(partial)
            raise CheckpointError(
                f"The checkpoint of round {checkpoint.round} could not be saved in {self.folder}: {_reason(error)}. "
                "Those before it are as they were."
            ) from error
        self._remove_others(checkpoint.round)
        return path

    def _write(self, partial: Path, buffers: list[memoryview], content_bytes: int) -> None:
        """Write a whole file, tensor by tensor from where they lie: a second copy of a model may not fit."""
        lengths = _LENGTHS.pack(content_bytes, sum(buffer.nbytes for buffer in buffers) - content_bytes)
        digest = hashlib.sha256(lengths)
        for buffer in buffers:
            digest.update(buffer)
        with contextlib.closing(self._disk.create(partial)) as file:
            header = _START.pack(MAGIC, VERSION, digest.digest()) + lengths
            for buffer in (memoryview(header), *buffers):
                self._disk.write(file, buffer)
            self._disk.sync(file)

    def _remove_others(self, saved: int) -> None:
        """Remove what is too old, and what is later than the round that was saved now."""
        try:
            rounds = sorted(_files(self.folder).items())
        except InputError:
            return  # it is saved; the next one tries again
        earlier = [path for number, path in rounds if number <= saved]
        later = [path for number, path in rounds if number > saved]
        for path in (*earlier[: -self._keep], *later):
            with contextlib.suppress(OSError):
                self._disk.remove(path)


def _content(checkpoint: Checkpoint) -> bytes:
    """Return everything but the tensors as JSON. A loss that is no number stays what it is, as Python writes it."""
    content = {
        "round": checkpoint.round,
        "identity": dict(checkpoint.identity),
        "plans": {name: asdict(plan) for name, plan in checkpoint.plans.items()},
        "samples": dict(checkpoint.samples),
        "metrics": [dict(epoch) for epoch in checkpoint.metrics],
        "round_log": [dict(counted) for counted in checkpoint.round_log],
        "notes": dict(checkpoint.notes),
    }
    return json.dumps(content).encode()


# --- reading


def latest(folder: Path, identity: Mapping[str, Any], warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint of a folder that is whole; None if there is none.

    One that is damaged is passed over, and `warn` gets a sentence that says so. One of another training than `identity`
    says is an InputError: going on from it is not what was meant.
    """
    for _, path in sorted(_files(folder).items(), reverse=True):
        try:
            checkpoint = read(path)
        except CheckpointError as error:
            warn(f"{error} It is passed over for the one before it.")
            continue
        _refuse_another_training(path, checkpoint.identity, identity)
        return checkpoint
    return None


def refuse_to_overwrite(folder: Path) -> None:
    """Raise if a folder has checkpoints: a training that starts anew would take their places."""
    files = _files(folder)
    if files:
        raise InputError(
            f"{folder} has checkpoints up to round {max(files)}: go on from them with --resume, give another run.name, "
            "or remove the folder."
        )


def read(path: Path) -> Checkpoint:
    """Return the checkpoint of a file; a CheckpointError says what is wrong with it."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(_HEADER_BYTES)
            content_bytes, tensor_bytes = _lengths(path, header, size)
            content, tensors = file.read(content_bytes), bytearray(tensor_bytes)  # tensors are to lie on it
            file.readinto(tensors)
    except OSError as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {_reason(error)}.") from None
    digest = hashlib.sha256(header[_START.size :])
    digest.update(content)
    digest.update(tensors)
    if digest.digest() != _START.unpack_from(header)[2]:
        raise CheckpointError(f"The checkpoint {path} is damaged: its checksum is not that of its content.")
    try:
        return _checkpoint(json.loads(content), tensors)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"The checkpoint {path} does not say what this version of pipar writes.") from None


def _lengths(path: Path, header: bytes, size: int) -> tuple[int, int]:
    """Return the lengths that a header says, if the file is as long as that: nothing longer is ever read."""
    if header[: len(MAGIC)] != MAGIC[: len(header)]:
        raise CheckpointError(f"The checkpoint {path} is damaged: it does not start like one.")
    if len(header) < _HEADER_BYTES:
        raise CheckpointError(f"The checkpoint {path} is damaged: it ends after {size} bytes.")
    _, version, _ = _START.unpack_from(header)
    if version != VERSION:
        raise CheckpointError(f"The checkpoint {path} is of version {version}; this pipar reads version {VERSION}.")
    content_bytes, tensor_bytes = _LENGTHS.unpack_from(header, _START.size)
    whole = _HEADER_BYTES + content_bytes + tensor_bytes
    if whole != size:
        raise CheckpointError(f"The checkpoint {path} is damaged: it has {size} bytes and should have {whole}.")
    return content_bytes, tensor_bytes


def _checkpoint(content: Mapping[str, Any], tensors: bytearray) -> Checkpoint:
    return Checkpoint(
        round=content["round"],
        tensors=Body.of(tensors, encoding="safetensors"),
        identity=content["identity"],
        plans={name: Plan(**plan) for name, plan in content["plans"].items()},
        samples=content["samples"],
        metrics=content["metrics"],
        round_log=content["round_log"],
        notes=content["notes"],
    )


def _refuse_another_training(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    theirs = {**_BEFORE, **theirs}
    # Any other key that the file does not know came with a later version, where its default is what was before.
    other = next((key for key in ours if key in theirs and theirs[key] != ours[key]), None)
    if other is not None:
        raise InputError(
            f"The checkpoint {path} is of another training: there {other} was {_written(theirs[other])}, and the "
            f"configuration says {_written(ours[other])}. Resume with the configuration that it was made with, or "
            "start anew without --resume."
        )


def _written(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)


def _files(folder: Path) -> dict[int, Path]:
    """Return the checkpoint files of a folder by round; a folder that is not there has none."""
    try:
        named = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"The checkpoints in {folder} cannot be read: {_reason(error)}.") from None
    return {int(match[1]): path for match, path in named if match is not None}


def _reason(error: OSError) -> str:
    return error.strerror or str(error)

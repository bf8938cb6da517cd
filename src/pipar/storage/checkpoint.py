"""The format of checkpoints: the state of a training at the end of a round, one file each, complete or absent.

A file is a header, JSON and the bytes of a safetensors file; `docs/checkpoints.md` describes them. This module uses
neither torch nor an event loop: saving may run in any thread, one checkpoint of a folder at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from pipar.errors import CheckpointError, InputError, UnknownCheckpointError
from pipar.methods import Plan
from pipar.settings.config import Config
from pipar.storage.packed_rows import PackedRows
from pipar.storage.whole_files import PRIVATE
from pipar.wire.messages import Body

MAGIC = b"PIPARCKP"
VERSION = 2
#: Version 1 differs only in that it had the rows of all rounds as they are, and not packed.
_READ = (1, VERSION)

#: Magic, version, SHA-256 of everything after it: the lengths of the JSON and of the tensors, then both of them.
_START = struct.Struct("<8sI32s")
_LENGTHS = struct.Struct("<QQ")
_HEADER_BYTES = _START.size + _LENGTHS.size
_NAME = re.compile(r"round-(\d{6,})\.pipar")
_PARTIAL = ".partial"
_UNREAD = ".unread"  # appended to the name of a file that could not be read, and is kept
_NOISE = "noise on updates, by [privacy],"
#: Values for keys that a checkpoint of an earlier version lacks: what that version did.
_BEFORE = {_NOISE: False}


@dataclass(frozen=True)
class Checkpoint:
    """The state of a training after a round: everything that the server needs to continue with the next one."""

    round: int  # the last complete one
    tensors: Body  # safetensors: from a learner's `snapshot`, for its `restore`
    identity: Mapping[str, Any]  # of the training, by `identity_of`
    plans: Mapping[str, Plan]  # in use, by device
    samples: Mapping[str, int]  # number of them, by device
    metrics: PackedRows = field(default_factory=PackedRows)  # the results of the complete epochs, in order
    round_log: PackedRows = field(default_factory=PackedRows)  # for each round: samples by device that counted
    notes: Mapping[str, Any] = field(default_factory=dict)  # further state of the server; JSON


def is_due(number: int, every: int) -> bool:
    """Return whether a checkpoint is saved after this round; `every` = 0 means never."""
    return every > 0 and number % every == 0


def identity_of(config: Config) -> dict[str, Any]:
    """Return the settings that a training must share with a checkpoint to resume from it, by "section.key".

    Devices, links, plans, learning rates and the number of epochs may differ. The network, method, seed, data
    and loss may not: with other data, samples that are held out now may have been trained on, and the values of
    different losses cannot be compared to find the best model. `data.inputs` only describes the data.
    """
    sections = {
        "run": config.run.model_dump(mode="json", include={"method", "seed", "monitor"}),
        "model": config.model.model_dump(mode="json"),
        "data": config.data.model_dump(mode="json", exclude={"path", "samples_per_device", "inputs"}),
        "server": config.server.model_dump(mode="json", include={"aggregator", "aggregation"}),
        "task": config.task.trained,
    }
    identity = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    # Rounds without noise cannot be undone and have no finite epsilon. The amount of noise may change.
    return {**identity, _NOISE: config.privacy.clips}


# --- saving


class Disk:
    """The file system operations of saving and reading, one method each, so that tests can make each one fail."""

    def make_folder(self, folder: Path) -> None:
        """Make a folder if it is missing, so that it survives a loss of power."""
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            self.sync_folder(folder.parent)

    def open(self, path: Path) -> BufferedReader:
        return path.open("rb")

    def create(self, path: Path) -> FileIO:
        return FileIO(path, "w", opener=lambda name, flags: os.open(name, flags, PRIVATE))

    def write(self, file: FileIO, data: memoryview) -> None:
        while len(data):  # one call writes at most 2 GiB
            data = data[file.write(data) :]

    def sync(self, file: FileIO) -> None:
        """Return when the written bytes have reached the disk."""
        os.fsync(file.fileno())

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def sync_folder(self, folder: Path) -> None:
        """Return when the names in a folder have reached the disk."""
        if os.name == "nt":  # Windows cannot open folders
            return
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        path.unlink()


class Checkpoints:
    """The checkpoints of one run, in a separate folder; only the last `keep` of them are kept.

    The constructor removes partial files that a crash has left, so only one process at a time may save to a folder.
    Reading, by `latest`, changes nothing and may happen at any time.
    """

    def __init__(self, folder: Path, keep: int = 3, disk: Disk | None = None) -> None:
        assert keep >= 1
        self.folder = folder
        self._keep = keep
        self._disk = disk or Disk()
        self._saved: set[int] = set()  # rounds of files that this object has written
        for partial in folder.glob(f".*{_PARTIAL}"):
            with contextlib.suppress(OSError):  # a partial file that stays does no harm
                self._disk.remove(partial)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Save a checkpoint and return its file. When this returns, it survives a loss of power.

        Raises CheckpointError if it cannot be saved, for example on a full disk; earlier checkpoints are kept then.
        Files of later rounds are removed if they can be read: the training did not resume from them. A file that cannot
        be read is neither removed nor replaced, but renamed.
        """
        content = _content(checkpoint)
        path = self.folder / f"round-{checkpoint.round:06d}.pipar"
        partial = path.with_name(f".{path.name}{_PARTIAL}")
        try:
            self._disk.make_folder(self.folder)
            self._set_unread_aside(checkpoint.round)
            self._write(partial, [memoryview(content), *checkpoint.tensors.buffers], len(content))
            self._disk.rename(partial, path)
            self._disk.sync_folder(self.folder)
        except (OSError, InputError) as error:
            with contextlib.suppress(OSError):  # it was not created, or is renamed already
                self._disk.remove(partial)
            why = _reason(error) if isinstance(error, OSError) else "its folder cannot be read"
            raise CheckpointError(
                f"The checkpoint of round {checkpoint.round} could not be saved in {self.folder}: {why}. "
                "Earlier checkpoints are kept. Make sure that the folder can be written and has enough space."
            ) from error
        self._saved.add(checkpoint.round)
        self._remove_others(checkpoint.round)
        return path

    def _set_unread_aside(self, first: int) -> None:
        """Rename files from this round on that cannot be read, before they are replaced or removed."""
        for number, path in _files(self.folder).items():
            if number >= first:
                self._set_aside_if_unread(number, path)

    def _set_aside_if_unread(self, number: int, path: Path) -> bool:
        """Rename a checkpoint that this process has not written and cannot read; return whether it was one."""
        if number in self._saved or _can_be_read(path, self._disk):
            return False
        self._disk.rename(path, _unused(path.with_name(path.name + _UNREAD)))
        return True

    def _write(self, partial: Path, buffers: list[memoryview], content_bytes: int) -> None:
        """Write a whole file, tensor by tensor without copying: a second copy of a model may not fit into memory."""
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
        """Remove checkpoints that are too old, and those of rounds after the one just saved."""
        try:
            rounds = sorted(_files(self.folder).items())
        except InputError:
            return  # the checkpoint itself is saved; the next one removes these
        earlier = [(number, path) for number, path in rounds if number <= saved]
        later = [(number, path) for number, path in rounds if number > saved]
        for number, path in (*earlier[: -self._keep], *later):
            with contextlib.suppress(OSError):
                if not self._set_aside_if_unread(number, path):
                    self._disk.remove(path)


def _content(checkpoint: Checkpoint) -> bytes:
    """Return everything but the tensors as JSON. A loss that is not finite is written as Python writes it (NaN)."""
    content = {
        "round": checkpoint.round,
        "identity": dict(checkpoint.identity),
        "plans": {name: asdict(plan) for name, plan in checkpoint.plans.items()},
        "samples": dict(checkpoint.samples),
        "metrics": checkpoint.metrics.to_json(),
        "round_log": checkpoint.round_log.to_json(),
        "notes": dict(checkpoint.notes),
    }
    return json.dumps(content).encode()


# --- reading


def latest(
    folder: Path, identity: Mapping[str, Any], warn: Callable[[str], None], disk: Disk | None = None
) -> Checkpoint | None:
    """Return the newest undamaged checkpoint of a folder; None if the folder has none. No file is changed.

    Damaged ones are skipped, and `warn` gets a sentence about each. Raises InputError if all are damaged, if the newest
    undamaged one belongs to a training with another `identity`, or if one before it is not known to be damaged but
    cannot be read: starting earlier than necessary would lose its rounds.
    """
    files, damaged = _files(folder), []
    for _, path in sorted(files.items(), reverse=True):
        try:
            checkpoint = read(path, disk)
        except UnknownCheckpointError as error:
            raise InputError(str(error)) from None
        except CheckpointError as error:
            damaged.append(error)
            continue
        _refuse_another_training(path, checkpoint.identity, identity)
        for one in damaged:
            warn(f"{one} It is skipped, and the one before it is used.")
        return checkpoint
    if damaged:
        raise InputError(
            f"None of the {len(files)} checkpoints in {folder} can be used: {damaged[0]} Restore one from a backup, or "
            "give another run.name to train from the first round."
        )
    return None


def refuse_to_overwrite(folder: Path) -> None:
    """Raise InputError if a folder has checkpoints, which a new training would overwrite."""
    files = _files(folder)
    if files:
        raise InputError(
            f"{folder} has checkpoints up to round {max(files)}: resume from them with --resume, give another "
            "run.name, or remove the folder."
        )


def read(path: Path, disk: Disk | None = None) -> Checkpoint:
    """Return the checkpoint of a file.

    Raises CheckpointError if the file is damaged, and UnknownCheckpointError if it may be intact but cannot be read.
    """
    try:
        with (disk or Disk()).open(path) as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(_HEADER_BYTES)
            content_bytes, tensor_bytes = _lengths(path, header, size)
            content, tensors = (
                file.read(content_bytes),
                bytearray(tensor_bytes),
            )  # writable: the tensors use it without a copy
            file.readinto(tensors)
    except OSError as error:
        raise UnknownCheckpointError(
            f"The checkpoint {path} cannot be read: {_reason(error)}. No file was changed. Make it readable for this "
            "user, or move it away to resume from the one before it."
        ) from None
    digest = hashlib.sha256(header[_START.size :])
    digest.update(content)
    digest.update(tensors)
    if digest.digest() != _START.unpack_from(header)[2]:
        raise CheckpointError(f"The checkpoint {path} is damaged: its checksum does not match its content.")
    try:
        return _checkpoint(json.loads(content), tensors)
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error):
        raise UnknownCheckpointError(
            f"The checkpoint {path} lacks fields that this version of pipar needs. Resume with the version of pipar "
            "that wrote it."
        ) from None


def _can_be_read(path: Path, disk: Disk) -> bool:
    try:
        read(path, disk)
    except CheckpointError:
        return False
    return True


def _unused(path: Path) -> Path:
    """Return the path, with a number appended if it is taken."""
    number = 1
    while (free := path if number == 1 else path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return free


def _lengths(path: Path, header: bytes, size: int) -> tuple[int, int]:
    """Return the lengths of JSON and tensors from a header, if they match the file's size, so that no more is read."""
    if header[: len(MAGIC)] != MAGIC[: len(header)]:
        raise CheckpointError(f"The checkpoint {path} is damaged: it does not start like a checkpoint.")
    if len(header) < _HEADER_BYTES:
        raise CheckpointError(f"The checkpoint {path} is damaged: it ends after {size} bytes.")
    _, version, _ = _START.unpack_from(header)
    if version not in _READ:
        raise UnknownCheckpointError(
            f"The checkpoint {path} has format version {version}; this pipar reads version {VERSION}. Resume with the "
            "version of pipar that wrote it."
        )
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
        metrics=PackedRows.read(content["metrics"]),
        round_log=PackedRows.read(content["round_log"]),
        notes=content["notes"],
    )


def _refuse_another_training(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    theirs = {**_BEFORE, **theirs}
    # Other keys that the file lacks came with a later version; their defaults do what the earlier version did.
    other = next((key for key in ours if key in theirs and theirs[key] != ours[key]), None)
    if other is not None:
        raise InputError(
            f"The checkpoint {path} belongs to another training: there {other} was {_written(theirs[other])}, and the "
            f"configuration says {_written(ours[other])}. Resume with the configuration that it was made with, or give "
            "another run.name and start without --resume."
        )


def _written(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)


def _files(folder: Path) -> dict[int, Path]:
    """Return the checkpoint files of a folder by round; none if the folder is missing."""
    try:
        named = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"The checkpoints in {folder} cannot be read: {_reason(error)}.") from None
    return {int(match[1]): path for match, path in named if match is not None}


def _reason(error: OSError) -> str:
    return error.strerror or str(error)

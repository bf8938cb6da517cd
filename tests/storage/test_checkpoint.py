"""Checkpoints: each is complete or absent, whatever happens while it is saved."""

from __future__ import annotations

import errno
import json
import os
import random
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from pipar.errors import CheckpointError, ConfigError, InputError
from pipar.methods import Plan
from pipar.settings.config_file import config_from
from pipar.storage.checkpoint import (
    VERSION,
    Checkpoint,
    Checkpoints,
    Disk,
    _content,
    identity_of,
    is_due,
    latest,
    read,
    refuse_to_overwrite,
)
from pipar.storage.packed_rows import PackedRows
from pipar.wire.messages import Body

IDENTITY = identity_of(config_from({}))


def checkpoint(number: int) -> Checkpoint:
    """Return a checkpoint in which every part depends on its round."""
    return Checkpoint(
        round=number,
        tensors=Body.of(b"tensors of", bytes([number]) * 300, encoding="safetensors"),
        identity=IDENTITY,
        plans={"phone-1": Plan(2, 3), "phone-2": Plan(1, 4, window=2)},
        samples={"phone-1": 230, "phone-2": 57},
        metrics=PackedRows({"epoch": epoch, "train_loss": 1 / epoch, "val_loss": None} for epoch in range(1, number)),
        round_log=PackedRows({"phone-1": 230, "phone-2": 57} for _ in range(number)),
        notes={"elapsed_s": 1.5},
    )


def refuse_warnings(sentence: str) -> None:
    raise AssertionError(sentence)


def newest(folder: Path, warn: Callable[[str], None] = refuse_warnings) -> Checkpoint | None:
    return latest(folder, IDENTITY, warn)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same(one: Checkpoint | None, other: Checkpoint) -> bool:
    """Return whether two checkpoints are equal; their tensors may be divided into different buffers."""
    return one is not None and replace(one, tensors=Body.of(one.tensors.contiguous(), encoding="safetensors")) == (
        replace(other, tensors=Body.of(other.tensors.contiguous(), encoding="safetensors"))
    )


# --- saving and reading


def test_a_saved_checkpoint_reads_back_equal(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path / "checkpoint").save(checkpoint(12))
    assert path.name == "round-000012.pipar"
    assert path.stat().st_mode & 0o777 == 0o600
    found = newest(tmp_path / "checkpoint")
    assert same(found, checkpoint(12))


def test_a_missing_or_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert newest(tmp_path / "nowhere") is None
    assert newest(tmp_path) is None


def test_a_loss_that_is_not_a_number_reads_back(tmp_path: Path) -> None:
    diverged = [{"epoch": 1, "train_loss": float("inf"), "val_loss": float("nan")}]
    Checkpoints(tmp_path).save(replace(checkpoint(1), metrics=PackedRows(diverged)))
    found = newest(tmp_path)
    assert found is not None
    assert str(list(found.metrics)) == str(diverged)


def test_a_checkpoint_of_the_first_version_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = checkpoint(3)
    content = json.loads(_content(given)) | {"metrics": list(given.metrics), "round_log": list(given.round_log)}
    monkeypatch.setattr("pipar.storage.checkpoint._content", lambda _: json.dumps(content).encode())
    monkeypatch.setattr("pipar.storage.checkpoint.VERSION", 1)
    Checkpoints(tmp_path).save(given)
    monkeypatch.undo()
    assert same(newest(tmp_path), given)


def test_checkpoints_grow_little_with_the_number_of_rounds() -> None:
    sizes = {f"raspberry-pi-{number}": 100 + number for number in range(20)}
    bytes_sent = {name: [1_000_000 + size, 2_000_000 + size] for name, size in sizes.items()}
    metrics = PackedRows({"epoch": n, "loss": 1 / n, "device_bytes": bytes_sent} for n in range(1, 2001))
    rounds = PackedRows(sizes for _ in range(2000))
    assert len(_content(replace(checkpoint(1), metrics=metrics, round_log=rounds))) < 100 * 2000


def test_the_last_checkpoints_are_kept_and_the_newest_is_found_by_its_number(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=2)
    for number in (1, 2, 999_999, 1_000_000):
        store.save(checkpoint(number % 100) if number < 100 else replace(checkpoint(0), round=number))
    assert names(tmp_path) == ["round-1000000.pipar", "round-999999.pipar"]
    found = newest(tmp_path)
    assert found is not None
    assert found.round == 1_000_000


@pytest.mark.parametrize("keep", [1, 2])
def test_after_resuming_from_an_earlier_round_later_files_are_removed(tmp_path: Path, keep: int) -> None:
    store = Checkpoints(tmp_path, keep=keep)
    for number in range(1, 6):
        Checkpoints(tmp_path, keep=9).save(checkpoint(number))
    store.save(checkpoint(3))
    assert same(newest(tmp_path), checkpoint(3))
    assert len(names(tmp_path)) == keep


def test_saving_needs_no_event_loop_and_may_run_in_another_thread(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(Checkpoints(tmp_path).save, checkpoint(1)).result()
    assert same(newest(tmp_path), checkpoint(1))


def test_tensors_are_written_without_a_copy(tmp_path: Path) -> None:
    written: list[memoryview] = []

    class WatchedDisk(Disk):
        def write(self, file: FileIO, data: memoryview) -> None:
            written.append(data)
            super().write(file, data)

    given = checkpoint(1)
    Checkpoints(tmp_path, disk=WatchedDisk()).save(given)
    assert [id(data.obj) for data in written[-2:]] == [id(buffer.obj) for buffer in given.tensors.buffers]


def test_a_write_that_the_system_divides_is_complete(tmp_path: Path) -> None:
    class Reluctant(FileIO):
        def write(self, data: Any) -> int:
            return super().write(memoryview(data)[:7])

    class ReluctantDisk(Disk):
        def create(self, path: Path) -> FileIO:
            return Reluctant(path, "w")

    Checkpoints(tmp_path, disk=ReluctantDisk()).save(checkpoint(1))
    assert same(newest(tmp_path), checkpoint(1))


def test_a_new_training_is_refused_in_a_folder_with_checkpoints(tmp_path: Path) -> None:
    refuse_to_overwrite(tmp_path / "nowhere")
    refuse_to_overwrite(tmp_path)
    Checkpoints(tmp_path).save(checkpoint(12))
    with pytest.raises(InputError, match="has checkpoints up to round 12: resume from them with --resume"):
        refuse_to_overwrite(tmp_path)


def test_a_file_with_another_name_is_not_a_checkpoint(tmp_path: Path) -> None:
    for name in ("round-1.pipar", "round-000001.pipar.bak", "notes.txt"):
        (tmp_path / name).write_bytes(b"mine")
    Checkpoints(tmp_path, keep=1).save(checkpoint(1))
    Checkpoints(tmp_path, keep=1).save(checkpoint(2))
    assert names(tmp_path) == ["notes.txt", "round-000001.pipar.bak", "round-000002.pipar", "round-1.pipar"]


# --- damaged files


def test_a_damaged_file_is_skipped_and_the_one_before_is_used(tmp_path: Path) -> None:
    paths = [Checkpoints(tmp_path).save(checkpoint(number)) for number in (1, 2, 3)]
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    paths[1].write_bytes(b"")
    warnings: list[str] = []
    assert same(newest(tmp_path, warnings.append), checkpoint(1))
    assert ["round-000003" in warnings[0], "round-000002" in warnings[1], len(warnings)] == [True, True, 2]
    assert all("\n" not in sentence for sentence in warnings)


def test_every_byte_counts(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(checkpoint(2))
    whole = path.read_bytes()
    chance = random.Random(0)
    header = range(60)
    for place in (*header, *chance.sample(range(60, len(whole)), 100)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            read(path)
    path.write_bytes(whole)
    assert same(read(path), checkpoint(2))


def test_a_file_that_is_too_short_or_too_long_is_damaged(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(checkpoint(2))
    whole = path.read_bytes()
    for other in (*(whole[:length] for length in range(0, len(whole), 13)), whole + b"\0"):
        path.write_bytes(other)
        with pytest.raises(CheckpointError, match="is damaged"):
            read(path)


def test_a_length_beyond_the_file_is_never_allocated(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(checkpoint(2))
    damaged = bytearray(path.read_bytes())
    struct.pack_into("<Q", damaged, 52, 2**62)
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"it has \d+ bytes and should have 46\d+"):
        read(path)


def of_another_version(path: Path) -> None:
    newer = bytearray(path.read_bytes())
    struct.pack_into("<I", newer, 8, VERSION + 1)
    path.write_bytes(newer)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("earlier", [(), (1,)], ids=["alone", "after a readable one"])
def test_a_checkpoint_of_another_version_is_refused_and_stays(tmp_path: Path, earlier: tuple[int, ...]) -> None:
    paths = [Checkpoints(tmp_path).save(checkpoint(number)) for number in (*earlier, 2)]
    of_another_version(paths[-1])
    before = contents(tmp_path)
    says = f"has format version {VERSION + 1}; this pipar reads version {VERSION}. Resume with the version of pipar"
    with pytest.raises(InputError, match=says):
        newest(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_checkpoint_that_the_system_does_not_read_is_refused_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    for number in (1, 2):
        Checkpoints(tmp_path).save(checkpoint(number))
    before, really_open = contents(tmp_path), Path.open

    def failing(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "round-000002.pipar":
            raise OSError(code, os.strerror(code))
        return really_open(path, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", failing)
        with pytest.raises(InputError, match=f"cannot be read: {os.strerror(code)}. No file was changed.*move it away"):
            newest(tmp_path)
    assert contents(tmp_path) == before
    assert same(newest(tmp_path), checkpoint(2))


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(checkpoint(1))
    (tmp_path / "round-000002.pipar").mkdir()
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        newest(tmp_path)


def test_a_training_whose_checkpoints_are_all_damaged_does_not_start_at_round_1(tmp_path: Path) -> None:
    for number in (1, 2):
        path = Checkpoints(tmp_path).save(checkpoint(number))
        path.write_bytes(path.read_bytes()[:-1])
    before = contents(tmp_path)
    with pytest.raises(InputError, match=r"None of the 2 checkpoints in .* can be used: .*round-000002.* is damaged"):
        newest(tmp_path)
    assert contents(tmp_path) == before


def test_saving_replaces_or_removes_no_file_that_it_cannot_read(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, keep=1)
    for number in range(1, 5):
        Checkpoints(tmp_path, keep=9).save(checkpoint(number))
    of_another_version(tmp_path / "round-000004.pipar")
    for number in (2, 3):
        path = tmp_path / f"round-{number:06d}.pipar"
        path.write_bytes(path.read_bytes()[:-1])
    unread = {content for name, content in contents(tmp_path).items() if name != "round-000001.pipar"}
    for number in (2, 3, 4, 5):
        store.save(checkpoint(number))
    assert unread <= set(contents(tmp_path).values())
    assert names(tmp_path) == [*(f"round-{number:06d}.pipar.unread" for number in (2, 3, 4)), "round-000005.pipar"]


def test_a_second_file_of_a_round_that_cannot_be_read_replaces_no_other(tmp_path: Path) -> None:
    for _ in range(2):
        of_another_version(Checkpoints(tmp_path).save(checkpoint(1)))
    Checkpoints(tmp_path).save(checkpoint(1))
    assert names(tmp_path) == ["round-000001.pipar", "round-000001.pipar.unread", "round-000001.pipar.unread-2"]
    assert same(newest(tmp_path), checkpoint(1))


def test_a_file_that_cannot_be_set_aside_is_not_replaced(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(checkpoint(2))
    of_another_version(path)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="round 2 could not be saved"):
        Checkpoints(tmp_path, disk=FullDisk("rename")).save(checkpoint(2))
    assert contents(tmp_path) == before


def test_unexpected_content_is_reported_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (b"[]", b"{", b"{}", b'{"round": 1}', json.dumps({"plans": {"a": 1}}).encode(), b"\xff"):
        monkeypatch.setattr("pipar.storage.checkpoint._content", lambda _, content=content: content)
        path = Checkpoints(tmp_path).save(checkpoint(1))
        with pytest.raises(CheckpointError, match="lacks fields that this version of pipar needs"):
            read(path)


# --- another training


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"model": {"name": "vgg16"}}, 'there model.name was "vgg5", and the configuration says "vgg16"'),
        ({"model": {"dtype": "float64"}}, 'there model.dtype was "float32"'),
        (
            {"model": {"factory": "own:model"}},
            'there model.factory was not set, and the configuration says "own:model"',
        ),
        ({"run": {"method": "fl"}}, 'there run.method was "pipar"'),
        ({"run": {"seed": 1}}, "there run.seed was 0"),
        ({"data": {"name": "synthetic"}}, 'there data.name was "digits"'),
        ({"task": {"label_smoothing": 0.1}}, "there task.label_smoothing was 0.0, and the configuration says 0.1"),
        ({"run": {"monitor": "f1"}}, 'there run.monitor was "val_loss", and the configuration says "f1"'),
        ({"task": {"loss": "nll"}}, 'there task.loss was "cross_entropy"'),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path, tree: dict[str, Any], says: str) -> None:
    Checkpoints(tmp_path).save(checkpoint(1))
    with pytest.raises(InputError) as raised:
        latest(tmp_path, identity_of(config_from(tree)), refuse_warnings)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "tree",
    [
        {"run": {"epochs": 50, "name": "again"}},
        {"optimizer": {"learning_rate": 0.001}},
        {"data": {"path": "elsewhere"}},
        {"plan": {"split_point": 2}},
        {"task": {"metrics": ["accuracy"]}},
        {"devices": [{"name": "other", "count": 9}]},
    ],
)
def test_a_resumed_training_may_last_longer_and_have_other_devices(tmp_path: Path, tree: dict[str, Any]) -> None:
    Checkpoints(tmp_path).save(checkpoint(1))
    assert same(latest(tmp_path, identity_of(config_from(tree)), refuse_warnings), checkpoint(1))


def test_identity_survives_json_and_a_key_of_a_later_version(tmp_path: Path) -> None:
    identity = identity_of(config_from({"data": {"name": "synthetic", "shape": [3, 8, 8]}}))
    Checkpoints(tmp_path).save(replace(checkpoint(1), identity=identity))
    assert latest(tmp_path, {**identity, "model.flavour": "new"}, refuse_warnings) is not None


def test_a_checkpoint_that_does_not_know_its_task_is_resumed(tmp_path: Path) -> None:
    before = {key: value for key, value in IDENTITY.items() if not key.startswith("task.")}
    Checkpoints(tmp_path).save(replace(checkpoint(1), identity=before))
    assert latest(tmp_path, identity_of(config_from({"task": {"loss": "nll"}})), refuse_warnings) is not None


def test_a_training_with_noise_does_not_resume_from_a_version_without_it(tmp_path: Path) -> None:
    config = config_from({"privacy": {"noise_multiplier": 1.0}})
    before = {key: value for key, value in IDENTITY.items() if not key.startswith("noise")}
    Checkpoints(tmp_path).save(replace(checkpoint(1), identity=before))
    with pytest.raises(InputError, match=r"there noise on updates, by \[privacy\], was false"):
        latest(tmp_path, identity_of(config), refuse_warnings)
    assert latest(tmp_path, IDENTITY, refuse_warnings) is not None


# --- a full disk


class FullDisk(Disk):
    """A disk that is full from the n-th operation of one kind on."""

    def __init__(self, step: str, number: int = 1) -> None:
        self._step, self._left = step, number

    def __getattribute__(self, name: str) -> Any:
        get = super().__getattribute__
        if name == get("_step"):
            self._left = get("_left") - 1
            if get("_left") <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return get(name)


STEPS = [
    ("make_folder", 1),
    ("create", 1),
    *(("write", number) for number in range(1, 5)),
    ("sync", 1),
    ("rename", 1),
    ("sync_folder", 1),
]


@pytest.mark.parametrize(("step", "number"), STEPS, ids=lambda value: str(value))
def test_a_full_disk_leaves_earlier_checkpoints_intact(tmp_path: Path, step: str, number: int) -> None:
    for earlier in (1, 2, 3):
        Checkpoints(tmp_path, keep=3).save(checkpoint(earlier))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match=r"round 4 could not be saved in .*: No space left on device\. Earlier"):
        Checkpoints(tmp_path, keep=3, disk=FullDisk(step, number)).save(checkpoint(4))
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name: after.get(name) for name in before} == before
    assert set(after) - set(before) == ({"round-000004.pipar"} if step == "sync_folder" else set())
    Checkpoints(tmp_path, keep=3).save(checkpoint(5))
    assert same(newest(tmp_path), checkpoint(5))


def test_an_old_file_that_cannot_be_removed_is_ignored(tmp_path: Path) -> None:
    for number in (1, 2):
        Checkpoints(tmp_path, keep=1, disk=FullDisk("remove")).save(checkpoint(number))
    assert len(names(tmp_path)) == 2
    Checkpoints(tmp_path, keep=1).save(checkpoint(3))
    assert names(tmp_path) == ["round-000003.pipar"]


# --- a loss of power


class PowerLossError(BaseException):
    """Raised instead of a loss of power: no code may run after it, not even a clean-up."""


class FailingDisk(Disk):
    """A disk that loses power after some operations.

    Of bytes that were not synced, those from a random position on are lost; so are the last changes of names in a
    folder that was not synced.
    """

    def __init__(self, operations: int, chance: random.Random) -> None:
        self._left = operations
        self._chance = chance
        self._off = False
        self._not_synced: set[Path] = set()
        self._undo: list[Callable[[], None]] = []

    def _operate(self) -> None:
        if self._left == 0:
            self.lose_power()
        self._left -= 1

    def lose_power(self) -> None:
        if not self._off:
            self._off = True
            for undo in reversed(self._undo[self._chance.randrange(len(self._undo) + 1) :]):
                undo()
            for path in self._not_synced:
                if path.exists():
                    os.truncate(path, self._chance.randrange(path.stat().st_size + 1))
        raise PowerLossError

    def make_folder(self, folder: Path) -> None:
        self._operate()
        folder.mkdir(exist_ok=True)

    def create(self, path: Path) -> FileIO:
        self._operate()
        self._undo.append(lambda: path.unlink())
        self._not_synced.add(path)
        return super().create(path)

    def write(self, file: FileIO, data: memoryview) -> None:
        if self._left == 0:
            super().write(file, data[: self._chance.randrange(len(data))])
        self._operate()
        super().write(file, data)

    def sync(self, file: FileIO) -> None:
        self._operate()
        self._not_synced.discard(Path(str(file.name)))

    def rename(self, source: Path, target: Path) -> None:
        self._operate()
        replaced = target.read_bytes() if target.exists() else None

        def undo() -> None:
            target.rename(source)
            self._move(target, source)
            if replaced is not None:
                target.write_bytes(replaced)

        super().rename(source, target)
        self._move(source, target)
        self._undo.append(undo)

    def _move(self, source: Path, target: Path) -> None:
        if source in self._not_synced:
            self._not_synced.remove(source)
            self._not_synced.add(target)

    def sync_folder(self, folder: Path) -> None:  # noqa: ARG002
        self._operate()
        self._undo.clear()

    def remove(self, path: Path) -> None:
        self._operate()
        content = path.read_bytes()
        super().remove(path)
        self._undo.append(lambda: path.write_bytes(content) and None)


def save_until_power_is_lost(store: Checkpoints, disk: FailingDisk, number: int) -> bool:
    """Save one more checkpoint and lose power before, during or after it; return whether it was saved before that."""
    saved = False
    try:
        store.save(checkpoint(number))
        saved = True
        disk.lose_power()
    except PowerLossError:
        return saved
    raise AssertionError("power was not lost")


class SlipshodDisk(Disk):
    """A disk that does not wait for syncs: power is not lost while it saves, and hundreds of syncs are slow."""

    def sync(self, file: FileIO) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


#: From before the first to after the last: folder, file, four buffers, sync, rename, folder, one removed file.
OPERATIONS = range(12)


@pytest.mark.parametrize("operations", OPERATIONS)
def test_after_a_loss_of_power_the_last_checkpoint_or_the_one_before_is_complete(
    tmp_path: Path, operations: int
) -> None:
    for seed in range(20):
        chance = random.Random(100 * operations + seed)
        folder, keep, before = tmp_path / f"{seed}", chance.randint(1, 3), chance.randint(0, 4)
        for number in range(1, before + 1):
            Checkpoints(folder, keep, SlipshodDisk()).save(checkpoint(number))
        disk = FailingDisk(operations, chance)
        saved = save_until_power_is_lost(Checkpoints(folder, keep, disk), disk, before + 1)
        assert saved is (operations >= (10 if before >= keep else 9))

        found = newest(folder)  # without a warning: a file with a checkpoint's name is complete
        if found is None:
            assert (saved, before) == (False, 0)
        else:
            assert found.round in ((before + 1,) if saved else (before, before + 1))
            assert same(found, checkpoint(found.round))

        store = Checkpoints(folder, keep, SlipshodDisk())
        assert not folder.exists() or [name for name in names(folder) if name.startswith(".")] == []
        store.save(checkpoint(before + 2))
        assert same(newest(folder), checkpoint(before + 2))
        assert len(names(folder)) <= keep


# --- the configuration


def test_a_checkpoint_is_due_every_n_rounds() -> None:
    assert [number for number in range(1, 10) if is_due(number, 3)] == [3, 6, 9]
    assert [number for number in range(1, 10) if is_due(number, 0)] == []
    assert all(is_due(number, config_from({}).server.checkpoint_every) for number in range(1, 10))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("checkpoint_every", -1, "server.checkpoint_every = -1 is not allowed: it should be at least 0."),
        ("checkpoint_every", True, "server.checkpoint_every = True is not a number."),
        ("checkpoint_keep", 0, "server.checkpoint_keep = 0 is not allowed: it should be at least 1."),
        ("checkpoint_keep", "all", "server.checkpoint_keep = 'all' is not allowed: it should be a whole number."),
    ],
)
def test_numbers_of_checkpoints_are_checked(key: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_from({"server": {key: value}})
    assert says in str(raised.value)


def test_an_old_file_that_cannot_be_read_is_set_aside_when_its_turn_to_be_removed_comes(tmp_path: Path) -> None:
    of_another_version(Checkpoints(tmp_path).save(checkpoint(1)))
    content = (tmp_path / "round-000001.pipar").read_bytes()
    saving = Checkpoints(tmp_path, 2)
    for number in (2, 3, 4):
        saving.save(checkpoint(number))
    assert names(tmp_path) == ["round-000001.pipar.unread", "round-000003.pipar", "round-000004.pipar"]
    assert (tmp_path / "round-000001.pipar.unread").read_bytes() == content

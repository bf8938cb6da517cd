"""A run's folder: new names, whole files, epochs as they happen, and a result that keeps its contract."""

from __future__ import annotations

import json
import os
import signal
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from support.hand_made_job import CONFIG, job

from pipar.errors import InputError, StorageError
from pipar.events import EpochResult, Event, Pictured, Replanned, RoundOver, Saved, SaveFailed, Scores, ignore
from pipar.execution.spans import Span
from pipar.profiling.cache import machine_fingerprint
from pipar.settings.config import device_specs
from pipar.settings.config_file import config_from, load_config
from pipar.storage.checkpoint import Checkpoint
from pipar.storage.packed_rows import PackedRows
from pipar.storage.run_folder import RunFolder, signals_deferred, versions
from pipar.storage.run_names import new_folder, refuse_to_replace_result, run_name
from pipar.storage.whole_files import write_atomically
from pipar.wire.messages import EMPTY, Body

EPOCH = EpochResult(1, 10.0, 40, 1.5, None, None, 100, 200, 1.0, 2.0, 5.0, 0.5, 0.25, {"device": 0.5})
SPAN = Span("pi-1", "compute", "fc", 1, 1, 1, 100.0, 101.0)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path, job(), world="virtual", command="pipar run --virtual")


def test_a_number_is_appended_to_a_name_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "deep" / "runs"))
    assert [new_folder("vgg5").name for _ in range(3)] == ["vgg5", "vgg5-2", "vgg5-3"]
    assert sorted(path.name for path in (tmp_path / "deep" / "runs").iterdir()) == ["vgg5", "vgg5-2", "vgg5-3"]


def test_runs_go_to_the_current_directory_without_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPAR_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert new_folder("x").resolve() == (tmp_path / "runs" / "x").resolve()


def test_a_folder_that_cannot_be_made_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "file"))
    with pytest.raises(InputError, match="Cannot make the run's folder"):
        new_folder("x")


def test_a_new_training_does_not_replace_the_result_of_another(folder: RunFolder) -> None:
    refuse_to_replace_result(folder.path)
    folder.finish()
    refuse_to_replace_result(folder.path)  # it was stopped before the end of its first round
    folder.event_recorder(ignore)(RoundOver(1, {"pi-1": 20}))
    folder.finish()
    says = "has the result of a training of 1 round and no checkpoint to resume from: give another run.name"
    with pytest.raises(InputError, match=says):
        refuse_to_replace_result(folder.path)
    (folder.path / "result.json").write_text("{")
    with pytest.raises(InputError, match=r"has a result\.json that cannot be read"):
        refuse_to_replace_result(folder.path)


def test_rows_that_cannot_be_written_are_said_once_and_written_later(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Event] = []
    observe = folder.event_recorder(seen.append)
    really_write = os.write

    def no_space(*_: object) -> int:
        raise OSError(28, "No space left on device")

    observe(RoundOver(1, {"pi-1": 20}))
    monkeypatch.setattr(os, "write", no_space)
    observe(RoundOver(2, {"pi-1": 20}))
    folder.add_epoch(EPOCH, [])
    observe(RoundOver(3, {"pi-1": 20}))
    with pytest.raises(OSError, match="No space"):
        folder.finish()
    failures = [event for event in seen if isinstance(event, SaveFailed)]
    assert [failure.epoch for failure in failures] == [2]
    assert "rounds.jsonl and metrics.jsonl" in failures[0].reason
    assert not (folder.path / "result.json").exists()
    monkeypatch.setattr(os, "write", really_write)
    observe(RoundOver(4, {"pi-1": 20}))
    rows = (folder.path / "rounds.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(row)["epoch"] for row in rows] == [1, 2, 3, 4]
    assert len((folder.path / "metrics.jsonl").read_text("utf-8").splitlines()) == 1
    folder.finish()
    assert len(json.loads((folder.path / "result.json").read_text("utf-8"))["rounds"]) == 4


def test_the_files_of_a_run_are_readable_by_their_owner_only(folder: RunFolder) -> None:
    folder.event_recorder(ignore)(RoundOver(1, {"pi-1": 20}))
    folder.add_epoch(EPOCH, [SPAN])
    folder.finish(weights=Body.of(b"weights", encoding="safetensors"))
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.path.iterdir()}
    assert modes == dict.fromkeys(
        ("config.toml", "metrics.jsonl", "rounds.jsonl", "model.safetensors", "trace.json", "result.json"), 0o600
    )


def test_a_folder_on_a_full_disk_is_an_error_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(StorageError, match=r"config\.toml could not be written: No space left on device"):
        RunFolder(tmp_path, job(), world="real", command="pipar server")


def no_space(*_: object, **__: object) -> int:
    raise OSError(28, "No space left on device")


def test_rows_of_an_epoch_that_cannot_be_written_are_reported_with_that_epoch(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Event] = []
    emit, observe = folder.epoch_recorder(seen.append), folder.event_recorder(seen.append)
    observe(RoundOver(1, {"pi-1": 20}))
    really_write = os.write
    monkeypatch.setattr(os, "write", no_space)
    emit(EPOCH, [])  # its row of metrics.jsonl is the first that fails
    assert [event.epoch for event in seen if isinstance(event, SaveFailed)] == [1]
    observe(RoundOver(2, {"pi-1": 20}))
    assert len([event for event in seen if isinstance(event, SaveFailed)]) == 1
    monkeypatch.setattr(os, "write", really_write)
    observe(RoundOver(3, {"pi-1": 20}))
    monkeypatch.setattr(os, "write", no_space)
    emit(replace(EPOCH, epoch=2), [SPAN])  # both files fail, after they could be written in between
    reasons = [event.reason for event in seen if isinstance(event, SaveFailed)][1:]
    assert ["trace" in reason for reason in reasons] == [False, True]


def test_a_training_that_cannot_be_resumed_on_a_full_disk_says_so_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Checkpoint(1, EMPTY, {}, job().plans, {}, PackedRows([EPOCH.to_dict()]), PackedRows([{"pi-1": 20}]))
    folder = RunFolder(tmp_path, job(), world="real", command="pipar server", has_checkpoints=True)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_space)
        with pytest.raises(StorageError, match=r"metrics\.jsonl could not be written: No space left on device"):
            folder.resume(found)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", no_space)
        with pytest.raises(StorageError, match=r"metrics\.jsonl could not be written: No space left on device"):
            folder.start_over()


def test_a_file_is_written_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, b"old")

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new and longer")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]
    monkeypatch.undo()
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_two_processes_writing_one_file_do_not_mix_their_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sync = tmp_path / "result.json", os.fsync

    def meanwhile(descriptor: int) -> None:
        sync(descriptor)
        monkeypatch.undo()
        monkeypatch.setattr(os, "getpid", lambda: 1)
        write_atomically(path, b"the other's, which is longer")
        monkeypatch.undo()

    monkeypatch.setattr(os, "fsync", meanwhile)
    write_atomically(path, b"one's")
    assert path.read_bytes() == b"one's"
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_partial_files_of_a_crashed_process_are_removed_by_the_next_one(tmp_path: Path) -> None:
    ended = 2**22 + 1  # more than Linux ever numbers a process
    (tmp_path / f".trace.json.{ended}.partial").write_bytes(b"half")
    RunFolder(tmp_path, job(), world="real", command="pipar server --resume")
    assert [file.name for file in tmp_path.iterdir()] == ["config.toml"]


def test_ctrl_c_is_deferred_until_saving_has_ended(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)

    def save() -> None:
        with signals_deferred():
            signal.raise_signal(signal.SIGINT)
            write_atomically(tmp_path / "result.json", b"saved")

    with pytest.raises(KeyboardInterrupt):
        save()
    assert (tmp_path / "result.json").read_bytes() == b"saved"
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_configuration_reads_back_equal(folder: RunFolder) -> None:
    again = load_config(folder.path / "config.toml")
    assert again == job().resolved_config()
    assert again.model_copy(update={"devices": CONFIG.devices}) == CONFIG
    assert {(spec.split_point, spec.micro_batches) for spec in device_specs(again)} == {(1, 2)}


def test_an_epoch_is_in_the_metrics_as_soon_as_it_has_ended(folder: RunFolder) -> None:
    metrics = folder.path / "metrics.jsonl"
    assert not metrics.exists()
    for number in (1, 2):
        folder.add_epoch(replace(EPOCH, epoch=number), [])
        lines = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
        assert [line["epoch"] for line in lines] == list(range(1, number + 1))
    assert lines[0] == EPOCH.to_dict()


def test_the_result_has_the_fields_that_others_rely_on(folder: RunFolder) -> None:
    folder.add_epoch(EPOCH, [SPAN])
    untested = folder.finish(weights=Body.of(b"weights"), weights_sha256="ab" * 32)
    assert json.loads((folder.path / "result.json").read_text("utf-8")) == untested
    assert untested["test_accuracy"] is None
    result = folder.add_test_scores(Scores(0.5, 0.75))
    assert json.loads((folder.path / "result.json").read_text("utf-8")) == result
    assert {key: value for key, value in result.items() if key not in ("epochs", "versions", "machine")} == {
        "method": "pipar",
        "model": "vgg5",
        "dataset": "digits",
        "world": "virtual",
        "equivalence": "exact",
        "equivalence_reasons": [],
        "seed": 7,
        "layers": 2,
        "plans": [
            {"device": "pi-1", "split_point": 1, "micro_batches": 2, "window": 0, "up": "raw", "down": "raw"},
            {"device": "pi-2", "split_point": 1, "micro_batches": 2, "window": 0, "up": "raw", "down": "raw"},
        ],
        "threads": {"pi-1": 1, "pi-2": 1},
        "server_threads": 1,
        "replans": [],
        "rounds": [],
        "stopped": None,
        "epsilon": None,
        "privacy": None,
        "device_metrics": {},
        "test_accuracy": 0.75,
        "test_loss": 0.5,
        "test_metrics": {},
        "kept_epoch": 0,
        "weights_sha256": "ab" * 32,
        "last_weights_sha256": None,
        "command": "pipar run --virtual",
    }
    assert result["epochs"][0].keys() >= {
        "epoch", "seconds", "samples", "train_loss", "val_loss", "val_accuracy", "bytes_up", "bytes_down",
        "server_idle_s", "device_idle_s", "bound_s", "efficiency", "validation_s",
    }  # fmt: skip
    assert result["machine"] == machine_fingerprint()
    assert result["versions"] == versions()
    assert set(versions()) == {"pipar", "torch", "numpy", "grpcio"}


def test_new_plans_are_in_the_result_if_an_epoch_was_trained_with_them(folder: RunFolder) -> None:
    seen: list[Event] = []
    watch = folder.event_recorder(seen.append)
    plans = {
        name: {"split_point": 2, "micro_batches": 1, "window": 0, "up": "raw", "down": "raw"}
        for name in ("pi-2", "pi-1")
    }
    for number in (1, 2):
        folder.add_epoch(replace(EPOCH, epoch=number), [])
    for first_epoch in (2, 3):
        watch(Replanned(first_epoch, plans, "pi-2 left"))
    result = folder.finish()
    assert [event.epoch for event in seen if isinstance(event, Replanned)] == [2, 3]
    new = [
        {"device": name, "split_point": 2, "micro_batches": 1, "window": 0, "up": "raw", "down": "raw"}
        for name in ("pi-1", "pi-2")
    ]
    assert result["replans"] == [{"epoch": 2, "plans": new, "reason": "pi-2 left"}]
    assert {plan["split_point"] for plan in result["plans"]} == {1}


def test_a_finished_run_leaves_its_files_and_no_partial_ones(folder: RunFolder) -> None:
    folder.add_epoch(EPOCH, [SPAN])
    folder.finish(weights=Body.of(b"wei", b"ghts"))
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "config.toml",
        "metrics.jsonl",
        "model.safetensors",
        "result.json",
        "trace.json",
    ]
    assert (folder.path / "model.safetensors").read_bytes() == b"weights"


def test_a_run_without_weights_or_epochs_can_be_finished_too(folder: RunFolder) -> None:
    result = folder.finish()
    assert (result["epochs"], result["test_accuracy"], result["weights_sha256"]) == ([], None, None)
    assert not (folder.path / "model.safetensors").exists()


def test_the_trace_starts_at_zero_with_its_first_span(folder: RunFolder) -> None:
    folder.add_epoch(EPOCH, [replace(SPAN, start=103.0, end=104.0), SPAN])
    folder.finish()
    events = json.loads((folder.path / "trace.json").read_text("utf-8"))["traceEvents"]
    assert [event["ts"] for event in events if event["ph"] == "X"] == [0.0, 3_000_000.0]


def told(path: Path, name: str) -> list[int]:
    file = path / name
    return [json.loads(line)["epoch"] for line in file.read_text("utf-8").splitlines()] if file.exists() else []


def train_rounds(folder: RunFolder, *numbers: int, saved: int) -> None:
    watch = folder.event_recorder(ignore)
    for number in numbers:
        watch(RoundOver(number, {"pi-2": 20, "pi-1": 20}, {"pi-3": 4} if number == 2 else {}))
        if number == saved:
            watch(Saved(saved, "checkpoint"))
        folder.add_epoch(replace(EPOCH, epoch=number), [])


@pytest.mark.slow
def test_the_memory_of_a_training_does_not_grow_with_its_rounds(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, job(), world="real", command="pipar server", has_checkpoints=True)
    watch, plans = folder.event_recorder(ignore), {name: asdict(plan) for name, plan in job().plans.items()}

    def train(*numbers: int) -> int:
        for number in numbers:
            watch(Replanned(number, plans, "links have changed"))
            train_rounds(folder, number, saved=number)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = train(*range(1, 641))
        after = train(*range(641, 1281))
    finally:
        tracemalloc.stop()
    assert after - before < 640 * 200  # the objects would be 4 KB a round


def test_after_a_crash_the_files_have_no_round_twice_and_none_that_is_lost(tmp_path: Path) -> None:
    before = RunFolder(tmp_path, job(), world="real", command="pipar server", has_checkpoints=True)
    train_rounds(before, 1, 2, 3, 4, saved=2)  # and a crash before 3 or 4 is saved
    assert told(tmp_path, "rounds.jsonl") == told(tmp_path, "metrics.jsonl") == [1, 2]

    log, partly = PackedRows(before.round_log[:2]), {"2": {"pi-3": 4}}
    found = Checkpoint(2, EMPTY, {}, job().plans, {}, PackedRows([EPOCH.to_dict()]), log, {"partly": partly})
    after = RunFolder(tmp_path, job(), world="real", command="pipar server", has_checkpoints=True)
    after.resume(found)
    assert after.trained_again == 0  # the files had none of the lost rounds
    train_rounds(after, 3, 4, saved=3)
    assert told(tmp_path, "rounds.jsonl") == told(tmp_path, "metrics.jsonl") == [1, 2, 3]
    result = after.finish()
    assert told(tmp_path, "rounds.jsonl") == told(tmp_path, "metrics.jsonl") == [1, 2, 3, 4]
    assert [row.get("partly") for row in result["rounds"]] == [None, {"pi-3": 4}, None, None]
    once_more = RunFolder(tmp_path, job(), world="real", command="pipar server", has_checkpoints=True)
    once_more.resume(found)
    assert once_more.trained_again == 2


@pytest.mark.parametrize(
    ("notes", "reasons"),
    [({}, ("lossy encoding",)), ({"equivalence_reasons": []}, ()), ({"spent": {}}, ("lossy encoding",))],
)
def test_a_checkpoint_that_knows_no_reasons_has_those_of_its_plans(
    tmp_path: Path, notes: dict[str, Any], reasons: tuple[str, ...]
) -> None:
    lossy = {name: replace(plan, up="int8") for name, plan in job().plans.items()}
    folder = RunFolder(tmp_path, job(), world="real", command="pipar server", has_checkpoints=True)
    log = PackedRows([{"pi-1": 20, "pi-2": 20}])
    folder.resume(Checkpoint(1, EMPTY, {}, lossy, {}, PackedRows([EPOCH.to_dict()]), log, notes))
    watch = folder.event_recorder(ignore)
    watch(Replanned(2, {name: asdict(plan) for name, plan in job().plans.items()}, "links have changed"))
    train_rounds(folder, 2, saved=2)
    assert folder.equivalence_reasons == reasons


def test_after_a_crash_at_the_end_of_the_last_round_the_result_is_still_to_be_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, job(), world="real", command="pipar server", has_checkpoints=True)
    train_rounds(folder, 1, saved=1)
    assert not folder.has_result()
    folder.finish()
    assert folder.has_result()
    train_rounds(folder, 2, saved=2)  # training continued, and result.json is from an earlier stop
    assert not folder.has_result()


def test_a_training_that_starts_over_has_no_rows_of_one_that_was_lost(tmp_path: Path) -> None:
    train_rounds(RunFolder(tmp_path, job(), world="real", command=""), 1, 2, saved=0)
    again = RunFolder(tmp_path, job(), world="real", command="", has_checkpoints=True)
    again.start_over()
    train_rounds(again, 1, saved=1)
    assert told(tmp_path, "rounds.jsonl") == told(tmp_path, "metrics.jsonl") == [1]


@pytest.mark.parametrize(
    ("tree", "model", "name"),
    [
        ({}, "vgg5", "vgg5-digits-pipar"),
        ({}, "own", "own-digits-pipar"),
        ({"run": {"name": "mine"}}, "vgg5", "mine"),
        ({"run": {"method": "fl"}}, "my.nets:small", "my_nets_small-digits-fl"),
    ],
)
def test_a_run_is_named_after_network_dataset_and_method(
    tree: dict[str, dict[str, str]], model: str, name: str
) -> None:
    assert run_name(config_from(tree), model, "digits") == name


def test_a_loss_that_has_diverged_is_null_and_the_files_stay_strict_json(folder: RunFolder) -> None:
    folder.add_epoch(replace(EPOCH, train_loss=float("nan"), val_loss=float("inf")), [])
    result = folder.finish()
    assert (result["epochs"][0]["train_loss"], result["epochs"][0]["val_loss"]) == (None, None)
    for file in ("result.json", "metrics.jsonl"):
        assert not {"NaN", "Infinity"} & set((folder.path / file).read_text("utf-8").replace(",", " ").split())


# --- pictures


@pytest.mark.parametrize(("pictures", "spans", "told"), [(True, [SPAN], 1), (True, [], 0), (False, [SPAN], 0)])
def test_an_observer_that_asks_for_pictures_gets_the_lanes_if_they_were_traced(
    folder: RunFolder, pictures: bool, spans: list[Span], told: int
) -> None:
    heard: list[Event] = []
    folder.epoch_recorder(heard.append, pictures=pictures)(EPOCH, spans)
    assert heard == [EPOCH, *[Pictured(1, (SPAN,), is_whole=True)] * told]


@pytest.mark.slow
def test_a_picture_has_an_excerpt_of_many_spans(folder: RunFolder) -> None:
    heard: list[Event] = []
    spans = [replace(SPAN, kind="step", iteration=1 + number // 10) for number in range(5000)]
    folder.epoch_recorder(heard.append, pictures=True)(EPOCH, spans)
    (_, picture) = heard
    assert isinstance(picture, Pictured)
    assert (len(picture.spans), picture.is_whole) == (30, False)

"""The folder of a run: its configuration, results and trace. Each file is written completely or not at all."""

from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from pipar.errors import StorageError
from pipar.events import (
    BudgetSpent,
    DevicesEvaluated,
    Drawn,
    EndedByCallback,
    EpochResult,
    EquivalenceChanged,
    Event,
    Observer,
    Pictured,
    Replanned,
    RoundOver,
    Saved,
    SaveFailed,
    Scores,
)
from pipar.execution.spans import Span, excerpt
from pipar.job.equivalence import EquivalenceLog, equivalence_reasons
from pipar.job.job import Job
from pipar.methods import Plan, plans_as_json
from pipar.privacy.budget import PrivacyAccountant
from pipar.profiling.cache import machine_fingerprint
from pipar.settings.config_file import dump_config
from pipar.settings.wording import equivalence
from pipar.storage.best_model import BestModel
from pipar.storage.checkpoint import Checkpoint
from pipar.storage.epoch_log import EpochLog
from pipar.storage.packed_rows import PackedRows
from pipar.storage.run_json import read_rows, replan_as_json, strict_json
from pipar.storage.trace_file import TraceFile
from pipar.storage.whole_files import (
    PRIVATE,
    append_whole,
    cannot_write,
    keep_trying,
    remove_partial_files,
    write_atomically,
)
from pipar.wire.messages import Body

_VERSIONED = ("pipar", "torch", "numpy", "grpcio")
_LAST_MODEL = "model-last.safetensors"


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM until the end of the block, so that files are saved completely."""
    if threading.current_thread() is not threading.main_thread():  # signals interrupt only the main thread
        yield
        return
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for first in received[:1]:
            signal.raise_signal(first)


def versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in _VERSIONED}


class RunFolder:
    """Writes the files of a run while it trains.

    With `has_checkpoints`, a round is written after its checkpoint is saved, so that no crash can undo a written round.
    With `has_threads`, a thread writes the trace.
    """

    def __init__(
        self,
        path: Path,
        job: Job,
        *,
        world: str,
        command: str,
        has_checkpoints: bool = False,
        has_threads: bool = False,
    ) -> None:
        self.path = path
        self._job = job
        self._world = world
        self._command = command
        self.epochs = EpochLog()
        self.round_log = PackedRows()  # for each round: samples by device that counted
        self.partly: dict[int, dict[str, int]] = {}  # by round: devices that only trained the shared model
        self.drawn: Mapping[str, int] = {}  # rounds of each device so far, if devices are drawn
        self.plans: Mapping[str, Plan] = job.plans  # in use now
        self.accountant = PrivacyAccountant(job.update_noise)  # counts the updates that devices send
        self.best = BestModel(path, job.config.server.checkpoint_every) if job.config.run.keep == "best" else None
        self._can_be_resumed = has_checkpoints
        self._stopped: str | None = None
        self._evaluated: dict[str, Any] = {}  # the last model, if only some devices took part in its round
        self._equivalence = EquivalenceLog(job.plans)
        self._trace = TraceFile(path / "trace.json", in_thread=has_threads)
        self._replanned = PackedRows()
        self._written: dict[str, Any] = {}
        self.trained_again = 0  # rounds in the files that came after the checkpoint
        self._safe_round = 0 if has_checkpoints else math.inf  # no crash can undo the rounds up to this one
        self._pending: list[tuple[int, str, dict[str, Any]]] = []  # round, file and row of rounds that are not safe yet
        self._unwritten: OSError | None = None  # why rows of safe rounds are still pending
        self._is_reported = False  # that they are
        remove_partial_files(path)
        if self.best is not None:
            self.best.note_safe(self._safe_round)
        with _storage_errors(path / "config.toml"):
            write_atomically(path / "config.toml", dump_config(job.resolved_config()).encode(), mode=PRIVATE)

    def add_epoch(self, result: EpochResult, spans: list[Span]) -> None:
        """Append an epoch to metrics.jsonl, and its spans to the trace."""
        self.epochs.append(result)
        self._trace.add(spans)
        self._append_row(result.epoch, "metrics.jsonl", strict_json(result.to_dict()))

    def _append_row(self, epoch: int, name: str, row: dict[str, Any]) -> None:
        """Append a row about a round to a file, immediately or when the round is safe."""
        self._pending.append((epoch, name, row))
        self._write_safe_rows()

    def _write_safe_rows(self) -> None:
        """Write the rows of safe rounds; on a full disk they stay pending, and training continues."""
        waiting, self._unwritten = [], None
        for number, name, row in self._pending:
            if number <= self._safe_round and self._unwritten is None:
                try:
                    append_whole(self.path / name, (json.dumps(row) + "\n").encode())
                    continue
                except OSError as error:
                    self._unwritten = error
            waiting.append((number, name, row))
        self._pending = waiting

    def start_over(self) -> None:
        """Remove the rows of an earlier training in this folder, which left no checkpoint."""
        for path in (self.path / "metrics.jsonl", self.path / "rounds.jsonl"):
            with _storage_errors(path):
                path.unlink(missing_ok=True)
        if self.best is not None:
            self.best.start_over()

    def resume(self, found: Checkpoint) -> None:
        """Resume a run after the round of a checkpoint; later rounds in the files are trained again."""
        done = found.round
        self.trained_again = sum(row["epoch"] > done for row in read_rows(self.path / "rounds.jsonl"))
        rows = (*found.metrics, *read_rows(self.path / "metrics.jsonl"))
        known = {number: row for row in rows if 1 <= (number := row["epoch"]) <= done}
        log = found.round_log[:done]
        self.round_log = PackedRows(log)
        self.partly = {int(number): dict(taught) for number, taught in found.notes.get("partly", {}).items()}
        self.epochs = EpochLog(
            _epoch_of(number, known.get(number), counted) for number, counted in enumerate(log, start=1)
        )
        self.plans = dict(found.plans)
        self._equivalence.resume(self.plans, self._reasons_before(found))
        self.accountant.resume(found.notes.get("spent", {}))
        self.drawn = dict(found.notes.get("drawn", {}))
        self._safe_round = max(self._safe_round, done)
        if self.best is not None:
            self.best.resume(done)
        _write_lines(self.path / "metrics.jsonl", self.epochs.rows())
        _write_lines(self.path / "rounds.jsonl", self._rounds())

    def _rounds(self) -> list[dict[str, Any]]:
        return [self._round_row(number, counted) for number, counted in enumerate(self.round_log, start=1)]

    def _round_row(self, number: int, counted: Mapping[str, int]) -> dict[str, Any]:
        row = {"epoch": number, "counted": dict(sorted(counted.items()))}
        return row if number not in self.partly else {**row, "partly": self.partly[number]}

    def has_result(self) -> bool:
        """Return whether result.json has all rounds; after a crash at the end of a training it may lack some."""
        try:
            result = json.loads((self.path / "result.json").read_text("utf-8"))
        except (OSError, ValueError):
            return False
        return len(result.get("rounds", ())) >= len(self.round_log)

    def update_job(self, job: Job) -> None:
        """Replace the job: a device has joined."""
        self._job = job

    def _reasons_before(self, found: Checkpoint) -> Iterable[str]:
        """Return the reasons of the rounds before a checkpoint; one of version 1 has none, only the last plans."""
        known: Iterable[str] | None = found.notes.get("equivalence_reasons")
        if known is not None:
            return known
        averaged = max(map(len, found.round_log), default=1)
        facts = replace(self._job.equivalence_facts, plans=frozenset(found.plans.values()), averaged=averaged)
        return equivalence_reasons(facts)

    @property
    def equivalence_reasons(self) -> tuple[str, ...]:
        """Why the weights are not exact, by what the training did so far."""
        return self._equivalence.reasons(self._job.equivalence_facts)

    @property
    def job(self) -> Job:
        """The training as known now; in a deployment, its fleet grows."""
        return self._job

    def epoch_recorder(self, observe: Observer, *, pictures: bool = False) -> Callable[[EpochResult, list[Span]], None]:
        """Return a function that records an epoch's result and spans, and passes the result on to `observe`.

        With `pictures` it also passes on an excerpt of the spans, if spans are kept.
        """

        def emit(result: EpochResult, spans: list[Span]) -> None:
            self.add_epoch(result, spans)
            observe(result)
            self._report_rows(result.epoch, observe)
            if (failure := self._trace.take_failure()) is not None:
                reason = cannot_write(f"The trace in {self.path}", failure)
                observe(SaveFailed(result.epoch, f"{reason} Training continues without these spans."))
            self._report_best(result.epoch, observe)
            if pictures and spans:
                shown, left_out = excerpt(spans)
                observe(Pictured(result.epoch, tuple(shown), len(shown) == len(spans), left_out))

        return emit

    def event_recorder(self, observe: Observer) -> Observer:
        """Return an observer that records the events that results are made of, and passes all events on."""

        def watch(event: Event) -> None:
            if isinstance(event, Replanned):
                self._replanned.append(replan_as_json(event))
                self.plans = {name: Plan(**plan) for name, plan in event.plans.items()}
                self._equivalence.replan(event.epoch, self.plans)
            elif isinstance(event, RoundOver):
                self.round_log.append(event.counted)
                if event.partly:
                    self.partly[event.epoch] = event.partly
                self._append_row(event.epoch, "rounds.jsonl", self._round_row(event.epoch, event.counted))
                self._end_round(event, observe)
            elif isinstance(event, Drawn):
                self.drawn = event.counts
            elif isinstance(event, DevicesEvaluated):
                self._evaluated = event.scores
            elif isinstance(event, BudgetSpent | EndedByCallback):
                self._stopped = event.reason
            elif isinstance(event, Saved):
                self._safe_round = max(self._safe_round, event.epoch)
                self._write_safe_rows()
                if self.best is not None:
                    self.best.note_safe(event.epoch)
            observe(event)
            self._report_rows(len(self.round_log), observe)

        return watch

    def _end_round(self, over: RoundOver, observe: Observer) -> None:
        """Report whether this round changes why the weights are not exact."""
        before = self.equivalence_reasons
        self._equivalence.end_round(over.epoch, {*over.counted, *over.partly})
        if self.equivalence_reasons != before:
            observe(EquivalenceChanged(over.epoch, self.equivalence_reasons))

    def _report_rows(self, epoch: int, observe: Observer) -> None:
        """Report rows that cannot be written, once until they could be in between."""
        if self._unwritten is not None and not self._is_reported:
            reason = cannot_write(f"Rows of rounds.jsonl and metrics.jsonl in {self.path}", self._unwritten)
            observe(SaveFailed(epoch, f"{reason} pipar tries again after every round."))
        self._is_reported = self._unwritten is not None

    def _report_best(self, epoch: int, observe: Observer) -> None:
        """Report that the best model could not be written; it stays in memory until it is."""
        failure = None if self.best is None else self.best.take_failure()
        if failure is not None:
            reason = cannot_write(f"The best model in {self.path}", failure)
            observe(SaveFailed(epoch, f"{reason} pipar tries again after every round."))

    def write_model(self, weights: Body, name: str = "model.safetensors") -> None:
        """Write a model of the run."""
        write_atomically(self.path / name, *weights.buffers, mode=PRIVATE)

    def finish(
        self,
        *,
        weights: Body | None = None,
        weights_sha256: str | None = None,
        last: Body | None = None,
        last_sha256: str | None = None,
    ) -> dict[str, Any]:
        """Write model.safetensors, trace.json and, last, result.json without a test accuracy; return the result.

        `last` is the model of the last round, if it is another one. It may be called again after an OSError.
        """
        self._safe_round = math.inf  # the model that is written now contains all rounds
        if weights is not None:
            self.write_model(weights)
        self._write_last(last)
        self._write_safe_rows()
        if self._unwritten is not None:
            raise self._unwritten
        self._trace.finish()
        best = None if self.best is None or last is None else self.best.best
        kept = len(self.round_log) if best is None else best.round
        models = {"kept_epoch": kept, "weights_sha256": weights_sha256, "last_weights_sha256": last_sha256}
        written = self._write_result(self._result(models))
        if self.best is not None and not self._can_be_resumed:
            self.best.remove()
        return written

    def _write_last(self, last: Body | None) -> None:
        """Write the model of the last round, if it is not the one that is kept."""
        if last is not None:
            self.write_model(last, _LAST_MODEL)
        else:
            (self.path / _LAST_MODEL).unlink(missing_ok=True)  # of this training before it was resumed
        if self.best is not None and self._can_be_resumed:
            self.best.write()

    def add_test_scores(self, scores: Scores) -> dict[str, Any]:
        """Write result.json again with the finished model's scores on the test set; return the result."""
        tested = {"test_accuracy": scores.accuracy, "test_loss": scores.loss, "test_metrics": scores.metrics}
        return self._write_result({**self._written, **tested})

    def _write_result(self, result: dict[str, Any]) -> dict[str, Any]:
        written: dict[str, Any] = strict_json(result)
        _write_json(self.path / "result.json", written, indent=1)
        self._written = written
        return written

    def _replans(self) -> list[dict[str, Any]]:
        # Plans that no finished epoch has used are left out: the training may have ended right after they were chosen.
        return [replan for replan in self._replanned if replan["epoch"] <= len(self.epochs)]

    def _device_metrics(self, kept: int) -> dict[str, Any]:
        """Return the kept model on the devices' own samples, or the last one with a result; empty if none evaluates."""
        if self._evaluated.get("epoch") == kept or not len(self.epochs):
            return self._evaluated
        return self.epochs[min(kept, len(self.epochs)) - 1].device_metrics

    def _result(self, models: Mapping[str, Any]) -> dict[str, Any]:
        job = self._job
        return {
            "method": job.method.name,
            "model": job.model,
            "dataset": job.dataset,
            "world": self._world,
            "equivalence": equivalence(self.equivalence_reasons),
            "equivalence_reasons": list(self.equivalence_reasons),
            "seed": job.config.run.seed,
            "layers": job.layers,
            "plans": plans_as_json(job.plans),
            "server_threads": job.server_threads,
            "threads": {name: job.threads(name) for name in sorted(job.device_profiles)},
            "replans": self._replans(),
            "epochs": self.epochs.rows(),
            "rounds": self._rounds(),
            "stopped": self._stopped,
            "epsilon": self.accountant.largest_epsilon(),
            "privacy": self.accountant.as_result(),
            "device_metrics": self._device_metrics(models["kept_epoch"]),
            "test_accuracy": None,
            "test_loss": None,
            "test_metrics": {},
            **models,
            "machine": machine_fingerprint(),
            "versions": versions(),
            "command": self._command,
        }


#: How long a run on one machine tries to write its result, for example while its user frees some space.
_PATIENCE_S = 60.0


def save_result(
    folder: RunFolder,
    write: Callable[[], dict[str, Any]],
    observe: Observer,
    *,
    patience_s: float = _PATIENCE_S,
) -> dict[str, Any]:
    """Return what `write`, a method of the folder, returns; it is tried again until this takes too long (StorageError).

    In the main program, wrap it in `without_signals`: a signal then waits until an attempt has ended.
    """

    def say(sentence: str) -> None:
        observe(SaveFailed(len(folder.round_log), sentence))

    return keep_trying(write, f"The result in {folder.path}", say, patience_s=patience_s)


def without_signals(write: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Return the function with Ctrl-C and SIGTERM deferred until it returns, so that files are saved completely."""

    def deferred() -> dict[str, Any]:
        with signals_deferred():
            return write()

    return deferred


def _epoch_of(number: int, row: Mapping[str, Any] | None, counted: Mapping[str, int]) -> EpochResult:
    """Return an epoch's result from its row, or from the round log if a crash came before the row was written."""
    known = {one.name for one in fields(EpochResult)}
    nothing: dict[str, Any] = {one.name: math.nan for one in fields(EpochResult) if one.type == "float"}
    nothing |= {"train_loss": None, "val_loss": None, "val_accuracy": None, "bytes_up": 0, "bytes_down": 0}
    nothing |= {"epoch": number, "samples": sum(counted.values()), "devices": len(counted)}
    given = {key: value for key, value in (row or {}).items() if key in known and value is not None}
    return EpochResult(**{**nothing, **given})


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    """Turn an error of the disk into a sentence about a file, without which a training cannot start."""
    try:
        yield
    except OSError as error:
        raise StorageError(cannot_write(str(path), error)) from None


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    content = "".join(json.dumps(strict_json(dict(row))) + "\n" for row in rows).encode()
    with _storage_errors(path):
        write_atomically(path, content, mode=PRIVATE)


def _write_json(path: Path, content: Mapping[str, Any] | Sequence[Any], indent: int | None = None) -> None:
    write_atomically(path, (json.dumps(content, indent=indent, allow_nan=False) + "\n").encode(), mode=PRIVATE)

"""trace.json, written epoch by epoch: a training of any length keeps only the spans of one epoch in memory."""

from __future__ import annotations

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from pipar.execution.spans import ChromeEvents, Span
from pipar.storage.whole_files import append_whole, check_spare, partial_file

#: The first line. Each event after it has a line of its own.
HEAD = '{"traceEvents": ['
#: More than a million spans, which is more than viewers can show.
_MOST_BYTES = 256_000_000
_EVENTS_AT_ONCE = 10_000
#: Spans that may wait for the thread, besides those of one epoch: about 50 MB.
_MOST_WAITING = 200_000


class TraceFile:
    """Appends the spans of epochs to a partial file, which becomes trace.json at the end.

    Spans for which there is no space, on the disk or within `most_bytes`, are left out and counted: a training must not
    stop for its trace. With `in_thread`, a thread encodes and writes them, so that messages do not wait meanwhile.
    Spans that come faster than a slow disk takes them are left out too.
    """

    def __init__(self, path: Path, *, most_bytes: int = _MOST_BYTES, in_thread: bool = False) -> None:
        self._not_written = 0  # spans, counted by the thread
        self._not_taken = 0  # spans
        self.failure: OSError | None = None  # of the last attempt to write
        self._path, self._partial = path, partial_file(path)
        self._room = most_bytes
        self._origin: float | None = None  # the start of the first span is time 0
        self._names = ChromeEvents()
        self._before = f"{HEAD}\n"  # what comes before the next event
        self._is_complete = self._is_finished = False
        self._new_failure: OSError | None = None
        self._writer = ThreadPoolExecutor(1, "trace") if in_thread else None
        self._waiting: list[tuple[Future[None], int]] = []  # epochs that the thread has not written, and their spans

    @property
    def left_out(self) -> int:
        """How many spans the file does not have."""
        return self._not_written + self._not_taken

    def add(self, spans: list[Span]) -> None:
        """Append the spans of an epoch; with a thread, return at once."""
        if self._writer is None:
            self._add(spans)
            return
        self._waiting = [(writing, count) for writing, count in self._waiting if not writing.done()]
        if self._waiting and sum(count for _, count in self._waiting) + len(spans) > _MOST_WAITING:
            self._not_taken += len(spans)
        else:
            self._waiting.append((self._writer.submit(self._add, spans), len(spans)))

    def take_failure(self) -> OSError | None:
        """Return why spans could not be written, unless those before them could not be either; each only once."""
        failure, self._new_failure = self._new_failure, None
        return failure

    def _add(self, spans: list[Span]) -> None:
        before, self.failure = self.failure, None
        if spans and self._origin is None:
            self._origin = min(span.start for span in spans)
        events, written = self._names.events(spans, self._origin or 0.0), 0
        while some := list(islice(events, _EVENTS_AT_ONCE)):
            if not self._append(",\n".join(json.dumps(event, allow_nan=False) for event in some)):
                self._names.name_again()  # names may be among the events that are not written
                break
            written += sum(event["ph"] == "X" for event in some)
        self._not_written += len(spans) - written
        if before is None and self.failure is not None:
            self._new_failure = self.failure

    def finish(self) -> None:
        """Complete trace.json; it may be called again after an OSError."""
        if self._is_finished:
            return
        for writing, _ in self._waiting:
            writing.result()
        if not self._is_complete:
            end = "]" if self._before.startswith(HEAD) else "\n]"
            note = f', "otherData": {{"spans_left_out": {self.left_out}}}' if self.left_out else ""
            head = self._before if self._before.startswith(HEAD) else ""
            append_whole(self._partial, f"{head}{end}{note}}}\n".encode())
            self._is_complete = True
        descriptor = os.open(self._partial, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._partial.replace(self._path)
        self._is_finished = True
        if self._writer is not None:
            self._writer.shutdown()

    def _append(self, lines: str) -> bool:
        content = f"{self._before}{lines}".encode()
        if len(content) > self._room:
            return False
        try:
            check_spare(self._partial, len(content))
            append_whole(self._partial, content)
        except OSError as error:
            self.failure = error
            return False
        self._room -= len(content)
        self._before = ",\n"
        return True

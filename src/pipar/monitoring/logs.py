"""Events as log lines for the operator of a server or device: one sentence each, or one JSON object.

They go through the standard `logging` module to the logger "pipar", so that a program that embeds pipar can route them.
Each record also carries the event itself as `record.event`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from pipar.errors import one_line
from pipar.events import (
    Away,
    Barred,
    BudgetSpent,
    Dropped,
    Event,
    Expiring,
    Failed,
    Heard,
    Lost,
    MeasuredBusy,
    NotEvaluated,
    NotKept,
    Observer,
    Pictured,
    Preparing,
    Progress,
    Reconnecting,
    Refused,
    ReloadFailed,
    ReplanFailed,
    ReportFailed,
    RoundRestarted,
    SaveFailed,
    Silent,
    TrackerFailed,
)
from pipar.monitoring.event_text import EventDescriber
from pipar.monitoring.third_party_logs import foreign_lines, real_standard_error

LOGGER = "pipar"
LogFormat = Literal["text", "json"]


#: Levels of events other than info: details that few runs need, and what an operator may have to look into.
_LEVELS: dict[type[Event], int] = {
    Progress: logging.DEBUG,
    Pictured: logging.DEBUG,
    Preparing: logging.DEBUG,
    Silent: logging.DEBUG,  # it may just be slow; a lost connection is a warning
    Heard: logging.DEBUG,
    Away: logging.WARNING,
    Lost: logging.WARNING,
    Dropped: logging.WARNING,
    RoundRestarted: logging.WARNING,
    BudgetSpent: logging.WARNING,
    Reconnecting: logging.WARNING,
    ReplanFailed: logging.WARNING,
    NotEvaluated: logging.WARNING,
    NotKept: logging.WARNING,
    MeasuredBusy: logging.WARNING,
    ReportFailed: logging.WARNING,
    TrackerFailed: logging.WARNING,
    Expiring: logging.WARNING,
    ReloadFailed: logging.WARNING,
    Refused: logging.WARNING,
    Barred: logging.ERROR,
    SaveFailed: logging.ERROR,
    Failed: logging.ERROR,
}


def log_observer(logger: logging.Logger | None = None) -> Observer:
    """Return an observer that logs every event, by default to the logger "pipar"."""
    log = logger or logging.getLogger(LOGGER)
    describer = EventDescriber()

    def observe(event: Event) -> None:
        level = logging.INFO if _is_information(event) else level_of(event)
        if log.isEnabledFor(level):
            log.log(level, "%s", describer.sentence(event), extra={"event": event})
        describer.remember(event)

    return observe


@contextlib.contextmanager
def logged(
    log_format: LogFormat = "text", *, stream: TextIO | None = None, level: int = logging.INFO
) -> Iterator[Observer]:
    """Yield an observer that writes lines to standard error, or another stream, until the block ends.

    Warnings of other libraries are written in the same format. In JSON so are the lines that any other code of the
    process writes to standard error, so that every line is JSON.
    """
    if stream is not None or log_format != "json":
        with _handled(_handler(log_format, stream or sys.stderr), level) as log:
            yield log_observer(log)
        return
    with (
        real_standard_error() as real,
        _handled(_handler(log_format, real), level) as log,
        foreign_lines(lambda line: logging.getLogger("stderr").warning("%s", line)),
    ):
        yield log_observer(log)


class _LineHandler(logging.StreamHandler[TextIO]):
    """Writes lines; a line that cannot be written is lost. A report of that on standard error would be logged again."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not isinstance(self.formatter, JsonLines):
            super().handleError(record)


def _handler(log_format: LogFormat, stream: TextIO) -> logging.Handler:
    handler = _LineHandler(stream)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    return handler


@contextlib.contextmanager
def _handled(handler: logging.Handler, level: int) -> Iterator[logging.Logger]:
    """Yield pipar's logger while all records go to the handler, also those of other libraries."""
    log, root = logging.getLogger(LOGGER), logging.getLogger()
    previous_level = log.level
    log.setLevel(level)
    root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield log
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        log.setLevel(previous_level)


def _is_information(event: Event) -> bool:
    """Return whether an event has the level info although others of its kind do not."""
    # The start of a step that takes seconds is always logged: without it, the program would seem to hang.
    begins = isinstance(event, Preparing) and event.share == 0.0
    # A lost connection is one warning, however many attempts follow; a server that stops on purpose is none.
    return begins or (isinstance(event, Reconnecting) and (event.attempt > 1 or event.is_on_purpose))


def level_of(event: Event) -> int:
    """Return the `logging` level of an event."""
    return _LEVELS.get(type(event), logging.INFO)


class TextLines(logging.Formatter):
    """Lines of local time, the level unless it is info, and the sentence."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s  %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{record.asctime}  {level}{one_line(record.message)}"


class JsonLines(logging.Formatter):
    """Lines of one JSON object each: time, level, event, message and the event's own fields.

    A record of another library has the name of its logger in place of an event.
    """

    def format(self, record: logging.LogRecord) -> str:
        event = getattr(record, "event", None)
        content: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
        }
        content |= {"logger": record.name} if event is None else {"event": type(event).__name__}
        content["message"] = record.getMessage()
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        content |= {} if event is None else asdict(event)
        return json.dumps(_finite(content), default=str)


def _finite(value: Any) -> Any:
    """Return the value with None for infinities and NaN, which JSON lacks, as in the loss of a diverged training."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(inner) for inner in value]
    return value

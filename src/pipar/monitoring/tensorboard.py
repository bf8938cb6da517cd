"""Event files for TensorBoard in the run's folder: `tensorboard --logdir runs` shows all runs side by side.

TensorBoard's own writer needs neither torch nor TensorFlow, so a timing-only run imports neither.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from pipar.monitoring.tracker import RunDescription, Setting, scalars, tested

FOLDER = "tensorboard"
#: The tag by which TensorBoard's hyper-parameter plugin finds the settings of a run.
_SESSION_START = "_hparams_/session_start_info"
_DT_STRING = 7  # TensorFlow's number of the type, in tensorflow/core/framework/types.proto


class TensorBoardTracker:
    """An event file; each epoch is on disk as soon as it ends."""

    def __init__(self) -> None:
        self._writer: EventFileWriter | None = None
        self._last_epoch = 0

    def begin(self, run: RunDescription) -> None:
        self._writer = EventFileWriter(str(run.folder / FOLDER))
        self._add(Summary(value=[hyper_parameters(run), _text("configuration", markdown(run.settings))]), step=0)

    def epoch(self, row: Mapping[str, Any]) -> None:
        epoch = int(row["epoch"])
        if not self._last_epoch:
            # After --resume, this epoch and later ones are trained again: START discards earlier values of them.
            self._write(Event(step=epoch, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START)))
        self._last_epoch = epoch
        self._add_scalars(scalars(row))

    def end(self, result: Mapping[str, Any] | None) -> None:
        if result is not None:
            self._add_scalars(scalars(tested(result)))
        if self._writer is not None:
            self._writer.close()

    def _add_scalars(self, values: Mapping[str, float]) -> None:
        found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(Summary(value=found), step=self._last_epoch)

    def _add(self, summary: Summary, *, step: int) -> None:
        self._write(Event(step=step, wall_time=time.time(), summary=summary))

    def _write(self, event: Event) -> None:
        assert self._writer is not None
        self._writer.add_event(event)
        self._writer.flush()


def hyper_parameters(run: RunDescription) -> Summary.Value:
    """Return the settings as the hyper-parameter plugin reads them."""
    start = SessionStartInfo(group_name=str(run.folder), start_time_secs=time.time())
    for name, value in run.settings.items():
        if isinstance(value, bool):
            start.hparams[name].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[name].number_value = value
        else:
            start.hparams[name].string_value = value
    content = HParamsPluginData(version=0, session_start_info=start).SerializeToString()
    plugin = SummaryMetadata.PluginData(plugin_name="hparams", content=content)
    return Summary.Value(tag=_SESSION_START, metadata=SummaryMetadata(plugin_data=plugin))


def _text(tag: str, words: str) -> Summary.Value:
    """Return a text for the text plugin."""
    tensor = TensorProto(dtype=_DT_STRING, string_val=[words.encode()])
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    return Summary.Value(tag=tag, tensor=tensor, metadata=SummaryMetadata(plugin_data=plugin))


def markdown(settings: Mapping[str, Setting]) -> str:
    """Return a table of all settings."""
    rows = [f"| {name} | `{json.dumps(value)}` |" for name, value in settings.items()]
    return "\n".join(["| key | value |", "|---|---|", *rows])

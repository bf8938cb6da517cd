"""A run read back from its folder, finished or not."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from pipar.errors import InputError
from pipar.execution.spans import Span
from pipar.methods import METHODS, Plan, plans_as_json
from pipar.settings.config import Config, device_names, device_specs
from pipar.settings.config_file import config_from
from pipar.storage.run_json import read_rows
from pipar.storage.trace_file import HEAD

_PLAN_NUMBERS = ("split_point", "micro_batches")
_EPOCH = re.compile(rb'"epoch": ?(\d+)')
_NAME = re.compile(r"(?:wait )?([a-z]*?)(\d*)")


@dataclass(frozen=True)
class RunRecord:
    """A run as its files describe it.

    `result` is result.json, or what is known so far; `config` is config.toml; `outlook` is outlook.json, the
    predictions of `report.what_if`. `spans` are at least those of the epoch that is shown; if they are only part of it,
    `spans_missing` is the number of spans left out between its first and last one.
    """

    result: Mapping[str, Any]
    spans: Sequence[Span] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""
    running: bool = False
    outlook: Mapping[str, Any] | None = None
    spans_missing: int | None = None  # None: the epoch is complete

    @classmethod
    def read(cls, folder: Path | str, *, with_spans: bool = True) -> RunRecord:
        """Return the run in a folder, or raise an InputError that says why there is none.

        A trace may take seconds to read; `with_spans=False` skips it.
        """
        path = Path(folder)
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise InputError(f"{path} {what}: give the folder of a run, as in runs/vgg5-digits-pipar.")
        config = _read_config(path)
        result = _read_json(path / "result.json")
        if result is not None and (odd := _oddity(result)):
            raise InputError(f"{path / 'result.json'} is not what pipar writes there: {odd}. Run the training again.")
        running = result is None
        if result is None:
            result = _result_so_far(path, config)
        return cls(
            result=result,
            spans=_read_spans(path / "trace.json") if with_spans else (),
            config=config,
            folder=str(folder),
            running=running,
            outlook=_read_json(path / "outlook.json"),
        )


def shown_epoch(epochs: Sequence[int]) -> int | None:
    """Return the epoch that a page shows: the second, which has no start-up effects, else the only one."""
    return sorted(set(epochs))[:2][-1] if epochs else None


# --- result.json, or a substitute


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return a file's content; None if there is no such file."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error) from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is not what pipar writes there: it is not a JSON object. Run the training again.")
    return content


def _oddity(result: Mapping[str, Any]) -> str | None:
    """Return what is malformed in a result, None if nothing is; missing fields are allowed."""
    replans = result.get("replans", [])
    if not _are_records(replans) or not all(isinstance(one.get("epoch"), int) for one in replans):
        return "an entry of replans has no epoch"
    for said in (result, *replans):
        plans = said.get("plans", [])
        if not _are_records(plans) or not all(isinstance(p.get(key), int) for p in plans for key in _PLAN_NUMBERS):
            return f"a plan has no {' or '.join(_PLAN_NUMBERS)}"
    lists = (result.get("epochs", []), result.get("rounds", []))
    if not all(map(_are_records, lists)) or not all(isinstance(row.get("counted", {}), dict) for row in lists[1]):
        return "epochs and rounds are not lists of objects"
    return None


def _are_records(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _damaged(path: Path, error: Exception) -> InputError:
    where = f"{error.msg} in line {error.lineno}" if isinstance(error, JSONDecodeError) else str(error)
    return InputError(f"{path} is damaged and cannot be read: {where}. Remove it, or run the training again.")


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.toml"
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        if (path / "result.json").exists():
            return {}
        raise InputError(
            f"{path} is not the folder of a run: it has neither result.json nor config.toml. Runs are in "
            "$PIPAR_RUNS, or in the folder runs."
        ) from None
    except OSError as error:
        raise InputError(f"Cannot read {file}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not valid TOML: {error}.") from None


def _result_so_far(path: Path, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result so far of a run without result.json, from its configuration and its epochs."""
    config = config_from(tree)
    return {
        "method": config.run.method,
        "model": config.model.factory or config.model.name,
        "dataset": config.data.factory or config.data.name,
        "seed": config.run.seed,
        "plans": plans_as_json(_given_plans(config)),
        "replans": [],
        "epochs": read_rows(path / "metrics.jsonl"),
        "rounds": read_rows(path / "rounds.jsonl"),
        "test_accuracy": None,
    }


def _given_plans(config: Config) -> dict[str, Plan]:
    """Return the plans in config.toml: the chosen ones, unless the devices were not known yet."""
    pipelines = METHODS[config.run.method].pipelines
    return {
        spec.name: Plan(spec.split_point, spec.micro_batches if pipelines else 1)
        for spec in device_specs(config)
        if isinstance(spec.split_point, int) and isinstance(spec.micro_batches, int)
    }


def configured(record: RunRecord) -> Config | None:
    """Return the run's configuration; None if it is unknown or not valid for this version of pipar."""
    if not record.config:
        return None  # an empty file would mean the defaults
    try:
        config = config_from(record.config)
        device_names(config)
    except InputError:
        return None
    return config


# --- trace.json


def _read_spans(path: Path) -> list[Span]:
    """Return the spans of the epoch that is shown; none without a trace.

    A trace may have a million events: only the first two epochs are read, and only the events of the shown one are
    decoded. A trace with another layout of lines is read as a whole.
    """
    try:
        data = _first_epochs(path) or path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror}.") from None
    epoch = shown_epoch([int(number) for number in {match[1] for match in _EPOCH.finditer(data)}])
    try:
        return list(spans_of(_events(data.decode("utf-8")), epoch))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, error) from None


def _first_epochs(path: Path) -> bytes:
    """Return a trace up to the end of its second epoch; nothing if it does not have the lines that pipar writes."""
    kept: list[bytes] = []
    epochs: set[bytes] = set()
    with path.open("rb") as file:
        if next(file, b"").strip() != HEAD.encode():
            return b""
        for line in file:
            match = _EPOCH.search(line)
            if match is not None:
                epochs.add(match[1])
            if len(epochs) > 2:
                kept.append(b"]}")
                break
            kept.append(line)
    return b"[" + b"".join(kept)


def _events(text: str) -> Iterator[dict[str, Any]]:
    decode = json.JSONDecoder().raw_decode
    at = text.index("[") + 1
    while (at := _skip(text, at)) < len(text) and text[at] != "]":
        event, at = decode(text, at)
        yield event
    if at >= len(text):
        raise ValueError("the file is incomplete")


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at


def spans_of(events: Iterator[Mapping[str, Any]], epoch: int | None = None) -> Iterator[Span]:
    """Yield the spans of Chrome trace events as `execution.spans` writes them: all, or those of one epoch."""
    owners: dict[int, str] = {}
    lanes: dict[tuple[int, int], str] = {}
    for event in events:
        process, track, args = event["pid"], event["tid"], event["args"]
        if event["ph"] == "M":
            if event["name"] == "process_name":
                owners[process] = args["name"]
            else:
                lanes[process, track] = args["name"]
        elif event["ph"] == "X" and epoch in (None, args["epoch"]):
            yield _span(event, owners[process], lanes[process, track])


def _span(event: Mapping[str, Any], owner: str, lane: str) -> Span:
    args, match = event["args"], _NAME.fullmatch(event["name"])
    if match is None:
        raise ValueError(f"{event['name']!r} is not a name of a span")
    start = event["ts"] / 1e6
    return Span(
        owner=owner,
        lane=lane,
        kind=match[1],
        epoch=int(args["epoch"]),
        iteration=int(args["iteration"]),
        micro_batch=int(args["micro_batch"]),
        start=start,
        end=start + event["dur"] / 1e6,
        waiting=event["cat"] == "wait",
        device=str(args.get("device", "")),
    )

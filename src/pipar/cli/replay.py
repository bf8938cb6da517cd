"""`pipar replay`: a recorded training in virtual time, as it was and as it would have been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipar.cli.command_group import example
from pipar.cli.options import JSON, options, print_json, watched
from pipar.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pipar.launch.replay import Change, Replayed
    from pipar.recording.flight import Flight, RecordedEvent, RecordedRound


@click.command(
    short_help="Replay a recorded run: what happened, and what if.",
    epilog=example(
        "pipar replay runs/it/flight.jsonl.zst --round 7", "pipar replay flight.jsonl.zst --plan 2,4 --link-factor 2"
    ),
)
@options(
    click.argument("file", type=click.Path(path_type=Path), metavar="FILE"),
    click.option("--at", metavar="TIME", help="Show what happened at this time (UTC), as in 12:31:05."),
    click.option("--round", "number", type=int, metavar="N", help="Show what happened in this round."),
    click.option("--plan", metavar="P,N", help="What if: this split point and number of micro-batches."),
    click.option("--link-factor", type=float, metavar="X", help="What if: all links X times as fast."),
    click.option("--without", multiple=True, metavar="NAME", help="What if: without this device; repeatable."),
    JSON,
)
def replay(
    file: Path,
    at: str | None,
    number: int | None,
    plan: str | None,
    link_factor: float | None,
    without: Sequence[str],
    as_json: bool,
) -> None:
    """Run a recorded training again in virtual time, and compare its epochs.

    FILE is what `pipar server --record` or `pipar run --record` wrote, or the folder of the run. Neither the data nor
    the network is needed. --plan, --link-factor and --without ask what-if questions, and can be combined.
    """
    from pipar.launch.replay import Change, replay
    from pipar.recording import moment
    from pipar.recording.flight import Flight
    from pipar.recording.recorder import FILE

    if at is not None and number is not None:
        raise click.UsageError("--at and --round exclude each other: give only one.")
    change = Change(_plan(plan), 1.0 if link_factor is None else link_factor, frozenset(without))
    if file.is_dir() and not (file / FILE).exists():
        raise InputError(f"{file} has no recording ({FILE}): train with --record, then replay that run.")
    flight = Flight.read(file / FILE if file.is_dir() else file)
    asked = None if at is None else moment.moment_at(flight, at)
    shown = moment.round_numbered(flight, number) if number is not None else asked.round if asked is not None else None
    spans_of = frozenset() if shown is None else frozenset({shown.number})
    with watched(quiet=as_json) as display:
        as_was = replay(flight, spans_of=spans_of, observe=display.observe)
        as_if = None if change.is_none else replay(flight, change, observe=display.observe)
    document = _document(flight, as_was, as_if, change)
    if shown is not None:
        happened = moment.events_of_round(flight, shown) if asked is None else moment.events_around(flight, asked)
        offset_s = None if asked is None else asked.at - shown.start
        document |= _moment(flight, happened, shown, as_was, offset_s)
    if as_json:
        print_json(document)
        return
    from pipar.cli.tables import console

    console().print(*_lines(document), sep="\n")


def _plan(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        split_point, micro_batches = map(int, text.split(","))
    except ValueError:
        raise InputError(f"--plan {text} is not a plan: write P,N with two whole numbers, as in 2,4.") from None
    return split_point, micro_batches


# --- the document


def _document(flight: Flight, as_was: Replayed, as_if: Replayed | None, change: Change) -> dict[str, Any]:
    """Return everything that is shown, as --json prints it."""
    from pipar.recording.deviation import distrust
    from pipar.recording.moment import about_flight, utc

    rounds = [
        {
            "round": one.number,
            "began": utc(flight, one.start).isoformat(timespec="milliseconds"),
            "recorded_s": one.seconds,
            "replayed_s": as_was.results[one.number].seconds,
            "what_if_s": None if as_if is None else as_if.results[one.number].seconds,
        }
        for one in flight.rounds
    ]
    doubt = distrust(flight, {one.number: as_was.results[one.number].seconds for one in flight.rounds})
    return {**about_flight(flight), "what_if": str(change) or None, "warning": doubt or None, "epochs": rounds}


def _moment(
    flight: Flight,
    happened: Sequence[RecordedEvent],
    shown: RecordedRound,
    as_was: Replayed,
    offset_s: float | None,
) -> dict[str, Any]:
    """Return the events, and the lanes at a moment, or the stages of a whole round."""
    from dataclasses import asdict

    from pipar.execution.spans import IO
    from pipar.recording import moment

    spans = as_was.spans[shown.number]
    document: dict[str, Any] = {
        "shown": {"round": shown.number, "offset_s": offset_s},
        "events": [
            {"time": moment.utc(flight, event.at).isoformat(timespec="milliseconds"), "text": moment.event_text(event)}
            for event in happened
        ],
    }
    if offset_s is None:
        return {**document, "stages": moment.stage_means(spans)}
    start = min(span.start for span in spans if span.lane == IO and not span.waiting)
    return {**document, "lanes": [asdict(lane) for lane in moment.lanes_at(spans, start, offset_s)]}


# --- the terminal


def _lines(document: Mapping[str, Any]) -> list[RenderableType]:
    from rich.text import Text

    names = document["devices"]
    words = f"{document['model']} on {document['dataset']}, method {document['method']}, {_count(len(names), 'device')}"
    lines: list[RenderableType] = [
        Text(f"\n{words}, {_count(document['rounds'], 'round')} from {document['began']}, pipar {document['pipar']}")
    ]
    if document["unread_bytes"]:
        lines.append(Text(f"The last {document['unread_bytes']} bytes of the file cannot be read and are left out."))
    if "shown" in document:
        lines += _moment_lines(document)
    lines.append(_epochs_table(document))
    return [*lines, Text(f"\n{document['warning']}")] if document["warning"] else lines


def _epochs_table(document: Mapping[str, Any]) -> RenderableType:
    from pipar.cli.tables import new_table

    table, what_if = new_table(), document["what_if"]
    titles = ["round", "recorded s", "replayed s", "difference"]
    for title in [*titles, f"{what_if} s", "change"] if what_if else titles:
        table.add_column(title, justify="right", no_wrap=title != f"{what_if} s")
    epochs = document["epochs"]
    keys = ("recorded_s", "replayed_s", "what_if_s")
    total = {"round": "all", **{key: sum(one[key] or 0.0 for one in epochs) for key in keys}}
    for one in [*epochs, total]:
        recorded, replayed, changed = (one[key] for key in keys)
        cells = [str(one["round"]), f"{recorded:.3f}", f"{replayed:.3f}", _difference(replayed, recorded)]
        cells += [f"{changed:.3f}", _difference(changed, replayed)] if what_if else []
        table.add_row(*cells, end_section=one is epochs[-1])
    return table


def _difference(one: float, other: float) -> str:
    return f"{100 * (one / other - 1):+.1f} %" if other else "-"


def _moment_lines(document: Mapping[str, Any]) -> list[RenderableType]:
    from rich.text import Text

    from pipar.cli.tables import new_table

    shown = document["shown"]
    offset_s = shown["offset_s"]
    when = "" if offset_s is None else f", {offset_s:.3f} s after its start"
    events = new_table(header=False)
    for one in document["events"]:
        events.add_row(one["time"][11:23], Text(one["text"]))
    lines: list[RenderableType] = [Text(f"\nround {shown['round']}{when}; times in UTC")]
    lines.append(events if document["events"] else Text("no events"))
    lines.append(Text("\nmean milliseconds of each stage" if offset_s is None else "\nlanes at that time"))
    return [*lines, _stages_table(document["stages"]) if offset_s is None else _lanes_table(document["lanes"])]


def _stages_table(stages: Mapping[str, Mapping[str, float]]) -> RenderableType:
    from pipar.cli.tables import new_table
    from pipar.recording.moment import STAGES

    table = new_table()
    table.add_column("device", no_wrap=True)
    for stage in STAGES:
        table.add_column(stage, justify="right", no_wrap=True)
    for name, means in stages.items():
        table.add_row(name, *(f"{1e3 * means[stage]:.3g}" if stage in means else "-" for stage in STAGES))
    return table


def _lanes_table(lanes: Sequence[Mapping[str, Any]]) -> RenderableType:
    from pipar.cli.tables import new_table

    table = new_table()
    for title in ("owner", "lane", "doing"):
        table.add_column(title, no_wrap=True)
    for title in ("iteration", "began s", "takes s"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in lanes:
        is_idle = one["doing"] == "-"
        numbers = (
            ("", "", "")
            if is_idle
            else (str(one["iteration"] or "-"), f"{one['began_s']:.3f}", f"{one['seconds']:.3f}")
        )
        table.add_row(one["owner"], one["lane"], one["doing"], *numbers)
    return table


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

"""`pipar run` and `pipar compare`: training with one method, or with several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipar.cli.command_group import example
from pipar.cli.completion_candidates import some_of
from pipar.cli.options import (
    CONFIG,
    DASHBOARD,
    JSON,
    METHOD,
    RECORD,
    SET,
    TRAINING,
    command_line,
    live_page,
    load,
    options,
    print_json,
    watched,
)
from pipar.errors import InputError
from pipar.events import Starting, tell_all
from pipar.methods import METHODS, method
from pipar.settings.wording import training_text

if TYPE_CHECKING:
    from pipar.launch.run import World
    from pipar.settings.config import Config
from pipar.storage.result import Result

_WORLDS = [
    click.option("--virtual", is_flag=True, help="Virtual time: real training, simulated durations."),
    click.option("--timing-only", is_flag=True, help="Virtual time without training: durations only."),
    click.option("--programs", is_flag=True, help="With --timing-only: run the programs, not the simulator."),
]


@click.command(
    short_help="Train with one method.",
    epilog=example("pipar run --method pipar --epochs 3", "pipar run --virtual --devices 20 --link wifi"),
)
@options(CONFIG, METHOD, *TRAINING, *_WORLDS, RECORD, *DASHBOARD, SET, JSON)
def run(
    config: Path | None,
    virtual: bool,
    timing_only: bool,
    programs: bool,
    record: bool,
    dashboard: str | None,
    dashboard_token: str | None,
    settings: Sequence[str],
    as_json: bool,
) -> None:
    """Train with one method: a server and devices, as processes on this machine or in virtual time.

    CONFIG is a TOML file; without it, four devices train VGG-5 on digits.
    """
    world, loaded = _world(virtual, timing_only, programs), load(config, settings)
    starting = Starting("run", f"{training_text(loaded)} with {loaded.run.method}")
    with _watched(loaded, starting, dashboard, dashboard_token, quiet=as_json) as watching:
        from pipar.launch.run import run as train

        watching |= {"command": command_line(), "record": record, "programs": programs}
        result = train(loaded, world=world, report=True, **watching)
    if as_json:
        print_json(_as_json(result))
        return
    from pipar.cli.tables import console, result_table

    console().print(result_table(result, loaded))
    _say_where(result.report)


@click.command(epilog=example("pipar compare examples/demo.toml --methods fl,sfl,pipar"))
@options(
    CONFIG,
    click.option(
        "--methods",
        default="fl,sl,sfl,pipar",
        show_default=True,
        metavar="NAMES",
        shell_complete=some_of(METHODS),
        help=f"Methods in this order: {', '.join(METHODS)}.",
    ),
    *TRAINING,
    *_WORLDS,
    *DASHBOARD,
    SET,
    JSON,
)
def compare(
    config: Path | None,
    methods: str,
    virtual: bool,
    timing_only: bool,
    programs: bool,
    dashboard: str | None,
    dashboard_token: str | None,
    settings: Sequence[str],
    as_json: bool,
) -> None:
    """Train with several methods, and compare them in one table."""
    names, world, loaded = _methods(methods), _world(virtual, timing_only, programs), load(config, settings)
    starting = Starting("compare", f"{training_text(loaded)} with {', '.join(names)}")
    with _watched(loaded, starting, dashboard, dashboard_token, quiet=as_json) as watching:
        from pipar.launch.run import compare as train
        from pipar.report import try_write_comparison

        what = {"command": command_line(), "report": True, "programs": programs}
        results = train(loaded, methods=names, world=world, **what, **watching)
        page = try_write_comparison([result.folder for result in results.values()], loaded, watching["observe"])
    if as_json:
        print_json([{**_as_json(result), "comparison": _text(page)} for result in results.values()])
        return
    from pipar.cli.tables import comparison_table, console

    console().print(comparison_table(results, loaded))
    _say_where(page)


def _say_where(page: Path | None) -> None:
    """Print the path of the report, the last line of the output."""
    if page is not None:
        from rich.text import Text

        from pipar.cli.tables import console

        console().print(Text(f"Report: {page}", overflow="fold"))


def _text(page: Path | None) -> str | None:
    return None if page is None else str(page)


@contextmanager
def _watched(
    config: Config, starting: Starting, dashboard: str | None, token: str | None, *, quiet: bool
) -> Iterator[dict[str, Any]]:
    """Yield the arguments that connect a training with the terminal, and with the live page if there is one."""
    with watched(config, quiet=quiet) as display:
        display.observe(starting)
        # Also with --json, which prints its document to standard output: otherwise the URL would be unknown.
        announce = partial(click.echo, err=True) if quiet else display.say
        with live_page(dashboard, token, announce) as observers:
            yield {"observe": tell_all(display.observe, *observers), "pictures": bool(observers), "progress": False}


def _methods(text: str) -> list[str]:
    """Return the methods of a comma-separated list, each once."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError(f"--methods is empty; the methods are {', '.join(METHODS)}.")
    return list(dict.fromkeys(method(name).name for name in names))


def _world(virtual: bool, timing_only: bool, programs: bool) -> World:
    if virtual and timing_only:
        raise click.UsageError("--virtual and --timing-only exclude each other: give only one.")
    if programs and not timing_only:
        raise click.UsageError("--programs says how --timing-only computes times: give it together with --timing-only.")
    return "virtual" if virtual else "timing-only" if timing_only else "real"


def _as_json(result: Result) -> dict[str, Any]:
    return {"folder": str(result.folder), "report": _text(result.report), **result.content}

"""`pipar profile`: the time and memory of each layer on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click

from pipar.cli.command_group import example
from pipar.cli.options import CONFIG, JSON, NETWORK, SET, load, options, save, watched
from pipar.errors import InputError
from pipar.events import LOADING, Preparing, Starting
from pipar.settings.config import Config
from pipar.settings.wording import training_text
from pipar.units import parse_size

_BUDGET_S = 10.0


@click.command(
    short_help="Measure the layers on this machine.",
    epilog=example("pipar profile --model resnet18 --data cifar10 -o resnet18.json"),
)
@options(
    CONFIG,
    click.option(
        "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Also write the profile to this file."
    ),
    click.option(
        "--budget",
        type=click.FloatRange(min=0.1, max=3600),
        default=_BUDGET_S,
        show_default=True,
        metavar="SECONDS",
        help="Time for passes over the layers, at least three per batch size unless they take twice as long. Loading "
        "and other measurements add about seven seconds.",
    ),
    click.option(
        "--memory",
        metavar="SIZE",
        help="Profile only the first layers that fit, as in 512MiB.  [default: all]",
    ),
    click.option(
        "--threads",
        metavar="auto|NUMBER",
        default="auto",
        show_default=True,
        help="Threads that compute a stage; 'auto': as many as are fastest.",
    ),
    *NETWORK,
    SET,
    JSON,
)
def profile(
    config: Path | None,
    output: Path | None,
    budget: float,
    memory: str | None,
    threads: str,
    settings: Sequence[str],
    as_json: bool,
) -> None:
    """Measure the layers of a network on this machine (phase 1 of the paper's planning).

    Later runs on this machine plan with these measurements; server.profile and devices.profile accept the FILE.
    """
    loaded, memory_bytes, wanted = load(config, settings), _size(memory), _threads(threads)
    if output is not None and not output.parent.is_dir():
        raise InputError(f"Cannot write {output}: there is no folder {output.parent}.")
    started = time.monotonic()
    with watched(quiet=as_json) as display:
        display.observe(Starting("profile", training_text(loaded)))
        display.observe(Preparing(LOADING, 0.0))
        from pipar.job.profiles import measured_profile
        from pipar.job.workload import Workload

        workload = Workload(loaded)
        workload.observe = display.observe
        model = workload.checked_model()
        measured = measured_profile(
            workload,
            model,
            display.observe,
            fresh=True,
            budget_s=budget,
            memory_bytes=memory_bytes,
            on=_computes_on(loaded),
            threads=wanted,
        )
    if output is not None:
        save(measured.to_json(), output)
    if as_json:
        click.echo(measured.to_json(), nl=False)
        return
    from pipar.cli.tables import console, profile_table

    console().print(profile_table(measured))
    click.echo(f"Took {time.monotonic() - started:.0f} s, with {budget:g} s for passes over the layers (--budget).")
    if output is not None:
        click.echo(f"Written to {output}")


def _threads(text: str) -> int | Literal["auto"]:
    from pipar.job.profiles import check_threads

    if text == "auto":
        return "auto"
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise InputError(f"--threads {text} is not allowed: give a whole number from 1 on, or 'auto'.")
    check_threads(int(text), "--threads")
    return int(text)


def _size(text: str | None) -> int | None:
    if text is None:
        return None
    size = parse_size(text)
    if size < 1:
        raise InputError(f"--memory {text} is too small; give a size above 0, as in 512MiB.")
    return size


def _computes_on(config: Config) -> tuple[str, str]:
    """Return what to measure: what the server computes on or, if that is the CPU, what the first devices do."""
    server, devices = ((one.torch_device, one.autocast) for one in (config.server, config.devices[0]))
    return devices if server == ("cpu", "off") else server

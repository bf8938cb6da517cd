"""The command `python -m simulation`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from pipar.cli.command_group import example
from pipar.cli.options import JSON, options, print_json
from simulation.resources import Sample

if TYPE_CHECKING:
    from simulation.campaign import Report

_SEEDS, _DEVICES, _ROUNDS = 100, 5, 5


@click.command(
    epilog=example(
        "python -m simulation --seeds 1000 --processes 2",
        "python -m simulation --seed 17 --verbose",
        "python -m simulation --seeds 3 --rounds 1000",
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@options(
    click.option(
        "--seeds",
        type=click.IntRange(min=1),
        default=_SEEDS,
        show_default=True,
        metavar="COUNT",
        help="Number of worlds; each has its own training and faults.",
    ),
    click.option(
        "--first",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        metavar="SEED",
        help="Seed of the first world.",
    ),
    click.option("--seed", type=click.IntRange(min=0), metavar="SEED", help="Simulate only this world."),
    click.option(
        "--devices",
        type=click.IntRange(min=1, max=100),
        default=_DEVICES,
        show_default=True,
        metavar="COUNT",
        help="Devices in each world.",
    ),
    click.option(
        "--rounds",
        type=click.IntRange(min=1, max=1000),
        default=_ROUNDS,
        show_default=True,
        metavar="COUNT",
        help="Rounds in each training.",
    ),
    click.option(
        "--processes",
        type=click.IntRange(min=1, max=256),
        default=1,
        show_default=True,
        metavar="COUNT",
        help="Number of worker processes.",
    ),
    click.option("--verbose", is_flag=True, help="Print every event of one world; needs --seed."),
    JSON,
)
def simulate_worlds(
    seeds: int,
    first: int,
    seed: int | None,
    devices: int,
    rounds: int,
    processes: int,
    verbose: bool,
    as_json: bool,
) -> int:
    """Train in simulated worlds where links, devices, servers, disks and clocks fail, and check invariants.

    The programs are those of pipar server and pipar device, in virtual time. A seed always gives the same world. The
    exit code is 1 if an invariant is violated in any world.
    """
    if verbose and seed is None:
        raise click.UsageError("--verbose prints the events of one world: add its --seed.")
    if seed is not None:
        from simulation.campaign import try_seed

        reports = [try_seed(seed, devices, rounds, verbose=verbose)]
    else:
        reports = _try_all(range(first, first + seeds), devices, rounds, processes, quiet=as_json)
    if as_json:
        print_json(
            {"seeds": len(reports), "failed": [r.seed for r in reports if not r.holds], "worlds": _rows(reports)}
        )
    else:
        for line in _lines(reports, devices, rounds):
            click.echo(line)
    return 0 if all(report.holds for report in reports) else 1


def _rows(reports: Sequence[Report]) -> list[dict[str, object]]:
    return [report.to_dict() for report in reports]


def _try_all(seeds: range, devices: int, rounds: int, processes: int, *, quiet: bool) -> list[Report]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from pipar.cli.tables import console
    from simulation.campaign import try_seeds

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    reports = []
    with Progress(*columns, console=console(stderr=True), disable=quiet, transient=True) as progress:
        bar = progress.add_task("worlds", total=len(seeds))
        for report in try_seeds(seeds, devices, rounds, min(processes, len(seeds))):
            reports.append(report)
            if not report.holds:  # immediately: a thousand worlds take minutes
                progress.console.print(f"Seed {report.seed} violates '{report.invariant}'.")
            failed = sum(not one.holds for one in reports)
            progress.update(bar, advance=1, description=f"worlds, {failed} failed" if failed else "worlds")
    return sorted(reports, key=lambda report: report.seed)


def _lines(reports: Sequence[Report], devices: int, rounds: int) -> Iterator[str]:
    """Yield the printed lines: the worlds that failed, and a summary."""
    for report in reports:
        if not report.holds or report.events:
            yield f"Seed {report.seed}: {report.training}"
            yield from (f"  {fault}" for fault in report.faults)
            yield from report.events
        if not report.holds:
            yield f"Seed {report.seed} violates '{report.invariant}': {report.sentence}"
            sizes = "" if (devices, rounds) == (_DEVICES, _ROUNDS) else f" --devices {devices} --rounds {rounds}"
            yield f"To repeat it with all events: python -m simulation --seed {report.seed}{sizes} --verbose"
        if report.samples:
            yield from _resources(report)
    failed = [report.seed for report in reports if not report.holds]
    faults, restarts = sum(len(r.faults) for r in reports), sum(r.restarts for r in reports)
    virtual_s = sum(report.seconds for report in reports)
    yield (
        f"{len(reports)} worlds, {virtual_s / 3600:.1f} hours of virtual time, {faults} faults, {restarts} restarts of "
        f"the server: {'all invariants held' if not failed else f'{len(failed)} failed'}."
    )


def _resources(report: Report) -> Iterator[str]:
    """Yield ten lines of what the process used during a long world."""
    yield f"Seed {report.seed}: memory and open files of this process"
    yield "   round   RSS MiB  files"
    samples = report.samples
    for at in samples[:: max(1, len(samples) // 10)]:
        yield str(Sample(*at))

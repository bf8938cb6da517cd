"""`pipar report`: the page of a run, or of several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from pipar.cli.command_group import example
from pipar.cli.completion_candidates import a_run
from pipar.cli.options import JSON, options, print_json


@click.command(
    short_help="Write the HTML report of a run, or compare several.",
    epilog=example("pipar report runs/vgg5-digits-pipar", "pipar report runs/a runs/b --output comparison.html"),
)
@options(
    click.argument(
        "runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN [RUN ...]", shell_complete=a_run
    ),
    click.option(
        "--output",
        "-o",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="File to write.  [default: report.html in the run's folder; for several runs, in the current folder]",
    ),
    JSON,
)
def report(runs: Sequence[Path], output: Path | None, as_json: bool) -> None:
    """Write one HTML page about a run, finished or not; about several runs, a comparison.

    RUN is a run's folder. The page is one file that needs no network: open it in a browser.
    """
    from pipar.report import write_comparison, write_report

    if len(runs) == 1:
        page = write_report(runs[0], output=output)
    else:
        page = write_comparison(runs, output or Path("report.html"))
    if as_json:
        print_json({"report": str(page), "runs": [str(run) for run in runs]})
    else:
        click.echo(str(page))

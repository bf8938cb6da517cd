"""`pipar data`: known datasets, where they are, and downloading them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from pipar.cli.command_group import Group, example, help_if_alone
from pipar.cli.completion_candidates import one_of
from pipar.cli.options import JSON, SET, load, options, print_json, watched
from pipar.settings.config import DATASETS

_PATH = click.option(
    "--path",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder of datasets.  [default: $PIPAR_DATA, or ~/.cache/pipar/data]",
)


@click.group(cls=Group, no_args_is_help=False, invoke_without_command=True, epilog=example("pipar data list"))
@click.pass_context
def data(context: click.Context) -> None:
    """List known datasets, or download one."""
    help_if_alone(context)


@data.command("list", epilog=example("pipar data list", "pipar data list --path /data --json"))
@options(_PATH, SET, JSON)
def list_datasets(path: Path | None, settings: Sequence[str], as_json: bool) -> None:
    """List all known datasets, and where they are on this machine."""
    from pipar.data.catalog import data_folder, known_datasets

    place = _place(path, settings)
    known = known_datasets(place)
    if as_json:
        print_json([{**asdict(info), "builtin": info.builtin, "found": _text(info.found)} for info in known])
        return
    from pipar.cli.tables import console, datasets_table

    console().print(datasets_table(known, data_folder(place)))


@data.command(epilog=example("pipar data get cifar10", "pipar data get mnist --path /data"))
@options(
    click.argument("name", shell_complete=one_of(DATASETS)),
    _PATH,
    click.option("--mirror", metavar="URL", help="Download from here instead; same checksums."),
    SET,
    JSON,
)
def get(name: str, path: Path | None, mirror: str | None, settings: Sequence[str], as_json: bool) -> None:
    """Download the missing files of a dataset, and verify their checksums."""
    from pipar.data.fetch import fetch
    from pipar.events import Preparing

    place = _place(path, settings)
    with watched(quiet=as_json) as display:
        folder = fetch(
            name,
            place,
            base_url=mirror,
            progress=lambda file, done, total: display.observe(Preparing(file, done / total)),
        )
    if as_json:
        print_json({"name": name, "folder": _text(folder)})
    else:
        click.echo(f"{name} is built in: there is nothing to download." if folder is None else f"{name} is in {folder}")


def _place(path: Path | None, settings: Sequence[str]) -> Path | None:
    given = load(None, settings).data.path
    return path or (Path(given) if given else None)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)

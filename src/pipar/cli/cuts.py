"""`pipar cuts`: where a network can be cut, and what crosses there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from pipar.cli.command_group import example
from pipar.cli.options import CONFIG, JSON, NETWORK, SET, load, options, print_json, watched
from pipar.events import LOADING, Preparing


@click.command(
    short_help="Show where a network can be cut, and what crosses there.",
    epilog=example("pipar cuts --set model.factory=pictures:Residual", "pipar cuts --model resnet18 --json"),
)
@options(CONFIG, *NETWORK, SET, JSON)
def cuts(config: Path | None, settings: Sequence[str], as_json: bool) -> None:
    """Show each cut (P) of a network: the module before it, and the tensors and bytes of a sample that cross.

    Also shows why other places are not offered. model.cut_points limits the cuts to modules that you name.
    """
    loaded = load(config, settings)
    with watched(quiet=as_json) as display:
        display.observe(Preparing(LOADING, 0.0))
        from pipar.job.cuts import find_cuts

        found = find_cuts(loaded, display.observe)
    if as_json:
        print_json(found.to_dict())
        return
    from pipar.cli.cut_view import cuts_view
    from pipar.cli.tables import console

    console().print(cuts_view(found))

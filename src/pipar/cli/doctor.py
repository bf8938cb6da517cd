"""`pipar doctor`: whether pipar works on this machine, and how to fix what does not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from pipar.cli.command_group import example
from pipar.cli.options import CONFIG, JSON, SET, load, options, print_json


@click.command(
    short_help="Check whether pipar works on this machine.",
    epilog=example("pipar doctor", "pipar doctor train.toml --json"),
)
@options(CONFIG, SET, JSON)
def doctor(config: Path | None, settings: Sequence[str], as_json: bool) -> int:
    """Check this machine and the installation, and say how to fix problems.

    CONFIG is a TOML file; its dataset and port are checked too. The exit code is 0 if pipar works, else 1.
    """
    loaded = load(config, settings)
    from pipar.cli import doctor_checks as checks

    findings = checks.examine(loaded)
    if as_json:
        print_json(checks.as_json(findings))
    else:
        from pipar.cli.tables import console, findings_table

        console().print(findings_table(findings))
    return 0 if checks.is_usable(findings) else 1

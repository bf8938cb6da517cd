"""`pipar plan`: the chosen plans, and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from pipar.cli.command_group import example
from pipar.cli.options import (
    CONFIG,
    DEVICES,
    JSON,
    METHOD,
    NETWORK,
    PLAN,
    SET,
    load,
    options,
    print_json,
    shortcut,
    watched,
)
from pipar.events import Starting
from pipar.settings.wording import training_text


@click.command(
    short_help="Choose P and N for every device, and show why.",
    epilog=example("pipar plan --devices 20 --link wifi --exhaustive", "pipar plan fleet.toml --profile server.json"),
)
@options(
    CONFIG,
    click.option("--exhaustive", is_flag=True, help="Also try every plan; shows the best and T_opt / T."),
    click.option(
        "--profile",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Use this profile instead of measuring this machine: for the server, and for devices, scaled by --speed. "
        "Machines with a profile in CONFIG keep it.",
    ),
    shortcut(
        "--estimate",
        "plan.estimate",
        "NAME",
        "Estimate: simulation (all devices) or paper (each alone).  [default: simulation]",
        text=True,
        names=("simulation", "paper"),
    ),
    METHOD,
    *NETWORK,
    *PLAN,
    *DEVICES,
    SET,
    JSON,
)
def plan(config: Path | None, exhaustive: bool, profile: Path | None, settings: Sequence[str], as_json: bool) -> None:
    """Choose the split point (P) and the micro-batches (N) of every device, and show why.

    Nothing is trained. CONFIG is a TOML file, as for pipar run, which trains with the same plans.
    """
    loaded = load(config, settings)
    with watched(quiet=as_json) as display:
        display.observe(Starting("plan", f"{training_text(loaded)} with {loaded.run.method}"))
        from pipar.job.explain import explain
        from pipar.job.prepare import job_to_plan, with_profile
        from pipar.launch.rehearsal import rehearse

        job = job_to_plan(loaded if profile is None else with_profile(loaded, str(profile)), display.observe)
        explained = explain(job, rehearse, exhaustive=exhaustive, observe=display.observe)
    if as_json:
        print_json(explained.to_dict())
        return
    from pipar.cli.plan_view import plan_view
    from pipar.cli.tables import console

    console().print(plan_view(explained))

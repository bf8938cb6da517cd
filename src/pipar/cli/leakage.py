"""`pipar leakage`: what the activations at each cut reveal about the inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipar.cli.command_group import example
from pipar.cli.completion_candidates import one_of, some_of
from pipar.cli.options import CONFIG, JSON, NETWORK, SET, load, options, save, watched
from pipar.errors import InputError
from pipar.events import Observer, Preparing
from pipar.settings.config import MODELS

if TYPE_CHECKING:
    from pipar.job.leakage_audit import AuditResult
    from pipar.leakage.attacks import Attack

#: Names of the attacks; the module that has them imports torch.
_NAMES = ("small", "long", "decoder")
_DATA = NETWORK[1]


@click.command(
    short_help="Attack the activations at each cut, and report what leaks.",
    epilog=example(
        "pipar leakage --data cifar10 --split-points 1,2",
        "pipar leakage runs/a/config.toml --model runs/a/model.safetensors",
    ),
)
@options(
    CONFIG,
    click.option(
        "--model",
        "models",
        multiple=True,
        metavar="NAME|FILE",
        shell_complete=one_of(MODELS),
        help=f"Network ({', '.join(MODELS)}), or model.safetensors of a run for trained weights; repeat it for "
        "both.  [default: vgg5, untrained]",
    ),
    _DATA,
    click.option("--split-points", metavar="P,P", help="Cuts to attack, as in 1,2.  [default: all]"),
    click.option(
        "--attacks",
        metavar="NAME,NAME",
        shell_complete=some_of(_NAMES),
        help=f"Attacks: {', '.join(_NAMES)}.  [default: all]",
    ),
    click.option(
        "--images",
        type=click.IntRange(1, 256),
        default=16,
        show_default=True,
        metavar="COUNT",
        help="Images of the first device to attack.",
    ),
    click.option(
        "-o",
        "--output",
        type=click.Path(path_type=Path),
        default=Path(),
        metavar="FOLDER",
        help="Folder for leakage.json, .md, .csv and .png.  [default: .]",
    ),
    SET,
    JSON,
)
def leakage(
    config: Path | None,
    models: Sequence[str],
    split_points: str | None,
    attacks: str | None,
    images: int,
    output: Path,
    settings: Sequence[str],
    as_json: bool,
) -> None:
    """Try to reconstruct the inputs from the activations at each cut, as a curious server could.

    The attacker knows the device's weights and other images of the dataset. The table shows the distance correlation
    of inputs and activations and, for each attack, the pixel correlation and PSNR of its reconstructions. To exclude
    cuts that leak more than a limit, set privacy.leakage to leakage.json and privacy.max_leakage to the limit. A cut
    that resists these attacks is not proven safe.
    """
    names = [model for model in models if model in MODELS]
    loaded = load(config, [*settings, *(f'model.name="{name}"' for name in names)])
    weights, cuts, chosen = _weights(models), _numbers(split_points), _attack_names(attacks)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"Cannot write to the folder {output}: {error.strerror}; give another one.") from None
    with watched(quiet=as_json) as display:
        display.observe(Preparing("Loading torch, the network and the data", 0.0))
        from pipar.job.leakage_audit import audit_leakage
        from pipar.job.workload import Workload
        from pipar.leakage.attacks import ATTACKS

        means: dict[str, Attack] = {name: ATTACKS[name] for name in chosen}
        progress = with_time_left(display.observe)
        done = audit_leakage(
            Workload(loaded), means, weights=weights, split_points=cuts, images=images, progress=progress
        )
    written = _write(done, output)
    if as_json:
        click.echo(done.table.to_json(), nl=False)
        return
    from pipar.cli.tables import console, leakage_table

    console().print(leakage_table(done.table))
    click.echo(f"Written to {', '.join(map(str, written))}")


def with_time_left(observe: Observer, clock: Callable[[], float] = time.monotonic) -> Callable[[str, float], None]:
    """Return a callback that adds the estimated time left to the words of each progress report."""
    from pipar.monitoring.display import clock_text
    from pipar.monitoring.progress import TimeEstimate

    estimate = TimeEstimate()
    estimate.begin(0.0, clock())

    def progress(what: str, share: float) -> None:
        now = clock()
        estimate.note(min(share, 0.999), now)  # at 1, the next unit would begin
        end = estimate.ends_at(1)
        observe(Preparing(what if end is None else f"{what}, {clock_text(max(0.0, end - now))} left", share))

    return progress


def _weights(models: Sequence[str]) -> Path | None:
    """Return the file among the given models."""
    files = [model for model in models if model not in MODELS]
    if len(files) > 1:
        raise InputError(f"--model names two files, {files[0]} and {files[1]}: give the weights of one run.")
    if files and not Path(files[0]).is_file():
        raise InputError(
            f"--model {files[0]} is neither a network nor a file: the networks are {', '.join(MODELS)}, and a run's "
            "weights are in its model.safetensors."
        )
    return Path(files[0]) if files else None


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise InputError(f"--split-points {text} is not a list of layers: write numbers, as in 1,2.") from None


def _attack_names(text: str | None) -> list[str]:
    """Return the requested attacks, in the order of the table."""
    asked = _NAMES if text is None else tuple(text.split(","))
    unknown = [name for name in asked if name not in _NAMES]
    if unknown:
        raise InputError(f"--attacks names '{unknown[0]}', which is not an attack: there are {', '.join(_NAMES)}.")
    return [name for name in _NAMES if name in asked]


def _write(done: AuditResult, folder: Path) -> list[Path]:
    """Write the table in three formats, and a picture if the samples are images; return the paths."""
    from pipar.leakage.picture import can_be_drawn, draw
    from pipar.leakage.table import as_csv, as_markdown

    table = done.table
    texts = {"leakage.json": table.to_json(), "leakage.md": as_markdown(table), "leakage.csv": as_csv(table)}
    for name, text in texts.items():
        save(text, folder / name)
    written = [folder / name for name in texts]
    if can_be_drawn(table):
        picture = folder / "leakage.png"
        try:
            draw(table, done.originals, done.measured.pictures).save(picture)
        except OSError as error:
            raise InputError(f"Cannot write {picture}: {error.strerror or error}.") from None
        written.append(picture)
    return written

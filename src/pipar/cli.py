"""The command line. Bad input is one sentence and exit code 2, a failure one line and 1, Ctrl-C saves and gives 130.

What needs torch or grpc is imported by the command that needs it: help and mistakes come at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from pipar.config import DATASETS, MODELS, NAMED_LINKS, Config, load_config
from pipar.errors import InputError, PiparError
from pipar.methods import METHODS, method

if TYPE_CHECKING:
    from pipar.display import Display
    from pipar.run import Result, World

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_DEFAULT = Config()
_SETTINGS = "pipar.settings"
_PROFILE_BUDGET_S = 10.0


class Interrupted(Exception):  # noqa: N818 - it is no error
    """Ctrl-C, after everything was saved in these folders."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [folder for folder in folders if (folder / "result.json").exists()]

    def __str__(self) -> str:
        if not self.folders:
            return "Stopped before there was anything to save."
        return f"Stopped. Saved in {', '.join(f'{folder}/' for folder in self.folders)}."


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code."""
    sys.exit(_exit_code(list(sys.argv[1:] if args is None else args)))


def _exit_code(args: list[str]) -> int:
    try:
        code = cli.main(args, "pipar", standalone_mode=False, obj=shlex.join(["pipar", *args]))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except click.Abort:
        return _say("Stopped.", 130)
    except Interrupted as stopped:
        return _say(str(stopped), 130)
    except (click.UsageError, InputError) as error:
        return _say(_message(error), 2)
    except PiparError as error:
        return _say(_message(error), 1)
    except Exception as error:  # the program ends here, with one line
        if os.environ.get("PIPAR_TRACEBACK"):
            raise
        return _say(f"{type(error).__name__}: {error} (PIPAR_TRACEBACK=1 shows where.)", 1)
    return code if isinstance(code, int) else 0


def _say(message: str, code: int) -> int:
    click.echo(" ".join(message.split()), err=True)
    return code


def _message(error: Exception) -> str:
    text = error.format_message() if isinstance(error, click.ClickException) else str(error)
    # A sentence of a library may start in the middle; names of keys and datasets stay as they are.
    first = text.partition(" ")[0]
    return text[:1].upper() + text[1:] if first in ("the", "there", "a", "an", "item") else text


# --- what all commands take


def _shortcut(flag: str, key: str, metavar: str, words: str, *, text: bool = False) -> Callable[[Decorated], Decorated]:
    """Return an option that is a setting of one key; `text` keeps a name of digits from becoming a number."""

    def remember(context: click.Context, _: click.Parameter, value: str | None) -> None:
        if value is not None:
            quoted = json.dumps(value) if text and not value.startswith("{") else value
            context.meta.setdefault(_SETTINGS, []).append(f"{key}={quoted}")

    return click.option(flag, metavar=metavar, help=words, callback=remember, expose_value=False)


_RUN, _PLAN, _GROUP = _DEFAULT.run, _DEFAULT.plan, _DEFAULT.devices[0]
_METHOD = _shortcut(
    "--method", "run.method", "NAME", f"How to train: {', '.join(METHODS)}.  [default: {_RUN.method}]", text=True
)
_SHORTCUTS = [
    _shortcut("--model", "model.name", "NAME", f"The network: {', '.join(MODELS)}.  [default: vgg5]", text=True),
    _shortcut("--data", "data.name", "NAME", f"The dataset: {', '.join(DATASETS)}.  [default: digits]", text=True),
    _shortcut("--epochs", "run.epochs", "COUNT", f"Passes over the devices' data.  [default: {_RUN.epochs}]"),
    _shortcut(
        "--split-point",
        "plan.split_point",
        "P",
        f"Layers on the device (the paper's P), 1 to all; 'auto' plans it.  [default: {_PLAN.split_point}]",
    ),
    _shortcut(
        "--micro-batches",
        "plan.micro_batches",
        "N",
        f"Micro-batches in flight per iteration (the paper's N); 'auto' plans it.  [default: {_PLAN.micro_batches}]",
    ),
    _shortcut(
        "--devices",
        "devices.count",
        "COUNT",
        f"Devices (the paper's K), in each group of the configuration.  [default: {_GROUP.count}]",
    ),
    _shortcut(
        "--link",
        "devices.link",
        "NAME",
        f"Emulated link of the devices: {', '.join(NAMED_LINKS)}, or '{{up = \"5Mbit/s\"}}' (also down, latency).  "
        "[default: 4g, 10/25 Mbit/s up/down]",
        text=True,
    ),
    _shortcut(
        "--speed",
        "devices.speed",
        "SHARE",
        f"Emulated speed of a device, as a share of this machine's.  [default: {_GROUP.speed}; 1 with a profile]",
    ),
    _shortcut("--seed", "run.seed", "NUMBER", f"What all randomness is drawn from.  [default: {_RUN.seed}]"),
    _shortcut("--name", "run.name", "NAME", "Name of the run's folder.  [default: MODEL-DATA-METHOD]", text=True),
]
_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output, and nothing else.")
_SET = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Any key of the configuration, over the file; may be repeated. A device key goes to every device.",
)
_CONFIG = click.argument("config", required=False, type=click.Path(path_type=Path), metavar="[CONFIG]")
_WORLDS = [
    click.option("--virtual", is_flag=True, help="Virtual time: the real mathematics, exact times of the cost model."),
    click.option("--timing-only", is_flag=True, help="Virtual time without the mathematics: times, but no accuracy."),
]


def _options(*decorators: Callable[[Any], Any]) -> Callable[[Decorated], Decorated]:
    """Return one decorator that adds all of these, in the order in which help shows them."""

    def decorate(function: Decorated) -> Decorated:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def _example(*lines: str) -> str:
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def _load(config: Path | None, settings: Sequence[str]) -> Config:
    """Return the configuration of the command: the file, then --set, then the short options."""
    return load_config(config, [*settings, *click.get_current_context().meta.get(_SETTINGS, [])])


def _world(virtual: bool, timing_only: bool) -> World:
    if virtual and timing_only:
        raise click.UsageError("--virtual and --timing-only exclude each other: give one of them.")
    return "virtual" if virtual else "timing-only" if timing_only else "real"


def _command() -> str:
    return str(click.get_current_context().obj or "pipar")


@contextlib.contextmanager
def _watched(config: Config | None = None, *, quiet: bool) -> Iterator[Display]:
    """Give the display that watches a run; an interruption, also by SIGTERM, names the folders that were saved."""
    from pipar.display import Display
    from pipar.tables import console, setting_text

    previous = signal.signal(signal.SIGTERM, _interrupt)
    display = Display(console(stderr=True), quiet=quiet, emulated=setting_text(config) if config else "")
    try:
        with display:
            yield display
    except KeyboardInterrupt:
        raise Interrupted(display.folders) from None
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(_: int, __: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _print_json(document: Mapping[str, Any] | Sequence[Any]) -> None:
    click.echo(json.dumps(document, indent=1))


def _as_json(result: Result) -> dict[str, Any]:
    return {"folder": str(result.folder), **result.content}


# --- the commands


class _Group(click.Group):
    """A group that names its commands when it is asked for another one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise click.UsageError(f"'{args[0]}' is not a command; there are {', '.join(self.list_commands(ctx))}.")
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Group,
    no_args_is_help=False,
    invoke_without_command=True,
    epilog=_example("pipar run --virtual --epochs 2", "pipar compare --methods fl,pipar --timing-only"),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(metadata.version("pipar"), message="pipar %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Pipelined split federated learning across devices, for real or in virtual time."""
    _help_if_alone(context)


def _help_if_alone(context: click.Context) -> None:
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command(
    short_help="Train.",
    epilog=_example("pipar run --method pipar --epochs 3", "pipar run --virtual --devices 20 --link wifi"),
)
@_options(_CONFIG, _METHOD, *_SHORTCUTS, *_WORLDS, _SET, _JSON)
def run(config: Path | None, virtual: bool, timing_only: bool, settings: Sequence[str], as_json: bool) -> None:
    """Train: a server and devices, as processes on this machine or in virtual time.

    CONFIG is a TOML file; without it VGG-5 is trained on digits with four devices.
    """
    world, loaded = _world(virtual, timing_only), _load(config, settings)
    from pipar.run import run as train

    with _watched(loaded, quiet=as_json) as display:
        result = train(loaded, world=world, observe=display.observe, command=_command())
    if as_json:
        _print_json(_as_json(result))
        return
    from pipar.tables import console, result_table

    console().print(result_table(result, loaded))


@cli.command(epilog=_example("pipar compare examples/demo.toml --methods fl,sfl,pipar"))
@_options(
    _CONFIG,
    click.option(
        "--methods",
        default="fl,sl,sfl,pipar",
        show_default=True,
        metavar="NAMES",
        help=f"Methods, one after another: {', '.join(METHODS)}.",
    ),
    *_SHORTCUTS,
    *_WORLDS,
    _SET,
    _JSON,
)
def compare(
    config: Path | None, methods: str, virtual: bool, timing_only: bool, settings: Sequence[str], as_json: bool
) -> None:
    """Train the same by several methods, and show one table."""
    names, world, loaded = _methods(methods), _world(virtual, timing_only), _load(config, settings)
    from pipar.run import compare as train
    from pipar.tables import comparison_table, console

    with _watched(loaded, quiet=as_json) as display:
        results = train(loaded, methods=names, world=world, observe=display.observe, command=_command())
    if as_json:
        _print_json([_as_json(result) for result in results.values()])
    else:
        console().print(comparison_table(results, loaded))


def _methods(text: str) -> list[str]:
    """Return the methods of a list with commas, each once."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError(f"--methods names no method; there are {', '.join(METHODS)}.")
    return list(dict.fromkeys(method(name).name for name in names))


@cli.command(
    short_help="Measure the layers on this machine.",
    epilog=_example("pipar profile --model resnet18 --data cifar10 -o resnet18.json"),
)
@_options(
    _CONFIG,
    click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the profile there."),
    click.option(
        "--budget",
        type=click.FloatRange(min=0.1, max=3600),
        default=_PROFILE_BUDGET_S,
        show_default=True,
        metavar="SECONDS",
        help="Seconds that the measurement may take.",
    ),
    *_SHORTCUTS[:2],
    _SET,
    _JSON,
)
def profile(config: Path | None, output: Path | None, budget: float, settings: Sequence[str], as_json: bool) -> None:
    """Measure the layers of a network on this machine: phase 1 of the paper's planning.

    Later runs on this machine plan with what was measured; server.profile and devices.profile take the FILE.
    """
    loaded = _load(config, settings)
    if output is not None and not output.parent.is_dir():
        raise InputError(f"Cannot write {output}: there is no folder {output.parent}.")
    from pipar.prepare import measured_profile
    from pipar.workload import Workload

    with _watched(quiet=as_json) as display:
        workload = Workload(loaded)
        model = workload.checked_model()
        measured = measured_profile(workload, model, display.observe, fresh=True, budget_s=budget)
    if output is not None:
        _save(measured.to_json(), output)
    if as_json:
        click.echo(measured.to_json(), nl=False)
        return
    from pipar.tables import console, profile_table

    console().print(profile_table(measured))
    if output is not None:
        click.echo(f"Written to {output}")


def _save(text: str, path: Path) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror}.") from None


@cli.group(cls=_Group, no_args_is_help=False, invoke_without_command=True, epilog=_example("pipar data list"))
@click.pass_context
def data(context: click.Context) -> None:
    """Known datasets: where they are, and fetching them with checksums."""
    _help_if_alone(context)


_PATH = click.option(
    "--path",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Where datasets are.  [default: $PIPAR_DATA, or ~/.cache/pipar/data]",
)


def _data_path(path: Path | None, settings: Sequence[str]) -> Path | None:
    given = _load(None, settings).data.path
    return path or (Path(given) if given else None)


@data.command("list", epilog=_example("pipar data list", "pipar data list --path /data --json"))
@_options(_PATH, _SET, _JSON)
def list_datasets(path: Path | None, settings: Sequence[str], as_json: bool) -> None:
    """Show every known dataset and where it is on this machine."""
    from pipar.data.catalog import known_datasets

    known = known_datasets(_data_path(path, settings))
    if as_json:
        _print_json([{**asdict(info), "builtin": info.builtin, "found": _text(info.found)} for info in known])
        return
    from pipar.tables import console, datasets_table

    console().print(datasets_table(known))


@data.command(epilog=_example("pipar data get cifar10", "pipar data get mnist --path /data"))
@_options(
    click.argument("name"),
    _PATH,
    click.option(
        "--mirror", metavar="URL", help="Fetch the files from there instead of the publisher; same checksums."
    ),
    _SET,
    _JSON,
)
def get(name: str, path: Path | None, mirror: str | None, settings: Sequence[str], as_json: bool) -> None:
    """Download what is missing of a dataset, checked against the publisher's checksums."""
    from pipar.data.fetch import fetch
    from pipar.events import Preparing

    place = _data_path(path, settings)
    with _watched(quiet=as_json) as display:
        folder = fetch(
            name,
            place,
            base_url=mirror,
            progress=lambda file, done, total: display.observe(Preparing(file, done / total)),
        )
    if as_json:
        _print_json({"name": name, "folder": _text(folder)})
    else:
        click.echo(f"{name} is built in: there is nothing to fetch." if folder is None else f"{name} is in {folder}")


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)

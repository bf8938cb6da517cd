"""What commands share: options, reading the configuration, showing a run, printing."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from click.core import ParameterSource

from pipar.cli.command_group import Interrupted
from pipar.cli.completion_candidates import a_setting, one_of
from pipar.errors import InputError
from pipar.methods import METHODS
from pipar.settings.config import DATASETS, MODELS, Config, hints
from pipar.settings.config_file import load_config
from pipar.settings.links import NAMED_LINKS
from pipar.settings.values import TRACKERS

if TYPE_CHECKING:
    from pipar.events import Event, Observer
    from pipar.monitoring.display import Display

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_DEFAULT = Config()
_RUN, _PLAN, _GROUP = _DEFAULT.run, _DEFAULT.plan, _DEFAULT.devices[0]
_SETTINGS = "pipar.settings"
_TYPED = ParameterSource.COMMANDLINE


def shortcut(
    flag: str, key: str, metavar: str, words: str, *, text: bool = False, names: Iterable[str] = ()
) -> Callable[[Decorated], Decorated]:
    """Return an option that sets one configuration key; `text` keeps a name of digits from becoming a number.

    `names` are offered by shell completion.
    """

    def remember(context: click.Context, _: click.Parameter, value: str | None) -> None:
        if value is not None:
            quoted = json.dumps(value) if text and not value.startswith("{") else value
            context.meta.setdefault(_SETTINGS, []).append(f"{key}={quoted}")

    return click.option(
        flag, metavar=metavar, help=words, callback=remember, expose_value=False, shell_complete=one_of(names)
    )


def _remember_trackers(context: click.Context, _: click.Parameter, names: tuple[str, ...]) -> None:
    if names:
        context.meta.setdefault(_SETTINGS, []).append(f"run.trackers={json.dumps(names)}")


METHOD = shortcut(
    "--method",
    "run.method",
    "NAME",
    f"Method: {', '.join(METHODS)}.  [default: {_RUN.method}]",
    text=True,
    names=METHODS,
)
NETWORK = [
    shortcut(
        "--model",
        "model.name",
        "NAME",
        f"Network: {', '.join(MODELS)}.  [default: vgg5]",
        text=True,
        names=MODELS,
    ),
    shortcut(
        "--data",
        "data.name",
        "NAME",
        f"Dataset: {', '.join(DATASETS)}.  [default: digits]",
        text=True,
        names=DATASETS,
    ),
]
TRACKER = click.option(
    "--tracker",
    multiple=True,
    metavar="NAME",
    callback=_remember_trackers,
    expose_value=False,
    shell_complete=one_of(TRACKERS),
    help=f"Also log the run to this tracker: {', '.join(TRACKERS)}; repeatable.",
)
EPOCHS = shortcut("--epochs", "run.epochs", "COUNT", f"Number of epochs (rounds).  [default: {_RUN.epochs}]")
PLAN = [
    shortcut(
        "--split-point",
        "plan.split_point",
        "P",
        f"Layers on the device (the paper's P); 'auto' plans it.  [default: {_PLAN.split_point}]",
        names=["auto"],
    ),
    shortcut(
        "--micro-batches",
        "plan.micro_batches",
        "N",
        f"Micro-batches per batch (the paper's N); 'auto' plans it.  [default: {_PLAN.micro_batches}]",
        names=["auto"],
    ),
]
DEVICES = [
    shortcut(
        "--devices",
        "devices.count",
        "COUNT",
        f"Devices (the paper's K) per group.  [default: {_GROUP.count}]",
    ),
    shortcut(
        "--link",
        "devices.link",
        "NAME",
        f"Emulated link: {', '.join(NAMED_LINKS)}, '{{up = \"5Mbit/s\"}}' (also down, latency), or a changing one, "
        '\'{cycle = ["4g", "wifi"], every = "60s"}\'.  [default: 4g, 10/25 Mbit/s up/down]',
        text=True,
        names=NAMED_LINKS,
    ),
    shortcut(
        "--speed",
        "devices.speed",
        "SHARE",
        f"Emulated device speed, as a share of this machine's.  [default: {_GROUP.speed}; 1 with devices.profile]",
    ),
]
#: The options of a training, except its method.
TRAINING = [
    *NETWORK,
    EPOCHS,
    *PLAN,
    *DEVICES,
    shortcut("--seed", "run.seed", "NUMBER", f"Seed of all randomness.  [default: {_RUN.seed}]"),
    shortcut("--name", "run.name", "NAME", "Folder of the run.  [default: MODEL-DATA-METHOD]", text=True),
    TRACKER,
]
RECORD = click.option("--record", is_flag=True, help="Record the run, for `pipar replay`.  [default: off]")
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
SET = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    shell_complete=a_setting,
    help="Override a configuration key; repeatable. A devices key applies to every device.",
)
#: The address of the live page if --dashboard has no value: any free port of this machine.
_ANY_PORT = "127.0.0.1:0"
_TOKEN = "--dashboard-token"
DASHBOARD = [
    click.option(
        "--dashboard",
        is_flag=False,
        flag_value=_ANY_PORT,
        metavar="[HOST:PORT]",
        help=f"Serve a live page during the training.  [default: off; without a value {_ANY_PORT}, any free port]",
    ),
    click.option(
        _TOKEN,
        metavar="TOKEN",
        envvar="PIPAR_DASHBOARD_TOKEN",
        help="Token that a browser needs; 'auto' creates one.  [default: none on loopback, else auto]",
    ),
]
CONFIG = click.argument("config", required=False, type=click.Path(path_type=Path), metavar="[CONFIG]")


def options(*decorators: Callable[[Any], Any]) -> Callable[[Decorated], Decorated]:
    """Return one decorator that adds all of these, in the order in which the help shows them."""

    def decorate(function: Decorated) -> Decorated:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def load(config: Path | None, settings: Sequence[str]) -> Config:
    """Return the configuration of the command: the file, then --set, then the short options."""
    loaded = load_config(config, [*settings, *click.get_current_context().meta.get(_SETTINGS, [])])
    for hint in hints(loaded):
        click.echo(hint, err=True)
    return loaded


def as_setting(error: click.NoSuchOption) -> str:
    """Return a hint if an unknown option has the name of a key and the command has --set, else an empty text."""
    takes_settings = error.ctx is not None and any("--set" in one.opts for one in error.ctx.command.params)
    word = error.option_name.lstrip("-").replace("-", "_").replace(".", "_")
    sections = {name: type(getattr(_DEFAULT, name)) for name in Config.model_fields} | {"devices": type(_GROUP)}
    keys = [
        f"--set {section}.{key}=VALUE"
        for section, model in sections.items()
        for key in model.model_fields
        if word in (key, f"{section}_{key}")
    ]
    return f" It is a key of the configuration: write {' or '.join(keys)}." if keys and takes_settings else ""


def of_other_commands(error: click.NoSuchOption, commands: Sequence[str]) -> str:
    """Return the sentence about an option that only other commands have."""
    here = "this command" if error.ctx is None else f"`{error.ctx.command_path}`"
    return f"No such option '{error.option_name}' of {here}: it belongs to `pipar {'` and `pipar '.join(commands)}`."


def command_line() -> str:
    """Return the typed command without secrets: it is written to the run's folder."""
    typed = str(click.get_current_context().obj or "pipar")
    return re.sub(rf"({_TOKEN}[= ])('[^']*'|\S+)", r"\1...", typed)


@contextlib.contextmanager
def live_page(address: str | None, token: str | None, announce: Callable[[str], None]) -> Iterator[list[Observer]]:
    """Yield the observers of the live page, none without an address; `announce` gets its URL.

    The URL is announced with the first event, so that an earlier error stays the only line.
    """
    if address is None:
        if token is not None and click.get_current_context().get_parameter_source("dashboard_token") is _TYPED:
            raise InputError(f"{_TOKEN} is for the live page: add --dashboard.")
        yield []
        return
    if ":" not in address:
        raise InputError(
            f"--dashboard {address} is not an address: write HOST:PORT, or --dashboard after all other words."
        )
    from pipar.live_page.serve import served

    with served(address, token) as dashboard:
        is_announced = False

        def observe(event: Event) -> None:
            nonlocal is_announced
            if not is_announced:
                is_announced = True
                announce(f"Live page: {dashboard.url}")
            dashboard.observe(event)

        yield [observe]


@contextlib.contextmanager
def watched(config: Config | None = None, *, quiet: bool) -> Iterator[Display]:
    """Yield the display of a run; an interruption, also by SIGTERM, raises `Interrupted` with its saved folders."""
    from pipar.cli.tables import console
    from pipar.monitoring.display import Display
    from pipar.settings.wording import setting_text

    display = Display(console(stderr=True), quiet=quiet, emulated=setting_text(config) if config else "")
    try:
        with interrupted_by_sigterm(), display:
            yield display
    except KeyboardInterrupt:
        raise Interrupted(display.folders) from None


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C."""
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(_: int, __: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def print_json(document: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print a document to standard output."""
    click.echo(json.dumps(document, indent=1))


def save(text: str, path: Path) -> None:
    """Write a file, or raise an InputError that names it."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror}.") from None

"""`pipar server` and `pipar device`: training across real machines."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn, cast

import click

from pipar.cli.options import (
    CONFIG,
    DASHBOARD,
    EPOCHS,
    METHOD,
    SET,
    TRACKER,
    command_line,
    example,
    live_page,
    load,
    options,
)
from pipar.errors import ConfigError, CredentialError, InputError, PiparError
from pipar.events import Failed, Observer, Starting, Stopping, tell_all
from pipar.monitoring.logs import LOGGER
from pipar.units import parse_duration, split_address
from pipar.wording import training_text

_LOGS = [
    click.option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="Lines for people, or one JSON object a line.",
    ),
    click.option(
        "--metrics", metavar="HOST:PORT", help="Serve /healthz and Prometheus /metrics there.  [default: not at all]"
    ),
]
_CERTS = click.option(
    "--certs",
    type=click.Path(path_type=Path),
    help="The folder that `pipar certs` made.  [default: no TLS, loopback only]",
)
_INSECURE = click.option("--insecure", is_flag=True, help="Allow an address beyond loopback without TLS.")


@click.command(
    short_help="Be the server of a deployment.",
    epilog=example("pipar server train.toml --listen 0.0.0.0:7700 --certs certs", "pipar server train.toml --resume"),
)
@options(
    CONFIG,
    click.option("--listen", metavar="HOST:PORT", help="Where devices connect.  [default: server.listen]"),
    click.option("--resume", is_flag=True, help="Go on behind the last round that was saved, if one was."),
    _CERTS,
    click.option("--tokens", is_flag=True, help="Devices show tokens of the folder instead of certificates."),
    _INSECURE,
    METHOD,
    EPOCHS,
    TRACKER,
    *DASHBOARD,
    *_LOGS,
    SET,
)
def server(
    config: Path | None,
    listen: str | None,
    resume: bool,
    certs: Path | None,
    tokens: bool,
    insecure: bool,
    dashboard: str | None,
    dashboard_token: str | None,
    log_format: str,
    metrics: str | None,
    settings: Sequence[str],
) -> int:
    """Wait for devices, train with them, save, and exit.

    Devices may come and go while it trains. SIGTERM and Ctrl-C save and stop; --resume goes on behind the last round.
    """
    loaded = load(config, settings)
    from pipar.transport.tls import ServerSecurity, check_server

    security = ServerSecurity(insecure=insecure)
    if certs is not None:
        _check_folder(certs, "`pipar certs init` makes one")
        security = replace(ServerSecurity.from_folder(certs, tokens=tokens), insecure=insecure)
    elif tokens:
        raise InputError("--tokens needs the folder that they are in: give it with --certs.")
    address = listen or loaded.server.listen
    check_server(security, address)  # before anything that takes a while
    page = live_page(dashboard, dashboard_token, logging.getLogger(LOGGER).info)
    with _observed(log_format, metrics) as observe, page as observers:
        observe(Starting("server", training_text(loaded), _place_text(address)))
        from pipar.launch.deployed_server import ServerOptions, serve

        asked = ServerOptions(address, security, resume, command_line(), pictures=bool(observers))
        return serve(loaded, asked, tell_all(observe, *observers))


@click.command(
    short_help="Be a device of a deployment.",
    epilog=example("pipar device train.toml --server 192.168.0.5:7700 --name pi-1 --certs certs"),
)
@options(
    CONFIG,
    click.option("--server", "address", metavar="HOST:PORT", required=True, help="Where the server listens."),
    click.option("--name", required=True, help="Whose device this is; with a credential, the name in it."),
    click.option("--data", metavar="PATH", help="A folder with the data of this device, all of it its own."),
    _CERTS,
    click.option("--token-file", type=click.Path(path_type=Path), help="A file with the token of this device."),
    click.option("--server-name", metavar="NAME", help="The name in the server's certificate, if it is another one."),
    _INSECURE,
    click.option(
        "--give-up-after", metavar="DURATION", help="Stop trying to reach the server, as in 10min.  [default: never]"
    ),
    click.option(
        "--noise-seed",
        type=int,
        metavar="N",
        help="Noise that can be repeated, for tests only: who knows N can take it off.  [default: known to nobody]",
    ),
    click.option(
        "--privacy-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Where this device keeps what it has spent of its privacy, and how its labels were told, over restarts.",
    ),
    *_LOGS,
    SET,
)
def device(
    config: Path | None,
    address: str,
    name: str,
    data: str | None,
    certs: Path | None,
    token_file: Path | None,
    server_name: str | None,
    insecure: bool,
    give_up_after: str | None,
    noise_seed: int | None,
    privacy_file: Path | None,
    log_format: str,
    metrics: str | None,
    settings: Sequence[str],
) -> int:
    """Join a training with this machine's data, and take part to its end.

    A server that cannot be reached is tried again, for ever or for as long as --give-up-after says.
    """
    loaded = load(config, settings)
    from pipar.transport.tls import DeviceSecurity, check_device

    security = DeviceSecurity(insecure=insecure, server_name=server_name)
    if certs is not None:
        from pipar.transport.credentials import read_token

        _check_folder(certs, "copy ca.pem and what `pipar certs issue` has made for this device into one")
        own = DeviceSecurity.from_folder(certs, name)
        if token_file is not None:
            own = replace(own, certificate=None, key=None, token=read_token(token_file))
        security = replace(own, insecure=insecure, server_name=server_name)
    elif token_file is not None:
        raise InputError("--token-file needs the folder with the server's authority: give it with --certs.")
    try:
        give_up_after_s = None if give_up_after is None else parse_duration(give_up_after)
    except (ConfigError, ValueError) as error:
        raise InputError(f"--give-up-after {give_up_after} is not a duration: {error}") from None
    check_device(security, address)  # before anything that takes a while
    with _observed(log_format, metrics) as observe:
        observe(Starting("device", f"{training_text(loaded)} as {name}", address))
        from pipar.launch.deployed_device import DeviceOptions, take_part

        try:
            asked = DeviceOptions(name, address, security, data, give_up_after_s, noise_seed, privacy_file)
            return take_part(loaded, asked, observe)
        except CredentialError as error:
            raise InputError(str(error)) from None  # trying again is no use


def _check_folder(certs: Path, otherwise: str) -> None:
    if not certs.is_dir():
        raise InputError(f"There is no folder {certs}: {otherwise}.")


def _place_text(address: str) -> str:
    """Return an address for people: which port is free is not known before one listens."""
    host, port = split_address(address)
    return address if port else f"any free port of {host}"


@contextmanager
def _observed(log_format: str, metrics: str | None) -> Iterator[Observer]:
    """Give an observer that logs and counts; a failure is logged, too, before the command ends with it."""
    from pipar.monitoring.logs import LogFormat, logged
    from pipar.monitoring.metrics import monitored

    with logged(cast(LogFormat, log_format)) as log, monitored(metrics) as monitor, _ended_by_sigterm():
        observe = tell_all(log, monitor.observe)
        try:
            yield observe
        except SystemExit:
            observe(Stopping("It was asked to stop."))
            raise
        except PiparError as error:
            monitor.observe(Failed(str(error)))
            if log_format == "json":  # as text, it is the last line of the command anyway
                log(Failed(str(error)))
            raise


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the command with exit code 0 before and behind the training, too, which handles it itself."""
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(_: int, __: FrameType | None) -> NoReturn:
    raise SystemExit(0)

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

from pipar.cli.command_group import example
from pipar.cli.options import (
    CONFIG,
    DASHBOARD,
    EPOCHS,
    METHOD,
    RECORD,
    SET,
    TRACKER,
    command_line,
    live_page,
    load,
    options,
)
from pipar.errors import (
    AddressInUseError,
    ConfigError,
    CredentialError,
    DeviceRefusedError,
    InputError,
    LinkError,
    NetworkRefusedError,
    PiparError,
)
from pipar.events import Failed, Observer, Starting, Stopping, tell_all
from pipar.monitoring.logs import LOGGER
from pipar.settings.wording import training_text
from pipar.units import parse_duration, split_address

_LOGS = [
    click.option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="Plain lines, or one JSON object per line.",
    ),
    click.option("--metrics", metavar="HOST:PORT", help="Serve /healthz and /metrics (Prometheus).  [default: off]"),
]
_CERTS = click.option(
    "--certs",
    type=click.Path(path_type=Path),
    help="Folder of `pipar certs`; without it, loopback only.",
)
_INSECURE = click.option("--insecure", is_flag=True, help="Allow addresses beyond loopback without TLS.")


@click.command(
    short_help="Run the server of a deployment.",
    epilog=example("pipar server train.toml --listen 0.0.0.0:7700 --certs certs", "pipar server train.toml --resume"),
)
@options(
    CONFIG,
    click.option("--listen", metavar="HOST:PORT", help="Address for devices.  [default: server.listen]"),
    click.option("--resume", is_flag=True, help="Resume after the last saved round, if any."),
    _CERTS,
    click.option("--tokens", is_flag=True, help="Devices use tokens instead of certificates."),
    _INSECURE,
    METHOD,
    EPOCHS,
    TRACKER,
    RECORD,
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
    record: bool,
    dashboard: str | None,
    dashboard_token: str | None,
    log_format: str,
    metrics: str | None,
    settings: Sequence[str],
) -> int:
    """Wait for devices, train with them, save the result, and exit.

    Devices may join and leave during the training. SIGTERM and Ctrl-C save and stop; --resume continues after the last
    saved round.
    """
    loaded = load(config, settings)
    from pipar.transport.tls import ServerSecurity, check_server

    security = ServerSecurity(insecure=insecure)
    if certs is not None:
        _check_folder(certs, "create one with `pipar certs init`")
        security = replace(ServerSecurity.from_folder(certs, tokens=tokens), insecure=insecure)
    elif tokens:
        raise InputError("--tokens needs the folder with tokens.json: give it with --certs.")
    address = listen or loaded.server.listen
    check_server(security, address)  # before anything slow
    page = live_page(dashboard, dashboard_token, logging.getLogger(LOGGER).info)
    with _retried_if_in_use(), _observed(log_format, metrics) as observe, page as observers:
        observe(Starting("server", training_text(loaded), _place_text(address)))
        from pipar.launch.deployed_server import ServerOptions, serve

        asked = ServerOptions(address, security, resume, command_line(), pictures=bool(observers), record=record)
        return serve(loaded, asked, tell_all(observe, *observers))


@click.command(
    short_help="Run a device of a deployment.",
    epilog=example("pipar device train.toml --server 192.168.0.5:7700 --name pi-1 --certs certs"),
)
@options(
    CONFIG,
    click.option("--server", "address", metavar="HOST:PORT", required=True, help="Address of the server."),
    click.option("--name", required=True, help="Device name; must match its credential."),
    click.option("--data", metavar="PATH", help="Folder with this device's data; all of it is used."),
    _CERTS,
    click.option("--token-file", type=click.Path(path_type=Path), help="File with the token of this device."),
    click.option("--server-name", metavar="NAME", help="Name in the server's certificate, if different."),
    _INSECURE,
    click.option(
        "--give-up-after", metavar="DURATION", help="Stop reconnecting after this time, as in 10min.  [default: never]"
    ),
    click.option(
        "--noise-seed",
        type=int,
        metavar="N",
        help="Repeatable noise, for tests only: anyone who knows N can remove the noise.  [default: secret]",
    ),
    click.option(
        "--privacy-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Keep the spent privacy budget and randomised labels here across restarts.",
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
    """Join a training with this machine's data, and take part until it ends.

    If the server cannot be reached, the device keeps trying, at most for --give-up-after.
    """
    loaded = load(config, settings)
    from pipar.transport.tls import DeviceSecurity, check_device

    security = DeviceSecurity(insecure=insecure, server_name=server_name)
    if certs is not None:
        _check_folder(certs, "copy ca.pem and the files that `pipar certs issue` made for this device into one")
        own = DeviceSecurity.from_folder(certs, name)
        if token_file is not None:
            own = replace(own, certificate=None, key=None, token_file=token_file)
        security = replace(own, insecure=insecure, server_name=server_name)
    elif token_file is not None:
        raise InputError("--token-file needs the folder with ca.pem: give it with --certs.")
    try:
        give_up_after_s = None if give_up_after is None else parse_duration(give_up_after)
    except (ConfigError, ValueError) as error:
        raise InputError(f"--give-up-after {give_up_after} is not a duration: {error}") from None
    check_device(security, address)  # before anything slow
    with _retried_if_in_use(), _observed(log_format, metrics) as observe:
        observe(Starting("device", f"{training_text(loaded)} as {name}", address))
        from pipar.launch.deployed_device import DeviceOptions, take_part

        try:
            asked = DeviceOptions(name, address, security, data, give_up_after_s, noise_seed, privacy_file)
            return take_part(loaded, asked, observe)
        except DeviceRefusedError as error:
            raise InputError(str(error)) from None  # another attempt would fail too
        except (NetworkRefusedError, CredentialError) as error:
            # A verified server, or one on this machine, has another network; without TLS, the device lacks its options.
            if insecure or (isinstance(error, CredentialError) and security.ca is not None):
                raise
            raise InputError(str(error)) from None


def _check_folder(certs: Path, otherwise: str) -> None:
    if not certs.is_dir():
        raise InputError(f"There is no folder {certs}: {otherwise}.")


def _place_text(address: str) -> str:
    """Return the address as shown to people; a free port is not known before the server listens."""
    host, port = split_address(address)
    return address if port else f"any free port of {host}"


@contextmanager
def _observed(log_format: str, metrics: str | None) -> Iterator[Observer]:
    """Yield an observer that logs and counts events; an error is logged too, before it ends the command."""
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
            if log_format != "json":  # the error is the last line of the command
                raise
            log(Failed(str(error)))
            raise click.exceptions.Exit(2 if isinstance(error, InputError) else 1) from None


@contextmanager
def _retried_if_in_use() -> Iterator[None]:
    """Let an address in use end a service with exit code 1, after which systemd starts it again, and not with 2."""
    try:
        yield
    except AddressInUseError as error:
        raise LinkError(str(error)) from None


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the command with exit code 0 also before and after the training, which handles it itself."""
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(_: int, __: FrameType | None) -> NoReturn:
    raise SystemExit(0)

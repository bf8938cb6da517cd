"""`pipar certs`: a certificate authority, the server's certificate, certificates and tokens of devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from pipar.cli.command_group import Group, example, help_if_alone
from pipar.cli.options import JSON, options, print_json

_FOLDER = click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path("certs"),
    show_default=True,
    metavar="FOLDER",
    help="Folder of certificates and tokens.",
)
_HOSTS = click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME_OR_IP",
    help="Name or address of the server; repeatable. Always includes localhost.",
)
_DAYS = click.option(
    "--days", type=int, default=365, show_default=True, metavar="N", help="Days until a certificate expires."
)
_FORCE = click.option("--force", is_flag=True, help="Replace what exists.")


@click.group(cls=Group, no_args_is_help=False, invoke_without_command=True, epilog=example("pipar certs init"))
@click.pass_context
def certs(context: click.Context) -> None:
    """Create certificates and tokens for a deployment."""
    help_if_alone(context)


@certs.command(epilog=example("pipar certs init --host 192.168.0.5", "pipar certs init --host train.local --days 90"))
@options(_FOLDER, _HOSTS, _DAYS, _FORCE, JSON)
def init(folder: Path, hosts: Sequence[str], days: int, force: bool, as_json: bool) -> None:
    """Create a certificate authority and the server's certificate.

    The authority is valid for ten years. Its ca.key signs certificates and stays here; the server needs server.pem,
    server.key, ca.pem and denied.json.
    """
    from pipar.private_files import refuse_existing, write_private
    from pipar.transport.certificates import make_authority, make_server

    place = _Place(folder)
    refuse_existing([place.ca, place.ca_key, place.server, place.server_key], force=force)
    authority = make_authority()
    server = make_server(authority, hosts, days)
    write_private(place.ca_key, authority.key_pem)
    write_private(place.ca, authority.certificate_pem, mode=0o644)
    write_private(place.server_key, server.key_pem)
    write_private(place.server, server.certificate_pem, mode=0o644)
    for listing in (place.issued, place.denied):  # clears those of an earlier authority
        write_private(listing, b"{}\n")
    _say_server(place, server.expires, hosts, as_json=as_json)


@certs.command(epilog=example("pipar certs server --host 192.168.0.5 --force"))
@options(_FOLDER, _HOSTS, _DAYS, _FORCE, JSON)
def server(folder: Path, hosts: Sequence[str], days: int, force: bool, as_json: bool) -> None:
    """Create a new server certificate, for other hosts or on expiry."""
    from pipar.private_files import refuse_existing, write_private
    from pipar.transport.certificates import make_server, read_authority

    place = _Place(folder)
    authority = read_authority(place.ca, place.ca_key)
    refuse_existing([place.server, place.server_key], force=force)
    made = make_server(authority, hosts, days)
    write_private(place.server_key, made.key_pem)
    write_private(place.server, made.certificate_pem, mode=0o644)
    _say_server(place, made.expires, hosts, as_json=as_json)


@certs.command(epilog=example("pipar certs issue pi-1 pi-2"))
@options(click.argument("names", nargs=-1, required=True, metavar="NAME..."), _FOLDER, _DAYS, _FORCE, JSON)
def issue(names: Sequence[str], folder: Path, days: int, force: bool, as_json: bool) -> None:
    """Create a certificate for each named device.

    A device needs its own two files and ca.pem.
    """
    from pipar.private_files import refuse_existing, write_private
    from pipar.transport.certificates import make_device, read_authority
    from pipar.transport.credentials import add_serials, check_device_name

    place = _Place(folder)
    for name in names:
        check_device_name(name)
    authority = read_authority(place.ca, place.ca_key)
    refuse_existing([path for name in names for path in place.device(name)], force=force)
    issued = []
    for name in dict.fromkeys(names):
        made = make_device(authority, name, days)
        certificate, key = place.device(name)
        add_serials(place.issued, name, [made.serial])  # first: an unlisted certificate could not be revoked
        write_private(key, made.key_pem)
        write_private(certificate, made.certificate_pem, mode=0o644)
        issued.append({"name": name, "certificate": str(certificate), "key": str(key), "expires": made.expires})
    if as_json:
        print_json({"ca": str(place.ca), "devices": issued})
        return
    for entry in issued:
        click.echo(f"{entry['name']}: {entry['certificate']} and {entry['key']}, valid until {entry['expires']}")


@certs.command(epilog=example("pipar certs token pi-1 > pi-1.token"))
@options(click.argument("name"), _FOLDER, _FORCE, JSON)
def token(name: str, folder: Path, force: bool, as_json: bool) -> None:
    """Create a token for a device, and print it once.

    Only its hash is stored, in tokens.json for the server.
    """
    from pipar.transport.credentials import add_token

    place = _Place(folder)
    issued = add_token(place.tokens, name, force=force)
    if as_json:
        print_json({"name": name, "token": issued, "tokens": str(place.tokens)})
        return
    click.echo(issued)
    click.echo(f"This is the token of {name}; it is not shown again. Its hash is in {place.tokens}.", err=True)


@certs.command(epilog=example("pipar certs revoke pi-1"))
@options(click.argument("name"), _FOLDER, JSON)
def revoke(name: str, folder: Path, as_json: bool) -> None:
    """Revoke a device's token and certificates.

    A running server disconnects the device once it has the changed files.
    """
    from pipar.errors import InputError
    from pipar.transport.credentials import move_serials, remove_token

    place = _Place(folder)
    certificates = move_serials(place.issued, place.denied, name)
    had_token = remove_token(place.tokens, name)
    if not certificates and not had_token:
        raise InputError(f"{name} has neither a certificate nor a token in {folder}; nothing was revoked.")
    if as_json:
        print_json({"name": name, "certificates": certificates, "token": had_token})
        return
    what = [f"{certificates} certificate{'s' * (certificates > 1)}"] * bool(certificates) + ["its token"] * had_token
    click.echo(f"{name}: revoked {' and '.join(what)}.")


class _Place:
    """The files of a folder; those of devices are in a subfolder, so that a device may have any name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca, self.ca_key = folder / "ca.pem", folder / "ca.key"
        self.server, self.server_key = folder / "server.pem", folder / "server.key"
        self.issued, self.denied = folder / "issued.json", folder / "denied.json"
        self.tokens = folder / "tokens.json"

    def device(self, name: str) -> tuple[Path, Path]:
        return self.folder / "devices" / f"{name}.pem", self.folder / "devices" / f"{name}.key"


def _say_server(place: _Place, expires: str, hosts: Sequence[str], *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "ca": str(place.ca),
                "certificate": str(place.server),
                "key": str(place.server_key),
                "hosts": list(hosts),
                "expires": expires,
            }
        )
        return
    names = ", ".join(dict.fromkeys([*hosts, "localhost"]))
    click.echo(f"Server: {place.server} and {place.server_key}, for {names}, valid until {expires}.")
    click.echo(f"Keep {place.ca_key} here; copy {place.ca} to every device. Next: pipar certs issue NAME")

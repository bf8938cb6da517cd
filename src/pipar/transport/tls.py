"""The security of a connection: the files that it needs, and their checks.

`ServerSecurity` and `DeviceSecurity` are what the user asked for. `check_server` and `check_device` read the files and
find everything that is wrong with them before a socket is opened.
"""

from __future__ import annotations

import ipaddress
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from pipar.errors import InputError
from pipar.private_files import read_bytes
from pipar.transport.credentials import Tokens, is_token, read_serials, read_token, read_tokens
from pipar.units import split_address

AUTHORIZATION = "authorization"
SCHEME = "Bearer "


@dataclass(frozen=True)
class ServerSecurity:
    """How a server protects itself. No protection is allowed on loopback only.

    With `client_ca` a device needs a certificate of that authority, with `tokens` a token of that file; with both it
    needs both, for the same name. `tokens` may also be given without a file. `denied` lists revoked certificates; the
    file may be missing until the first one is revoked. `insecure` allows connections without encryption or credentials.
    """

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    tokens: Path | Tokens | None = None
    denied: Path | None = None
    insecure: bool = False

    @classmethod
    def from_folder(cls, folder: Path, *, tokens: bool = False) -> ServerSecurity:
        """Return the settings for a folder of `pipar certs`: devices use certificates or, with `tokens`, tokens."""
        certificate, key = folder / "server.pem", folder / "server.key"
        if tokens:
            return cls(certificate, key, tokens=folder / "tokens.json")
        return cls(certificate, key, client_ca=folder / "ca.pem", denied=folder / "denied.json")

    @property
    def knows_devices(self) -> bool:
        return self.client_ca is not None or self.tokens is not None


@dataclass(frozen=True)
class DeviceSecurity:
    """How a device identifies itself to its server, and verifies the server.

    `server_name` is the name in the server's certificate, if it differs from the host that the device connects to.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None  # in place of `token`: read for every connection, so that it can be replaced
    server_name: str | None = None
    insecure: bool = False

    @classmethod
    def from_folder(cls, folder: Path, name: str) -> DeviceSecurity:
        """Return the settings for a device in a folder of `pipar certs issue NAME`."""
        return cls(folder / "ca.pem", folder / "devices" / f"{name}.pem", folder / "devices" / f"{name}.key")

    @property
    def has_token(self) -> bool:
        return self.token is not None or self.token_file is not None

    def metadata(self) -> list[tuple[str, str]]:
        """Return the metadata with which the device opens its stream, with its token as it is now."""
        token = self.token if self.token_file is None else read_token(self.token_file)
        return [] if token is None else [(AUTHORIZATION, SCHEME + token)]


@dataclass(frozen=True)
class Material:
    """The PEM bytes for one end of TLS: its own certificate and key, and the authorities that it trusts."""

    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    authorities: bytes | None = None


# --- addresses


def is_loopback(address: str) -> bool:
    """Return whether HOST:PORT stays on this machine; of names, only localhost is known to."""
    host, _ = split_address(address)
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# --- checks


def check_server(security: ServerSecurity, address: str) -> Material | None:
    """Return the material for the server's TLS, None for no TLS; raise if the address or a file is not usable."""
    split_address(address)
    _check_both("server", security.certificate, security.key)
    if security.certificate is None or security.key is None:
        if security.client_ca is not None:
            raise InputError(
                "Certificates of devices can be checked only over TLS: give the server a certificate and a key."
            )
        _check_plain(security.insecure, address, "listen on", has_token=security.tokens is not None)
        _check_files(security)
        return None
    if not (security.knows_devices or security.insecure or is_loopback(address)):
        raise InputError(
            f"Any program could join at {address}: require certificates of devices (give an authority) or tokens (give "
            "a file of tokens), or allow it with --insecure."
        )
    _check_files(security)
    return server_material(security)


def server_material(security: ServerSecurity) -> Material:
    """Return what is in the server's files for TLS; raise InputError if they cannot be used."""
    return _material(security.certificate, security.key, security.client_ca, "server")


def check_device(security: DeviceSecurity, address: str) -> Material | None:
    """Return the material for the device's TLS, None for no TLS; raise if the settings do not fit together."""
    split_address(address)
    _check_both("device", security.certificate, security.key)
    if security.token_file is not None:
        read_token(security.token_file)
    if security.token is not None and not is_token(security.token):
        raise InputError(
            "The device's token has characters that no token has, such as spaces; see `pipar certs token`."
        )
    if security.ca is None:
        if security.certificate is not None or security.server_name is not None:
            raise InputError("A device with a certificate also needs its server's authority: give the file ca.pem.")
        _check_plain(security.insecure, address, "connect to", has_token=security.has_token)
        return None
    return _material(security.certificate, security.key, security.ca, "device")


def _check_both(owner: str, certificate: Path | None, key: Path | None) -> None:
    if (certificate is None) != (key is None):
        given, missing = ("certificate", "key") if key is None else ("key", "certificate")
        raise InputError(f"The {owner}'s {given} is given without its {missing}; give both.")


def _check_plain(insecure: bool, address: str, verb: str, *, has_token: bool) -> None:
    if is_loopback(address):
        return
    if has_token:
        raise InputError(f"Cannot {verb} {address} without TLS: others could read the tokens. Add certificates.")
    if not insecure:
        raise InputError(
            f"Cannot {verb} {address} without TLS, which is allowed on loopback only: make certificates with `pipar "
            "certs init` and give them with --certs, or allow it with --insecure."
        )


def _material(certificate: Path | None, key: Path | None, authorities: Path | None, owner: str) -> Material:
    from pipar.transport.certificates import check_key, read_certificates

    own_pem = key_pem = trusted_pem = None
    for path in (certificate, key, authorities):
        if path is not None and not file_exists(path):
            raise InputError(_missing(path, owner, is_authority=path is authorities))
    if certificate is not None and key is not None:
        own = read_certificates(certificate, f"the {owner}'s certificate")
        own_pem, key_pem = read_bytes(certificate, "a certificate"), check_key(key, own[0], certificate)
    if authorities is not None:
        read_certificates(authorities, "an authority's certificate")
        trusted_pem = read_bytes(authorities, "an authority's certificate")
    return Material(own_pem, key_pem, trusted_pem)


def file_exists(path: Path) -> bool:
    """Return whether a file is there, or cannot be looked at."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError:
        pass  # reading it will raise the reason
    return True


def _missing(path: Path, owner: str, *, is_authority: bool) -> str:
    """Return an error about a missing file, with the command that makes it."""
    if is_authority:
        return f"There is no {path}: `pipar certs init` makes the authority, and every machine gets its ca.pem."
    in_devices = path.parent.name == "devices"
    folder = path.parent.parent if in_devices else path.parent
    command = ["pipar", "certs", *(["issue", path.stem] if owner == "device" else ["server"])]
    command += ["--folder", str(folder)] if folder != Path("certs") else []
    return (
        f"There is no {path}: `{shlex.join(command)}` makes the {owner}'s certificate and key, where the authority's "
        "ca.key is."
    )


def _check_files(security: ServerSecurity) -> None:
    """Raise if a file that is needed later cannot be read now."""
    if isinstance(security.tokens, Path):
        read_tokens(security.tokens)
    if security.denied is not None and file_exists(security.denied):
        read_serials(security.denied)

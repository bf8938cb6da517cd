"""The security of a connection: the files that it needs, their checks, and the device that a connection belongs to.

`ServerSecurity` and `DeviceSecurity` are what the user asked for. `check_server` and `check_device` read the files once
and find everything that is wrong with them before a socket is opened. `Authenticator` finds the name of the device at
the other end of a connection.
"""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from pipar.errors import CredentialError, InputError, LinkError
from pipar.private_files import read_bytes
from pipar.transport.credentials import Tokens, check_device_name, is_token, read_serials, read_tokens
from pipar.units import split_address

AUTHORIZATION = "authorization"
_SCHEME = "Bearer "


@dataclass(frozen=True)
class ServerSecurity:
    """How a server protects itself. No protection is allowed on loopback only.

    With `client_ca` a device needs a certificate of that authority, with `tokens` a token of that file; with both it
    needs both, for the same name. `denied` lists revoked certificates; the file may be missing until the first one is
    revoked. `insecure` allows connections without encryption or credentials.
    """

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    tokens: Path | None = None
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
    server_name: str | None = None
    insecure: bool = False

    @classmethod
    def from_folder(cls, folder: Path, name: str) -> DeviceSecurity:
        """Return the settings for a device in a folder of `pipar certs issue NAME`."""
        return cls(folder / "ca.pem", folder / "devices" / f"{name}.pem", folder / "devices" / f"{name}.key")

    def metadata(self) -> list[tuple[str, str]]:
        """Return the metadata with which the device opens its stream."""
        return [] if self.token is None else [(AUTHORIZATION, _SCHEME + self.token)]


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
    return _material(security.certificate, security.key, security.client_ca, "server")


def check_device(security: DeviceSecurity, address: str) -> Material | None:
    """Return the material for the device's TLS, None for no TLS; raise if the settings do not fit together."""
    split_address(address)
    _check_both("device", security.certificate, security.key)
    if security.token is not None and not is_token(security.token):
        raise InputError(
            "The device's token has characters that no token has, such as spaces; see `pipar certs token`."
        )
    if security.ca is None:
        if security.certificate is not None or security.server_name is not None:
            raise InputError("A device with a certificate also needs its server's authority: give the file ca.pem.")
        _check_plain(security.insecure, address, "connect to", has_token=security.token is not None)
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
        if path is not None and not _exists(path):
            raise InputError(_missing(path, owner, is_authority=path is authorities))
    if certificate is not None and key is not None:
        own = read_certificates(certificate, f"the {owner}'s certificate")
        own_pem, key_pem = read_bytes(certificate, "a certificate"), check_key(key, own[0], certificate)
    if authorities is not None:
        read_certificates(authorities, "an authority's certificate")
        trusted_pem = read_bytes(authorities, "an authority's certificate")
    return Material(own_pem, key_pem, trusted_pem)


def _exists(path: Path) -> bool:
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
    if security.tokens is not None:
        read_tokens(security.tokens)
    if security.denied is not None and _exists(security.denied):
        read_serials(security.denied)


# --- the device of a connection


class Authenticator:
    """Finds the device of a connection. Files are read again when they change: revoking takes effect immediately."""

    def __init__(self, security: ServerSecurity, barred: Callable[[str], None] = lambda _: None) -> None:
        self._barred = barred  # called with the reason once, not for every connection
        self._trouble: str | None = None
        self._needs_certificate = security.client_ca is not None
        self._tokens = _Fresh(security.tokens, read_tokens) if security.tokens is not None else None
        self._denied = None
        if security.denied is not None:
            before = None if _exists(security.denied) else frozenset[str]()
            self._denied = _Fresh(security.denied, _denied_serials, before)

    def name_of(self, auth: Mapping[str, Sequence[bytes]], metadata: Sequence[tuple[str, str | bytes]]) -> str | None:
        """Return the name in the credentials of a connection, None if none are needed.

        `auth` is what TLS knows about the peer. Raises CredentialError if a credential is missing or wrong, without
        revealing which devices are known; another LinkError if no device can be checked now.
        """
        try:
            of_certificate = self._name_of_certificate(auth) if self._needs_certificate else None
            of_token = self._name_of_token(metadata) if self._tokens is not None else None
        except InputError as error:  # a file that could be read when the server started
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._barred(self._trouble)
            # Not a CredentialError, which would end the device: a file may be half copied, and complete soon.
            raise LinkError("The server cannot check credentials at the moment.") from None
        self._trouble = None
        if of_certificate is not None and of_token is not None and of_certificate != of_token:
            raise CredentialError("The token and the certificate belong to different devices.")
        return of_certificate or of_token

    def _name_of_certificate(self, auth: Mapping[str, Sequence[bytes]]) -> str:
        from cryptography import x509

        from pipar.transport.certificates import serial_of

        names = [name.decode("utf-8", "replace") for name in auth.get("x509_common_name", ())]
        shown = list(auth.get("x509_pem_cert", ()))
        if len(names) != 1 or not shown:
            raise CredentialError("The server needs a certificate with the name of the device.")
        if self._denied is not None:
            serial = serial_of(x509.load_pem_x509_certificate(shown[0]))
            if serial in self._denied.content():
                raise CredentialError("This certificate was revoked.")
        try:
            return check_device_name(names[0])
        except InputError:
            raise CredentialError("The name in the certificate is not a valid name of a device.") from None

    def _name_of_token(self, metadata: Sequence[tuple[str, str | bytes]]) -> str:
        assert self._tokens is not None
        given = [value for key, value in metadata if key.lower() == AUTHORIZATION]
        if len(given) != 1 or not isinstance(given[0], str) or not given[0].startswith(_SCHEME):
            raise CredentialError("The server needs a token, as issued by `pipar certs token`.")
        name = self._tokens.content().owner(given[0].removeprefix(_SCHEME))
        if name is None:
            raise CredentialError("The server does not know this token; it may have been revoked.")
        return name


def _denied_serials(path: Path) -> frozenset[str]:
    return frozenset(serial for serials in read_serials(path).values() for serial in serials)


_Content = TypeVar("_Content", Tokens, frozenset[str])


class _Fresh(Generic[_Content]):
    """The content of a small file, read again when it has changed; a file that existed has to stay."""

    def __init__(self, path: Path, read: Callable[[Path], _Content], before_it_exists: _Content | None = None) -> None:
        self._path = path
        self._read: Callable[[Path], _Content] = read
        self._before_it_exists: _Content | None = before_it_exists
        self._known: tuple[object, _Content] | None = None

    def content(self) -> _Content:
        version = self._version()
        if self._known is None and self._before_it_exists is not None and not _exists(self._path):
            return self._before_it_exists
        if self._known is None or self._known[0] != version:
            self._known = (version, self._read(self._path))
        return self._known[1]

    def _version(self) -> object:
        try:
            status = self._path.stat()
        except OSError:
            return None  # reading it will raise the reason
        return status.st_mtime_ns, status.st_size, status.st_ino

"""What protects a connection: which files it takes, what may be wrong with them, and whose connection it is.

`ServerSecurity` and `DeviceSecurity` say what was asked for. `check_server` and `check_device` read the files once and
find everything that can be wrong with them before a socket is opened. `Authenticator` tells which device a connection
belongs to.
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
    """How a server protects itself. Nothing at all is for loopback only.

    With `client_ca` a device needs a certificate of that authority, with `tokens` a token of that file; with both it
    needs both, of one name. `denied` lists certificates that were taken back; the file may come later, when the first
    one is. `insecure` allows what others can read.
    """

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    tokens: Path | None = None
    denied: Path | None = None
    insecure: bool = False

    @classmethod
    def from_folder(cls, folder: Path, *, tokens: bool = False) -> ServerSecurity:
        """Return what `pipar certs` made there: devices show their certificates, or their tokens."""
        certificate, key = folder / "server.pem", folder / "server.key"
        if tokens:
            return cls(certificate, key, tokens=folder / "tokens.json")
        return cls(certificate, key, client_ca=folder / "ca.pem", denied=folder / "denied.json")

    @property
    def knows_devices(self) -> bool:
        return self.client_ca is not None or self.tokens is not None


@dataclass(frozen=True)
class DeviceSecurity:
    """What a device shows to its server, and how it knows that it is the server.

    `server_name` is the name that the server's certificate must have where it is not the one that is connected to.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token: str | None = field(default=None, repr=False)
    server_name: str | None = None
    insecure: bool = False

    @classmethod
    def from_folder(cls, folder: Path, name: str) -> DeviceSecurity:
        """Return what `pipar certs issue NAME` made there."""
        return cls(folder / "ca.pem", folder / "devices" / f"{name}.pem", folder / "devices" / f"{name}.key")

    def metadata(self) -> list[tuple[str, str]]:
        """Return what the device says of itself when it opens its stream."""
        return [] if self.token is None else [(AUTHORIZATION, _SCHEME + self.token)]


@dataclass(frozen=True)
class Material:
    """The PEM bytes for one end of TLS: its own certificate and key, and the authorities that it trusts."""

    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    authorities: bytes | None = None


# --- addresses


def is_loopback(address: str) -> bool:
    """Return whether HOST:PORT cannot be reached from, or lead to, another machine. Names but localhost may."""
    host, _ = split_address(address)
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# --- checks


def check_server(security: ServerSecurity, address: str) -> Material | None:
    """Return what the server's TLS needs, None for none; raise if the address or a file is no good."""
    split_address(address)
    _check_both("server", security.certificate, security.key)
    if security.certificate is None or security.key is None:
        if security.client_ca is not None:
            raise InputError(
                "Certificates of devices are checked over TLS only: give the server a certificate and a key."
            )
        _check_plain(security.insecure, address, "listen on", has_token=security.tokens is not None)
        _read_register(security)
        return None
    if not (security.knows_devices or security.insecure or is_loopback(address)):
        raise InputError(
            f"Anybody could join at {address}: let devices show certificates (an authority) or tokens (a tokens file), "
            "or allow it explicitly as insecure."
        )
    _read_register(security)
    return _material(security.certificate, security.key, security.client_ca, "server")


def check_device(security: DeviceSecurity, address: str) -> Material | None:
    """Return what the device's TLS needs, None for none; raise one sentence if something does not go together."""
    split_address(address)
    _check_both("device", security.certificate, security.key)
    if security.token is not None and not is_token(security.token):
        raise InputError(
            "The device's token has other signs than letters, digits and the like; see `pipar certs token`."
        )
    if security.ca is None:
        if security.certificate is not None or security.server_name is not None:
            raise InputError("A device with a certificate needs its server's authority, too: give the file ca.pem.")
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
        raise InputError(f"Cannot {verb} {address} without TLS: others could read the tokens. Use certificates, too.")
    if not insecure:
        raise InputError(
            f"Cannot {verb} {address} without TLS, except on this machine itself: make certificates with "
            "`pipar certs init` and give them with --certs, or allow it with --insecure."
        )


def _material(certificate: Path | None, key: Path | None, authorities: Path | None, owner: str) -> Material:
    from pipar.transport.certificates import check_key, read_certificates

    own_pem = key_pem = trusted_pem = None
    for path in (certificate, key, authorities):
        if path is not None and not _is_there(path):
            raise InputError(_missing(path, owner, is_authority=path is authorities))
    if certificate is not None and key is not None:
        own = read_certificates(certificate, f"the {owner}'s certificate")
        own_pem, key_pem = read_bytes(certificate, "a certificate"), check_key(key, own[0], certificate)
    if authorities is not None:
        read_certificates(authorities, "an authority's certificate")
        trusted_pem = read_bytes(authorities, "an authority's certificate")
    return Material(own_pem, key_pem, trusted_pem)


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError:
        pass  # reading it says why it cannot be
    return True


def _missing(path: Path, owner: str, *, is_authority: bool) -> str:
    """Say how to get a file that is not there: who it is made by, and where."""
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


def _read_register(security: ServerSecurity) -> None:
    """Raise if a file that is looked up later cannot be read now."""
    if security.tokens is not None:
        read_tokens(security.tokens)
    if security.denied is not None and _is_there(security.denied):
        read_serials(security.denied)


# --- whose connection it is


class Authenticator:
    """Tells whose connection it is. Files are read again when they change: what is taken back is so at once."""

    def __init__(self, security: ServerSecurity, barred: Callable[[str], None] = lambda _: None) -> None:
        self._barred = barred  # told why nobody can be let in: once, not for everybody who knocks
        self._trouble: str | None = None
        self._needs_certificate = security.client_ca is not None
        self._tokens = _Fresh(security.tokens, read_tokens) if security.tokens is not None else None
        self._denied = None
        if security.denied is not None:
            before = None if _is_there(security.denied) else frozenset[str]()
            self._denied = _Fresh(security.denied, _denied_serials, before)

    def name_of(self, auth: Mapping[str, Sequence[bytes]], metadata: Sequence[tuple[str, str | bytes]]) -> str | None:
        """Return the name that the credentials of a connection give it, None if none are needed.

        `auth` is what TLS found out about the peer. A CredentialError says what is missing, nothing of who is known;
        another LinkError that nobody can be let in now.
        """
        try:
            of_certificate = self._name_of_certificate(auth) if self._needs_certificate else None
            of_token = self._name_of_token(metadata) if self._tokens is not None else None
        except InputError as error:  # a file that could be read when the server started
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._barred(self._trouble)
            # No CredentialError: a file may be half copied, and who ends by that does not come back when it is whole.
            raise LinkError("The server cannot check credentials at the moment.") from None
        self._trouble = None
        if of_certificate is not None and of_token is not None and of_certificate != of_token:
            raise CredentialError("The token is not that of the device that the certificate names.")
        return of_certificate or of_token

    def _name_of_certificate(self, auth: Mapping[str, Sequence[bytes]]) -> str:
        from cryptography import x509

        from pipar.transport.certificates import serial_of

        names = [name.decode("utf-8", "replace") for name in auth.get("x509_common_name", ())]
        shown = list(auth.get("x509_pem_cert", ()))
        if len(names) != 1 or not shown:
            raise CredentialError("The server wants a certificate that names the device.")
        if self._denied is not None:
            serial = serial_of(x509.load_pem_x509_certificate(shown[0]))
            if serial in self._denied.content():
                raise CredentialError("This certificate was revoked.")
        try:
            return check_device_name(names[0])
        except InputError:
            raise CredentialError("The name in the certificate cannot be a device's.") from None

    def _name_of_token(self, metadata: Sequence[tuple[str, str | bytes]]) -> str:
        assert self._tokens is not None
        given = [value for key, value in metadata if key.lower() == AUTHORIZATION]
        if len(given) != 1 or not isinstance(given[0], str) or not given[0].startswith(_SCHEME):
            raise CredentialError("The server wants a token, as `pipar certs token` issues it.")
        name = self._tokens.content().owner(given[0].removeprefix(_SCHEME))
        if name is None:
            raise CredentialError("The server does not know this token; it may have been revoked.")
        return name


def _denied_serials(path: Path) -> frozenset[str]:
    return frozenset(serial for serials in read_serials(path).values() for serial in serials)


_Content = TypeVar("_Content", Tokens, frozenset[str])


class _Fresh(Generic[_Content]):
    """What a small file says, read again when it has changed; one that was there may not go away."""

    def __init__(
        self, path: Path, read: Callable[[Path], _Content], before_it_is_there: _Content | None = None
    ) -> None:
        self._path = path
        self._read: Callable[[Path], _Content] = read
        self._before_it_is_there: _Content | None = before_it_is_there
        self._known: tuple[object, _Content] | None = None

    def content(self) -> _Content:
        version = self._version()
        if self._known is None and self._before_it_is_there is not None and not _is_there(self._path):
            return self._before_it_is_there
        if self._known is None or self._known[0] != version:
            self._known = (version, self._read(self._path))
        return self._known[1]

    def _version(self) -> object:
        try:
            status = self._path.stat()
        except OSError:
            return None  # reading it says why
        return status.st_mtime_ns, status.st_size, status.st_ino

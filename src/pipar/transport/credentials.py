"""The files of credentials: hashes of tokens, serial numbers of certificates, and which of them were revoked.

A token has 256 random bits and cannot be guessed, so one round of SHA-256 protects it as well as a slow hash would, and
a server can check a token for every connection. A password would need the slow hash.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipar.errors import InputError
from pipar.private_files import read_bytes, write_private

_TOKEN_BYTES = 32
#: Makes a token easy to find where it should not be, such as in a log or a repository.
_PREFIX = "pipar_"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DEVICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_device_name(name: str) -> str:
    """Return the name if it is valid in a credential, else raise an error."""
    if not _DEVICE_NAME.fullmatch(name):
        raise InputError(
            f"'{name}' cannot be a device's name: use at most 64 letters, digits, '-', '_' and '.', the first a letter "
            "or a digit."
        )
    return name


@dataclass(frozen=True)
class Tokens:
    """The hash of each device's token."""

    sha256: Mapping[str, str]

    def owner(self, token: str) -> str | None:
        """Return the device that has this token; takes as long for a wrong token as for a right one."""
        given, found = _sha256(token).encode(), None
        for name, known in self.sha256.items():
            if hmac.compare_digest(known.encode(), given):
                found = name
        return found

    @classmethod
    def of(cls, tokens: Mapping[str, str]) -> Tokens:
        """Return what a server needs to know of these tokens, by the name of the device."""
        return cls({name: _sha256(token) for name, token in tokens.items()})


def new_token() -> str:
    """Return a token of 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)


def _sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def read_tokens(path: Path) -> Tokens:
    """Return the tokens of a file that `add_token` wrote."""
    return Tokens(_read_names(path, "the devices' tokens", _is_sha256))


def add_token(path: Path, name: str, *, force: bool = False) -> str:
    """Return a new token for a device; the file keeps its hash."""
    check_device_name(name)
    known = dict(read_tokens(path).sha256) if path.exists() else {}
    if name in known and not force:
        raise InputError(f"{name} already has a token in {path}; --force replaces it.")
    token = new_token()
    _write_names(path, known | {name: _sha256(token)})
    return token


def remove_token(path: Path, name: str) -> bool:
    """Revoke a device's token; return whether it had one."""
    known = dict(read_tokens(path).sha256) if path.exists() else {}
    if known.pop(name, None) is None:
        return False
    _write_names(path, known)
    return True


def read_token(path: Path) -> str:
    """Return the token in a device's file."""
    content = read_bytes(path, "the device's token")
    token = content.strip().decode("ascii", "replace")
    if not is_token(token):
        raise InputError(f"{path} should hold one token, as `pipar certs token` printed it.")
    return token


def is_token(text: str) -> bool:
    """Return whether a text can be sent as a token."""
    return text.isascii() and text.isprintable() and text != "" and " " not in text


# --- certificates


def read_serials(path: Path) -> Mapping[str, list[str]]:
    """Return the serial numbers in a file, by the name of the device."""
    return _read_names(path, "certificates' serial numbers", _are_texts)


def add_serials(path: Path, name: str, serials: list[str]) -> None:
    """Add serial numbers of a device's certificates to a file."""
    known = dict(read_serials(path)) if path.exists() else {}
    _write_names(path, known | {name: [*known.get(name, []), *serials]})


def move_serials(issued: Path, denied: Path, name: str) -> int:
    """Revoke all certificates that were issued to a device; return how many there were."""
    known = dict(read_serials(issued)) if issued.exists() else {}
    serials = known.pop(name, [])
    if serials:
        add_serials(denied, name, serials)  # first: if the next write fails, they are denied already
        _write_names(issued, known)
    return len(serials)


# --- files of names


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _read_names(path: Path, what: str, is_right: Callable[[object], bool]) -> dict[str, Any]:
    content = read_bytes(path, what)
    try:
        names = json.loads(content)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, dict) or not all(map(is_right, names.values())):
        raise InputError(f"{path} should hold {what} as `pipar certs` writes them, but it is damaged: restore it.")
    return names


def _write_names(path: Path, names: Mapping[str, Any]) -> None:
    write_private(path, json.dumps(names, indent=1, sort_keys=True).encode() + b"\n")

"""Which device a connection belongs to, by its credential."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pipar.errors import CredentialError, InputError, LinkError
from pipar.transport.credentials import Tokens, check_device_name, read_serials, read_tokens
from pipar.transport.reloading import Fresh, Notices
from pipar.transport.tls import AUTHORIZATION, SCHEME, ServerSecurity, file_exists

_Result = TypeVar("_Result")


class Authenticator:
    """Finds the device of a connection. Files are read again when they change: revoking takes effect immediately."""

    def __init__(self, security: ServerSecurity, notices: Notices | None = None) -> None:
        self._notices = notices or Notices()
        self._trouble: str | None = None
        self._has_changed = False
        self._needs_certificate = security.client_ca is not None
        self._tokens = self._token_hashes(security.tokens)
        self._denied: Fresh[Mapping[str, object]] | None = None
        if security.denied is not None:
            before = None if file_exists(security.denied) else dict[str, object]()
            self._denied = Fresh(security.denied, read_serials, self._note_change, before)

    def _token_hashes(self, given: Path | Tokens | None) -> Callable[[], Mapping[str, str]] | None:
        """Return a function that returns the hashes in a file as it is now, or the given ones; None without tokens."""
        if isinstance(given, Path):
            return Fresh(given, lambda path: read_tokens(path).sha256, self._note_change).content
        return None if given is None else lambda: given.sha256

    def _note_change(self, sentence: str) -> None:
        self._has_changed = True
        self._notices.reloaded(sentence)

    def refresh(self) -> bool:
        """Read the files again if they have changed; return whether any has, since this was last asked."""
        with contextlib.suppress(LinkError):
            self._checked(lambda: (self._tokens and self._tokens(), self._denied and self._denied.content()))
        changed, self._has_changed = self._has_changed, False
        return changed

    def why_revoked(self, name: str, auth: Mapping[str, Sequence[bytes]]) -> str | None:
        """Return why a device that was admitted may not stay; None if it may, also with a token that was replaced."""
        try:
            if self._tokens is not None and name not in self._tokens():
                return "Its token was revoked."
            if self._needs_certificate:
                self._name_of_certificate(auth)
        except CredentialError as why:
            return str(why)
        except InputError:
            pass  # no device is admitted until the file can be read; those that are here may stay
        return None

    def name_of(self, auth: Mapping[str, Sequence[bytes]], metadata: Sequence[tuple[str, str | bytes]]) -> str | None:
        """Return the name in the credentials of a connection, None if none are needed.

        `auth` is what TLS knows about the peer. Raises CredentialError if a credential is missing or wrong, without
        revealing which devices are known; another LinkError if no device can be checked now.
        """
        of_certificate, of_token = self._checked(
            lambda: (
                self._name_of_certificate(auth) if self._needs_certificate else None,
                self._name_of_token(metadata) if self._tokens is not None else None,
            )
        )
        if of_certificate is not None and of_token is not None and of_certificate != of_token:
            raise CredentialError("The token and the certificate belong to different devices.")
        return of_certificate or of_token

    def _checked(self, check: Callable[[], _Result]) -> _Result:
        """Return the result of a check; if a file cannot be read, report it once and raise LinkError."""
        try:
            result = check()
        except InputError as error:  # the file could be read when the server started
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._notices.barred(self._trouble)
            # Not a CredentialError, which would end the device: a file may be half copied, and complete soon.
            raise LinkError("The server cannot check credentials at the moment.") from None
        self._trouble = None
        return result

    def _name_of_certificate(self, auth: Mapping[str, Sequence[bytes]]) -> str:
        from cryptography import x509

        from pipar.transport.certificates import serial_of

        names = [name.decode("utf-8", "replace") for name in auth.get("x509_common_name", ())]
        shown = list(auth.get("x509_pem_cert", ()))
        if len(names) != 1 or not shown:
            raise CredentialError("The server needs a certificate with the name of the device.")
        if self._denied is not None:
            serial = serial_of(x509.load_pem_x509_certificate(shown[0]))
            if any(serial in serials for serials in self._denied.content().values() if isinstance(serials, list)):
                raise CredentialError("This certificate was revoked.", device=names[0])
        try:
            return check_device_name(names[0])
        except InputError:
            raise CredentialError("The name in the certificate is not a valid name of a device.") from None

    def _name_of_token(self, metadata: Sequence[tuple[str, str | bytes]]) -> str:
        assert self._tokens is not None
        given = [value for key, value in metadata if key.lower() == AUTHORIZATION]
        if len(given) != 1 or not isinstance(given[0], str) or not given[0].startswith(SCHEME):
            raise CredentialError("The server needs a token, as issued by `pipar certs token`.")
        name = Tokens(self._tokens()).owner(given[0].removeprefix(SCHEME))
        if name is None:
            raise CredentialError("The server does not know this token; it may have been revoked.")
        return name

"""A folder of credentials as `pipar certs` makes it, for tests that connect for real."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from pipar.cli import main
from pipar.transport.certificates import read_authority
from pipar.transport.credentials import add_token
from pipar.transport.tls import DeviceSecurity, ServerSecurity


def certs(*words: str) -> None:
    """Run `pipar certs` with these words; it must succeed."""
    with pytest.raises(SystemExit) as ended:
        main(["certs", *words])
    assert ended.value.code == 0, words


def expire(folder: Path, name: str) -> None:
    """Replace a certificate of this folder, such as "server.pem", by one that expired an hour ago."""
    authority = read_authority(folder / "ca.pem", folder / "ca.key")
    path = folder / name
    old, now = x509.load_pem_x509_certificate(path.read_bytes()), datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(old.subject)
        .issuer_name(old.issuer)
        .public_key(old.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))
        .not_valid_after(now - timedelta(hours=1))
    )
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, critical=extension.critical)
    made = builder.sign(authority.key, hashes.SHA256())
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))


@dataclass(frozen=True)
class Folder:
    """An authority, its server, the devices pi-1 and pi-2 with certificates and tokens."""

    path: Path
    tokens: dict[str, str]

    @classmethod
    def make(cls, path: Path) -> Folder:
        certs("init", "--folder", str(path), "--host", "train.local")
        certs("issue", "pi-1", "pi-2", "--folder", str(path))
        return cls(path, {name: add_token(path / "tokens.json", name) for name in ("pi-1", "pi-2")})

    @property
    def by_certificate(self) -> ServerSecurity:
        return ServerSecurity.from_folder(self.path)

    @property
    def by_token(self) -> ServerSecurity:
        return ServerSecurity.from_folder(self.path, tokens=True)

    def device(self, name: str = "pi-1") -> DeviceSecurity:
        return DeviceSecurity.from_folder(self.path, name)

    def bearer(self, name: str = "pi-1") -> DeviceSecurity:
        return DeviceSecurity(self.path / "ca.pem", token=self.tokens[name])

"""Certificates: a private authority, the server's, and one for each device; making and checking them.

Keys are on the curve P-256: every TLS library has it, and a handshake is cheap on a small board.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pipar.errors import InputError
from pipar.private_files import read_bytes
from pipar.transport.credentials import check_device_name

AUTHORITY_DAYS = 3650
LEAF_DAYS = 365
MAX_DAYS = 36_500
ALWAYS_HOSTS = ("localhost", "127.0.0.1", "::1")
#: Certificates are valid from a day ago, because boards without a clock battery start with a time in the past.
_CLOCKS_DIFFER = timedelta(days=1)
_HOST_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}))*")


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    @property
    def serial(self) -> str:
        return serial_of(self.certificate)

    @property
    def expires(self) -> str:
        return f"{self.certificate.not_valid_after_utc:%Y-%m-%d}"


def serial_of(certificate: x509.Certificate) -> str:
    """Return a certificate's serial number in the form of our files."""
    return f"{certificate.serial_number:x}"


# --- making them


def make_authority(days: int = AUTHORITY_DAYS) -> Pair:
    """Return an authority that can sign certificates of servers and devices, but not of other authorities."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _named("pipar authority")
    builder = (
        _builder(name, name, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    return Pair(builder.sign(key, hashes.SHA256()), key)


def make_server(authority: Pair, hosts: Sequence[str], days: int = LEAF_DAYS) -> Pair:
    """Return a server's certificate for these host names and addresses, and for the loopback ones."""
    key = ec.generate_private_key(ec.SECP256R1())
    names = [_alternative(host) for host in dict.fromkeys([*hosts, *ALWAYS_HOSTS])]
    builder = _leaf(authority, "pipar server", key, days, ExtendedKeyUsageOID.SERVER_AUTH)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return Pair(builder.sign(authority.key, hashes.SHA256()), key)


def make_device(authority: Pair, name: str, days: int = LEAF_DAYS) -> Pair:
    """Return a device's certificate; its common name is the device's name."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _leaf(authority, check_device_name(name), key, days, ExtendedKeyUsageOID.CLIENT_AUTH)
    return Pair(builder.sign(authority.key, hashes.SHA256()), key)


def _leaf(
    authority: Pair, name: str, key: ec.EllipticCurvePrivateKey, days: int, purpose: x509.ObjectIdentifier
) -> x509.CertificateBuilder:
    issuer = authority.certificate
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    return (
        _builder(_named(name), issuer.subject, key, days, issuer.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(signer, critical=False)
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int, at_most: datetime | None = None
) -> x509.CertificateBuilder:
    if not 1 <= days <= MAX_DAYS:
        raise InputError(f"A certificate cannot be valid for {days} days; 1 to {MAX_DAYS} are allowed.")
    now = datetime.now(UTC)
    until = now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(min(until, at_most) if at_most is not None else until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if not _HOST_NAME.fullmatch(host) or re.fullmatch(r"[\d.]+", host):
        raise InputError(f"'{host}' is neither a host name nor an IP address; give it without a port.")
    return x509.DNSName(host)


# --- reading them


def read_certificates(path: Path, what: str) -> list[x509.Certificate]:
    """Return the certificates of a PEM file; raise if there are none or one is not valid now."""
    content = read_bytes(path, what)
    try:
        found = x509.load_pem_x509_certificates(content)
    except ValueError:
        raise InputError(f"{path} should hold {what}, but has no certificate in PEM format.") from None
    for certificate in found:
        _check_dates(certificate, path)
    return found


def expiry_of(pem: bytes, path: Path) -> datetime:
    """Return when the first certificate in the content of a file expires, whether or not it is valid now."""
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise InputError(f"{path} has no certificate in PEM format.") from None
    return min(certificate.not_valid_after_utc for certificate in found)


def _check_dates(certificate: x509.Certificate, path: Path) -> None:
    now = datetime.now(UTC)
    if now > certificate.not_valid_after_utc:
        raise InputError(
            f"The certificate in {path} expired on {certificate.not_valid_after_utc:%Y-%m-%d}; issue a new one with "
            "`pipar certs`."
        )
    if now < certificate.not_valid_before_utc:
        raise InputError(
            f"The certificate in {path} is valid from {certificate.not_valid_before_utc:%Y-%m-%d}, but this machine's "
            f"clock says {now:%Y-%m-%d}: set the clock."
        )


def check_key(key_path: Path, certificate: x509.Certificate, certificate_path: Path) -> bytes:
    """Return the PEM bytes of a private key that belongs to the certificate."""
    content = read_bytes(key_path, "a private key")
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InputError(f"{key_path} should hold a private key in PEM format, without a password.") from None
    if key.public_key() != certificate.public_key():
        raise InputError(
            f"The key in {key_path} does not belong to the certificate in {certificate_path}; give its own key."
        )
    return content


def read_authority(certificate_path: Path, key_path: Path) -> Pair:
    """Return the authority that `make_authority` made, from its files."""
    if not certificate_path.exists():
        raise InputError(f"There is no authority in {certificate_path.parent}; make it with `pipar certs init`.")
    certificate = read_certificates(certificate_path, "the authority's certificate")[0]
    content = check_key(key_path, certificate, certificate_path)
    key = serialization.load_pem_private_key(content, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"{key_path} is not the key of an authority that `pipar certs init` made.")
    return Pair(certificate, key)

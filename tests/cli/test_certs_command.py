"""`pipar certs`: its files, their permissions, nothing overwritten, errors in one sentence."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, NameOID
from support.waiting import PATIENCE_S

from pipar.cli import main
from pipar.errors import InputError
from pipar.transport.credentials import Tokens, read_serials, read_token, read_tokens


class Certs:
    """Runs `pipar certs ... --folder FOLDER`."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capfd = capfd

    def run(self, *words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["certs", *words, "--folder", str(self.folder)])
        out, err = self._capfd.readouterr()
        return int(ended.value.code or 0), out, err

    def __call__(self, *words: str) -> str:
        code, out, err = self.run(*words)
        assert code == 0, err
        return out

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))

    def refused(self, *words: str) -> str:
        code, out, err = self.run(*words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        return err

    def certificate(self, name: str) -> x509.Certificate:
        return x509.load_pem_x509_certificate((self.folder / name).read_bytes())


@pytest.fixture
def certs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Certs:
    return Certs(tmp_path / "certs", capfd)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def extension(certificate: x509.Certificate, oid: x509.ObjectIdentifier) -> Any:
    return certificate.extensions.get_extension_for_oid(oid).value


def days(certificate: x509.Certificate) -> int:
    return (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days


def test_init_makes_an_authority_and_a_server_for_its_hosts(certs: Certs) -> None:
    made = certs.json("init", "--host", "192.168.0.5", "--host", "train.local")
    assert made["hosts"] == ["192.168.0.5", "train.local"]
    authority, server = certs.certificate("ca.pem"), certs.certificate("server.pem")
    server.verify_directly_issued_by(authority)
    names = extension(server, ExtensionOID.SUBJECT_ALTERNATIVE_NAME)
    assert names.get_values_for_type(x509.DNSName) == ["train.local", "localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["192.168.0.5", "127.0.0.1", "::1"]
    assert list(extension(server, ExtensionOID.EXTENDED_KEY_USAGE)) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert extension(authority, ExtensionOID.BASIC_CONSTRAINTS).ca
    assert not extension(server, ExtensionOID.BASIC_CONSTRAINTS).ca
    assert (days(authority), days(server)) == (3651, 366)  # and a day for clocks that differ
    for certificate in (authority, server):
        key = certificate.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert key.curve.name == "secp256r1"


def test_issue_makes_a_certificate_with_the_devices_name(certs: Certs) -> None:
    certs("init")
    made = certs.json("issue", "pi-1", "pi_2.x", "--days", "30")
    assert [entry["name"] for entry in made["devices"]] == ["pi-1", "pi_2.x"]
    device = certs.certificate("devices/pi_2.x.pem")
    device.verify_directly_issued_by(certs.certificate("ca.pem"))
    assert [name.value for name in device.subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == ["pi_2.x"]
    assert list(extension(device, ExtensionOID.EXTENDED_KEY_USAGE)) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert days(device) == 31


def test_a_certificate_does_not_outlive_its_authority(certs: Certs) -> None:
    certs("init")
    certs("issue", "pi", "--days", "9000")
    assert certs.certificate("devices/pi.pem").not_valid_after_utc == certs.certificate("ca.pem").not_valid_after_utc


def test_only_the_owner_can_read_secrets(certs: Certs) -> None:
    certs("init")
    certs("issue", "pi")
    certs("token", "pi")
    private = {path.name for path in certs.folder.rglob("*") if path.is_file() and mode(path) == 0o600}
    assert private == {"ca.key", "server.key", "pi.key", "tokens.json", "issued.json", "denied.json"}
    assert {mode(path) for path in certs.folder.rglob("*.pem")} == {0o644}
    assert mode(certs.folder) == 0o700
    assert list(certs.folder.rglob(".*")) == []  # nothing half-written is left


def test_a_token_is_printed_once_and_only_its_hash_is_stored(certs: Certs) -> None:
    _, out, err = certs.run("token", "pi")
    token = out.strip()
    assert out == f"{token}\n"
    assert "it is not shown again" in err
    assert token not in (certs.folder / "tokens.json").read_text("utf-8")
    tokens = read_tokens(certs.folder / "tokens.json")
    assert tokens.owner(token) == "pi"
    assert [tokens.owner(other) for other in ("", token[:-1], token + "x", tokens.sha256["pi"], "ü")] == [None] * 5
    certs.folder.joinpath("pi.token").write_text(out, "utf-8")
    assert read_token(certs.folder / "pi.token") == token


def test_two_devices_have_different_tokens(certs: Certs) -> None:
    one, other = certs.json("token", "pi-1"), certs.json("token", "pi-2")
    assert one["token"] != other["token"]
    tokens = read_tokens(certs.folder / "tokens.json")
    assert (tokens.owner(one["token"]), tokens.owner(other["token"])) == ("pi-1", "pi-2")


def test_nothing_is_overwritten_without_force(certs: Certs) -> None:
    certs("init")
    certs("issue", "pi")
    certs("token", "pi")
    before = {path: path.read_bytes() for path in certs.folder.rglob("*") if path.is_file()}
    assert "There is already" in certs.refused("init")
    assert "There is already" in certs.refused("server")
    assert "devices/pi.pem" in certs.refused("issue", "new", "pi")
    assert "pi already has a token in" in certs.refused("token", "pi")
    assert {path: path.read_bytes() for path in certs.folder.rglob("*") if path.is_file()} == before
    certs("server", "--force", "--host", "other.local")
    certs("issue", "pi", "--force")
    certs("token", "pi", "--force")
    kept = {"ca.pem", "ca.key", "denied.json"}
    assert {path.name for path, content in before.items() if path.read_bytes() == content} == kept


def test_revoking_takes_the_token_and_every_certificate_of_a_name(certs: Certs) -> None:
    certs("init")
    certs("issue", "pi", "other")
    certs("issue", "pi", "--force")
    token = certs.json("token", "pi")["token"]
    serials = read_serials(certs.folder / "issued.json")["pi"]
    assert certs.json("revoke", "pi") == {"name": "pi", "certificates": 2, "token": True}
    assert read_tokens(certs.folder / "tokens.json").owner(token) is None
    assert read_serials(certs.folder / "denied.json") == {"pi": serials}
    assert set(read_serials(certs.folder / "issued.json")) == {"other"}
    assert "nothing was revoked" in certs.refused("revoke", "pi")


REFUSED = {
    "issue ../pi": "cannot be a device's name",
    "issue .pi": "cannot be a device's name",
    "issue pi/1": "cannot be a device's name",
    f"issue {'p' * 65}": "at most 64 letters",
    "token pi!": "cannot be a device's name",
    "init --host http://train.local": "neither a host name nor an IP address",
    "init --host 192.168.0.5:7700": "neither a host name nor an IP address",
    "init --host 999.1.1.1": "neither a host name nor an IP address",
    "init --days 0": "1 to 36500",
    "init --days 99999": "1 to 36500",
    "issue pi": "There is no authority in",
    "server": "There is no authority in",
    "revoke pi": "nothing was revoked",
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_is_one_sentence(words: str, certs: Certs) -> None:
    assert REFUSED[words] in certs.refused(*words.split())
    assert not certs.folder.exists()


def test_a_damaged_authority_is_one_sentence(certs: Certs) -> None:
    certs("init")
    (certs.folder / "ca.key").write_bytes((certs.folder / "server.key").read_bytes())
    assert "does not belong to the certificate" in certs.refused("issue", "pi")
    (certs.folder / "ca.pem").write_text("no certificate", "utf-8")
    assert "has no certificate in PEM format" in certs.refused("issue", "pi")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"pi": 3}', '{"pi": ["x"]}', "[" * 100_000])
def test_a_damaged_tokens_file_is_one_sentence(content: str, certs: Certs) -> None:
    certs.folder.mkdir()
    (certs.folder / "tokens.json").write_text(content, "utf-8")
    assert "it is damaged" in certs.refused("token", "pi")


@pytest.mark.parametrize("content", [b"", b"two words", b"\xff\xfe", b"a\nb"])
def test_a_file_that_holds_no_token_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(InputError, match="should hold one token"):
        read_token(tmp_path / "token")


def test_an_impossible_hash_matches_no_token() -> None:
    assert Tokens({"pi": "ü", "other": ""}).owner("x") is None


@pytest.mark.slow
def test_certs_need_neither_torch_nor_grpc(tmp_path: Path) -> None:
    program = (
        "import sys; from pipar.cli import main\n"
        f"try: main(['certs', 'init', '--folder', {str(tmp_path / 'c')!r}])\n"
        "except SystemExit: print([name for name in ('torch', 'grpc') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.stderr.strip() == "[]"

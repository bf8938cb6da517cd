"""Deployments with TLS: whole runs with certificates and with tokens, and devices with wrong ones."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.credentials import certs, expire
from support.deployments import check_nothing_is_left, check_weights, counted, training
from support.programs import Place, Program, address_of, place

from pipar.transport.credentials import add_token

pytestmark = pytest.mark.slow


@pytest.fixture
def here(tmp_path: Path, profiles: Path) -> Iterator[Place]:
    with place(tmp_path, profiles, training()) as made:
        yield made


@pytest.fixture
def folder(here: Place) -> Path:
    """Return a folder with an authority, the server's certificate and those of devices, which expire in 20 days."""
    path = here.folder / "certs"
    certs("init", "--folder", str(path), "--host", "train.local", "--days", "20")
    certs("issue", "pi-1", "pi-2", "pi-3", "--folder", str(path), "--days", "20")
    return path


def write_private(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o600)


def check_refused(device: Program, *sentences: str) -> None:
    """Check that a program has ended by itself with one of these sentences, without retrying."""
    assert device.ends() in (1, 2)
    assert any(sentence in device.lines()[-1] for sentence in sentences), device.text()
    assert "Traceback" not in device.text()


def test_devices_with_right_certificates_train_and_those_with_wrong_ones_end_with_one_sentence(
    here: Place, folder: Path
) -> None:
    tree = training()
    server = here.server("--certs", "certs")
    address = address_of(server)
    here.hold("pi-1")
    honest = here.device("pi-1", address, "--certs", "certs")
    here.wait_until_held("pi-1")

    stranger = here.folder / "stranger"
    certs("init", "--folder", str(stranger), "--host", "train.local")
    certs("issue", "pi-2", "--folder", str(stranger))
    mixed = here.folder / "mixed"  # it trusts the server, which does not trust it
    shutil.copytree(stranger, mixed)
    shutil.copy(folder / "ca.pem", mixed / "ca.pem")
    borrowed = here.folder / "borrowed"  # claims to be pi-1, with the certificate of pi-2
    shutil.copytree(folder, borrowed)
    for ending in ("pem", "key"):
        shutil.copy(folder / "devices" / f"pi-2.{ending}", borrowed / "devices" / f"pi-1.{ending}")
    late = here.folder / "late"
    shutil.copytree(folder, late)
    expire(late, "devices/pi-2.pem")

    wrong = [
        (here.device("pi-2", address, "--certs", "stranger"), ("cannot be verified with the device's ca.pem",)),
        (here.device("pi-2", address, "--certs", "mixed"), ("refuses the device's certificate",)),
        (here.device("pi-2", address, "--certs", "late"), ("refuses the device's certificate", "expired")),
        (here.device("pi-1", address, "--certs", "borrowed"), ("credential is that of 'pi-2', but",)),
        (here.device("pi-2", address), ("uses TLS",)),
        (here.device("pi-2", address, "--certs", "certs", "--server-name", "other.local"), ("other names",)),
    ]
    for device, sentences in wrong:
        check_refused(device, *sentences)

    second = here.device("pi-2", address, "--certs", "certs", "--server-name", "train.local")
    server.says("pi-2 joined")
    here.let_go("pi-1")
    assert [program.ends() for program in (server, honest, second)] == [0, 0, 0]
    for program, file in ((server, "server"), (honest, "pi-1"), (second, "pi-2")):
        assert f"{file}.pem expires on" in program.text(), "each program announces its own certificate"
    assert counted(here)[-1] == {"pi-1", "pi-2"}
    check_weights(here, tree)
    check_nothing_is_left(here)


def test_devices_with_right_tokens_train_and_those_with_wrong_ones_end_with_one_sentence(
    here: Place, folder: Path
) -> None:
    tree = training()
    for name in ("pi-1", "pi-2", "pi-3"):
        token = add_token(folder / "tokens.json", name)
        write_private(here.folder / f"{name}.token", token.encode())
    write_private(here.folder / "guessed.token", b"x" * 43)
    write_private(here.folder / "borrowed.token", (here.folder / "pi-2.token").read_bytes())
    certs("revoke", "pi-3", "--folder", str(folder))
    (here.folder / "public").mkdir()  # a device needs no more than the authority's certificate
    shutil.copy(folder / "ca.pem", here.folder / "public")

    server = here.server("--certs", "certs", "--tokens")
    address = address_of(server)
    here.hold("pi-1")
    honest = here.device("pi-1", address, "--certs", "public", "--token-file", "pi-1.token")
    here.wait_until_held("pi-1")
    wrong = {
        ("pi-2", "guessed"): "does not know this token",
        ("pi-3", "pi-3"): "does not know this token",
        ("pi-1", "borrowed"): "The credential is that of 'pi-2', but the device calls itself 'pi-1'",
    }
    devices = {
        key: here.device(key[0], address, "--certs", "public", "--token-file", f"{key[1]}.token") for key in wrong
    }
    for key, device in devices.items():
        check_refused(device, wrong[key])
    server.says(r"warning: a device at 127\.0\.0\.1 was refused: The server does not know this token")
    server.says("warning: pi-2 was refused: The credential is that of 'pi-2', but")
    here.let_go("pi-1")
    assert (server.ends(), honest.ends()) == (0, 0)
    assert counted(here) == [{"pi-1"}] * 6
    check_weights(here, tree)
    check_nothing_is_left(here)


def test_nothing_listens_beyond_loopback_without_tls(here: Place) -> None:
    for program in (here.server(listen="0.0.0.0:0"), here.device("pi-1", "192.0.2.1:7700")):
        assert program.ends() == 2
        assert "without TLS" in program.lines()[-1]
        assert os.linesep.join(program.lines()).count("Traceback") == 0


def test_devices_are_revoked_and_certificates_renewed_without_a_restart(here: Place, folder: Path) -> None:
    tree = training()
    tree["server"]["allow"] = "ward.txt"
    here.write(tree)
    ward = here.folder / "ward.txt"
    ward.write_text("pi-1\npi-2\npi-3\n")
    server = here.server("--certs", "certs")
    address = address_of(server)
    here.hold("pi-1")
    honest = here.device("pi-1", address, "--certs", "certs")
    here.wait_until_held("pi-1")
    others = [here.device(name, address, "--certs", "certs") for name in ("pi-2", "pi-3")]
    for name in ("pi-2", "pi-3"):
        server.says(f"{name} joined")

    ward.write_text("pi-1\npi-3\n")
    server.says(r"ward\.txt was read again: removed pi-2\.")
    check_refused(others[0], "may not take part in this training")
    certs("revoke", "pi-3", "--folder", str(folder))
    server.says(r"denied\.json was read again: added pi-3\.")
    check_refused(others[1], "This certificate was revoked")
    certs("server", "--host", "train.local", "--force", "--folder", str(folder))
    server.says(r"server\.(pem|key) .*read again: new connections use")
    here.let_go("pi-1")
    assert (server.ends(), honest.ends()) == (0, 0)
    assert counted(here) == [{"pi-1"}] * 6
    check_weights(here, tree)
    lines = [json.loads(line) for line in (here.run_folder / "audit.jsonl").read_text("utf-8").splitlines()]
    changes = [line["change"].partition("again: ")[2] for line in lines if line["what"] == "reloaded"]
    assert changes[:2] == ["removed pi-2.", "added pi-3."]
    check_nothing_is_left(here)

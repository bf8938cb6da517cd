"""Credentials are renewed, added and revoked without a restart: files are read again when they change."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.credentials import Folder, certs
from support.waiting import PATIENCE_S

from pipar.errors import CredentialError, InputError, LinkError
from pipar.transport.credentials import add_token, remove_token
from pipar.transport.grpc_connect import connect
from pipar.transport.grpc_listener import Listener
from pipar.transport.interface import Transport
from pipar.transport.reloading import ChangedFiles, FreshMaterial, Notices, change_text, reread_text
from pipar.transport.tls import DeviceSecurity, Material, ServerSecurity, server_material

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder.make(tmp_path / "certs")


@dataclass
class Gatehouse:
    """A listener, the devices that are connected to it, and what it says about its files."""

    security: ServerSecurity
    here: list[str | None] = field(default_factory=list)
    reloaded: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    revoked: list[str] = field(default_factory=list)
    address: str = ""

    def __post_init__(self) -> None:
        notices = Notices(reloaded=self.reloaded.append, failed=self.failed.append)
        self.listener = Listener(
            self._stay,
            security=self.security,
            notices=notices,
            refused=lambda _, why, device: self.refused.append(f"{device}: {why}" if device else why),
            revoked=self.revoked.append,
        )

    async def _stay(self, transport: Transport, peer: str | None) -> None:
        self.here.append(peer)
        try:
            await transport.read()
        except LinkError:
            self.here.remove(peer)

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not is_so():
                await asyncio.sleep(0.01)

    async def admits(self, device: DeviceSecurity) -> bool:
        """Return whether a device can connect now."""
        try:
            transport = await connect(self.address, security=device, timeout_s=PATIENCE_S)
        except CredentialError:
            return False
        await transport.close()
        return True


def at_the_gate(security: ServerSecurity, visit: Callable[[Gatehouse], Awaitable[None]]) -> Gatehouse:
    async def main() -> Gatehouse:
        gate = Gatehouse(security)
        gate.address = f"127.0.0.1:{await gate.listener.start('127.0.0.1:0')}"
        try:
            await visit(gate)
        finally:
            await gate.listener.stop()
        return gate

    return asyncio.run(asyncio.wait_for(main(), 2 * PATIENCE_S))


def test_new_connections_use_a_certificate_and_an_authority_that_were_replaced(folder: Folder, tmp_path: Path) -> None:
    old, new = Folder(tmp_path / "old", {}), Folder.make(tmp_path / "new")
    shutil.copytree(folder.path, old.path)

    async def visit(gate: Gatehouse) -> None:
        assert await gate.admits(old.device())
        for name in ("server.key", "server.pem", "ca.pem"):
            shutil.copy(new.path / name, folder.path / name)
        assert await gate.admits(new.device())
        assert not await gate.admits(old.device())
        assert next(pem for _, pem in gate.listener.certificates) == (new.path / "server.pem").read_bytes()

    gate = at_the_gate(folder.by_certificate, visit)
    assert any("server.pem" in sentence and "read again: new connections use" in sentence for sentence in gate.reloaded)


def test_a_certificate_that_cannot_be_used_is_reported_and_the_old_one_stays(folder: Folder) -> None:
    whole = (folder.path / "server.pem").read_bytes()

    async def visit(gate: Gatehouse) -> None:
        for content in (b"half", whole[: len(whole) // 2]):
            (folder.path / "server.pem").write_bytes(content)
            gate.listener.refresh()
            gate.listener.refresh()
            assert await gate.admits(folder.device())

    gate = at_the_gate(folder.by_certificate, visit)
    assert len(gate.failed) == 2
    assert all("continues with the certificate that it has" in sentence for sentence in gate.failed)
    assert gate.reloaded == []


def test_files_that_could_not_be_read_for_a_moment_are_read_again_without_another_change(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    security, new, failed, reloaded = folder.by_certificate, Folder.make(tmp_path / "new"), [], []
    material = FreshMaterial(security, server_material(security), Notices(reloaded.append, failed.append))
    for name in ("server.key", "server.pem", "ca.pem"):
        shutil.copy(new.path / name, folder.path / name)

    def fails(_: ServerSecurity) -> Material:
        raise InputError("Cannot read server.pem: too many open files.")

    with monkeypatch.context() as patch:
        patch.setattr("pipar.transport.reloading.server_material", fails)
        assert (material.take_new(), material.take_new()) == (None, None)
    assert material.take_new() == server_material(security)
    assert (len(failed), len(reloaded)) == (1, 1)


def test_a_revoked_device_is_disconnected_and_the_others_stay(folder: Folder) -> None:
    async def visit(gate: Gatehouse) -> None:
        one, _ = [await connect(gate.address, security=folder.device(name)) for name in ("pi-1", "pi-2")]
        await gate.until(lambda: sorted(map(str, gate.here)) == ["pi-1", "pi-2"])
        certs("revoke", "pi-1", "--folder", str(folder.path))
        gate.listener.refresh()
        await gate.until(lambda: gate.here == ["pi-2"])
        with pytest.raises(LinkError):
            await one.read()
        assert not await gate.admits(folder.device("pi-1"))
        assert gate.here == ["pi-2"]

    gate = at_the_gate(folder.by_certificate, visit)
    assert gate.reloaded == [f"{folder.path / 'denied.json'} was read again: added pi-1."]
    assert set(gate.refused) == {"pi-1: This certificate was revoked."}  # at once, and when it connects again
    assert len(gate.refused) >= 2
    assert gate.revoked == ["pi-1"]


def test_a_device_that_is_away_when_it_is_revoked_loses_its_place(folder: Folder) -> None:
    async def visit(gate: Gatehouse) -> None:
        one, _ = [await connect(gate.address, security=folder.device(name)) for name in ("pi-1", "pi-2")]
        await gate.until(lambda: len(gate.here) == 2)
        await one.close()
        await gate.until(lambda: gate.here == ["pi-2"])
        certs("revoke", "pi-1", "--folder", str(folder.path))
        gate.listener.refresh()
        gate.listener.refresh()

    gate = at_the_gate(folder.by_certificate, visit)
    assert (gate.revoked, gate.refused) == (["pi-1"], [])


def test_a_replaced_token_leaves_its_device_connected_and_a_removed_one_does_not(folder: Folder) -> None:
    tokens = folder.path / "tokens.json"

    async def visit(gate: Gatehouse) -> None:
        for name in ("pi-1", "pi-2"):
            await connect(gate.address, security=folder.bearer(name))
        await gate.until(lambda: len(gate.here) == 2)
        gate.listener.refresh()
        add_token(tokens, "pi-1", force=True)
        gate.listener.refresh()
        remove_token(tokens, "pi-2")
        gate.listener.refresh()
        await gate.until(lambda: gate.here == ["pi-1"])

    gate = at_the_gate(folder.by_token, visit)
    assert [sentence.partition("again: ")[2] for sentence in gate.reloaded] == ["changed pi-1.", "removed pi-2."]


def test_a_device_uses_the_token_that_its_file_has_now(folder: Folder, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(folder.tokens["pi-1"])
    file.chmod(0o600)
    device = DeviceSecurity(folder.path / "ca.pem", token_file=file)

    async def visit(gate: Gatehouse) -> None:
        assert await gate.admits(device)
        renewed = add_token(folder.path / "tokens.json", "pi-1", force=True)
        assert not await gate.admits(device)
        file.write_text(renewed)
        assert await gate.admits(device)

    at_the_gate(folder.by_token, visit)


def test_files_that_have_changed_are_named_once(tmp_path: Path) -> None:
    one, other = tmp_path / "a.pem", tmp_path / "a.key"
    one.write_text("1")
    files = ChangedFiles(one, None, other)
    assert files.take() == []
    one.write_text("10")
    other.write_text("2")
    assert reread_text(files.take()) == f"{one} and {other} were read again: new connections use them."
    assert files.take() == []
    other.unlink()
    assert reread_text(files.take()) == f"{other} was read again: new connections use it."


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({}, {}, None),
        ({"a": 1}, {"a": 1}, None),
        ({}, dict.fromkeys("fedcba"), "added a, b, c, d, e and 1 more."),
        ({"a": 1, "b": 2}, {"a": 3, "c": 2}, "added c; removed b; changed a."),
    ],
)
def test_a_change_of_a_file_is_described_by_the_names_in_it(
    before: dict[str, object], after: dict[str, object], said: str | None
) -> None:
    expected = None if said is None else f"tokens.json was read again: {said}"
    assert change_text(Path("tokens.json"), before, after) == expected

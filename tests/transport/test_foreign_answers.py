"""Other programs that answer at the server's address cannot end a device; only its server can."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.credentials import Folder, expire
from support.strangers import ANSWERS, stranger
from support.waiting import PATIENCE_S

from pipar.errors import CredentialError, DeviceRefusedError, LinkError
from pipar.transport.grpc_connect import connect
from pipar.transport.grpc_listener import Listener
from pipar.transport.interface import Transport
from pipar.transport.tls import DeviceSecurity, ServerSecurity


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder.make(tmp_path_factory.mktemp("ours") / "certs")


def refusal(port: int, security: DeviceSecurity | None, timeout_s: float = PATIENCE_S) -> LinkError:
    """Return the error of a device that connects to this port."""

    async def main() -> LinkError:
        with pytest.raises(LinkError) as refused:
            await connect(f"127.0.0.1:{port}", security=security, timeout_s=timeout_s)
        return refused.value

    error = asyncio.run(asyncio.wait_for(main(), 2 * PATIENCE_S))
    assert "\n" not in str(error)
    assert not isinstance(error, DeviceRefusedError)
    return error


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("protected", [True, False], ids=["with TLS", "without TLS"])
def test_bytes_of_another_program_are_an_error_that_a_device_outlasts(
    ours: Folder, answer: str, protected: bool
) -> None:
    heard, timeout_s = threading.Event(), 0.4
    with stranger(ANSWERS[answer], heard=heard) as port:
        while not heard.is_set():  # on a busy machine, a device may give up before it has read the answer
            assert timeout_s < PATIENCE_S
            refusal(port, ours.device() if protected else None, timeout_s=timeout_s)
            timeout_s *= 2


@pytest.mark.parametrize("answer", ["garbage", "HTTP", "nothing"])
def test_certificates_of_a_stranger_are_an_error_that_a_device_outlasts(
    ours: Folder, tmp_path: Path, answer: str
) -> None:
    theirs = Folder.make(tmp_path / "theirs").path
    with stranger(ANSWERS[answer], certs=theirs) as port:
        error = refusal(port, ours.device())
    assert isinstance(error, CredentialError)
    assert "cannot be verified with the device's ca.pem" in str(error)


def test_an_expired_certificate_of_the_server_is_an_error_that_a_device_outlasts(ours: Folder, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(ours.path, old)
    expire(old, "server.pem")
    with stranger(certs=old) as port:
        error = refusal(port, ours.device())
    assert isinstance(error, CredentialError)
    assert "has a certificate that has expired" in str(error)


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK], ids=str)
def test_another_program_that_speaks_grpc_without_a_certificate_cannot_end_a_device(code: grpc.StatusCode) -> None:
    async def main() -> None:
        async def refuse(_: Any, context: Any) -> None:
            await context.abort(code, "no")

        server = grpc.aio.server()
        handler: Any = grpc.stream_stream_rpc_method_handler(refuse)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("pipar.Link", {"Connect": handler}),))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            with pytest.raises(LinkError) as refused:
                await connect(address, timeout_s=PATIENCE_S)
            assert not isinstance(refused.value, DeviceRefusedError)
        finally:
            await server.stop(grace=0)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_the_verified_server_can_refuse_a_device(ours: Folder) -> None:
    async def main() -> None:
        async def accept(transport: Transport, _: str | None) -> None:
            raise AssertionError(transport)

        listener = Listener(accept, security=ServerSecurity.from_folder(ours.path, tokens=True))
        address = f"127.0.0.1:{await listener.start('127.0.0.1:0')}"
        try:
            with pytest.raises(DeviceRefusedError, match="does not know this token"):
                await connect(address, security=DeviceSecurity(ours.path / "ca.pem", token="pipar_guess"))
        finally:
            await listener.stop()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))

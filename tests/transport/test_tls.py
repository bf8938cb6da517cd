"""A device with a valid credential is admitted under its name; any other gets one sentence with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.credentials import Folder, certs
from support.waiting import PATIENCE_S

from pipar.errors import CredentialError, InputError, LinkError, ProtocolError
from pipar.transport import certificates
from pipar.transport.authenticator import Authenticator
from pipar.transport.credentials import add_serials, add_token
from pipar.transport.grpc_connect import connect
from pipar.transport.grpc_listener import Listener
from pipar.transport.interface import Transport
from pipar.transport.reloading import Notices
from pipar.transport.tls import DeviceSecurity, ServerSecurity, check_device, check_server, is_loopback
from pipar.wire.frames import cut_message
from pipar.wire.messages import Kind, Message, json_body

PLAIN = ServerSecurity()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder.make(tmp_path_factory.mktemp("ours") / "certs")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Credentials with the same names from another authority."""
    return Folder.make(tmp_path_factory.mktemp("theirs") / "certs")


class House:
    """A listener, and the devices that it admitted."""

    def __init__(self, security: ServerSecurity, **options: Any) -> None:
        self.names: list[str | None] = []
        self.refused: list[str] = []
        self.heard: list[Message] = []
        self.address = ""
        self.listener = Listener(
            self._accept, security=security, refused=lambda _, why, __: self.refused.append(why), **options
        )

    async def _accept(self, transport: Transport, peer: str | None) -> None:
        self.names.append(peer)
        try:
            while True:
                self.heard.append((await transport.read()).message)
        except (LinkError, ProtocolError):
            return


@asynccontextmanager
async def house(security: ServerSecurity, **options: Any) -> Any:
    built = House(security, **options)
    built.address = f"127.0.0.1:{await built.listener.start('127.0.0.1:0')}"
    try:
        yield built
    finally:
        await built.listener.stop()


def run(main: Awaitable[None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(main, PATIENCE_S)

    asyncio.run(limited())


async def visit(house: House, security: DeviceSecurity | None) -> None:
    """Connect, send a message that arrives, and leave."""
    transport = await connect(house.address, security=security, timeout_s=PATIENCE_S)
    await transport.write(next(iter(cut_message(Message(Kind.STOP, 5), 0, 1))))
    await transport.close()


# --- admitted


def test_a_device_has_the_name_in_its_certificate(ours: Folder) -> None:
    async def main() -> None:
        async with house(ours.by_certificate) as server:
            await visit(server, ours.device("pi-1"))
            await visit(server, replace(ours.device("pi-2"), server_name="train.local"))
            assert server.names == ["pi-1", "pi-2"]
            assert server.heard == [Message(Kind.STOP, 5)] * 2
            assert server.refused == []

    run(main())


def test_a_device_has_the_name_of_its_token(ours: Folder) -> None:
    async def main() -> None:
        async with house(ours.by_token) as server:
            await visit(server, ours.bearer("pi-2"))
            assert server.names == ["pi-2"]

    run(main())


def test_without_credentials_on_loopback_there_is_no_name() -> None:
    async def main() -> None:
        async with house(PLAIN) as server:
            await visit(server, None)
            assert server.names == [None]

    run(main())


def test_a_token_alone_is_enough_on_loopback(ours: Folder) -> None:
    async def main() -> None:
        async with house(ServerSecurity(tokens=ours.path / "tokens.json")) as server:
            await visit(server, DeviceSecurity(token=ours.tokens["pi-1"]))
            assert server.names == ["pi-1"]

    run(main())


# --- refused

Refusal = tuple[Callable[[Folder, Folder], tuple[ServerSecurity, DeviceSecurity | None]], str]

REFUSALS: dict[str, Refusal] = {
    "the device trusts another authority": (
        lambda a, b: (a.by_certificate, replace(a.device(), ca=b.path / "ca.pem")),
        "cannot be verified with the device's ca.pem: unable to get local issuer certificate",
    ),
    "the server's name is another": (
        lambda a, _: (a.by_certificate, replace(a.device(), server_name="other.local")),
        "has a certificate for other names than 'other.local'",
    ),
    "the device's certificate is of another authority": (
        lambda a, b: (a.by_certificate, replace(b.device(), ca=a.path / "ca.pem")),
        "refuses the device's certificate",
    ),
    "the server's certificate is shown as a device's": (
        lambda a, _: (
            a.by_certificate,
            DeviceSecurity(a.path / "ca.pem", a.path / "server.pem", a.path / "server.key"),
        ),
        "refuses the device's certificate",
    ),
    "a device's certificate is shown as the server's": (
        lambda a, _: (
            replace(a.by_token, certificate=a.device().certificate, key=a.device().key),
            a.bearer(),
        ),
        "cannot be verified with the device's ca.pem: unsuitable certificate purpose",
    ),
    "no certificate": (
        lambda a, _: (a.by_certificate, DeviceSecurity(a.path / "ca.pem")),
        "needs a certificate of the device, and none was given",
    ),
    "a token where a certificate is wanted": (
        lambda a, _: (a.by_certificate, a.bearer()),
        "needs a certificate of the device, and none was given",
    ),
    "no token": (lambda a, _: (a.by_token, DeviceSecurity(a.path / "ca.pem")), "The server needs a token"),
    "a certificate where a token is wanted": (lambda a, _: (a.by_token, a.device()), "The server needs a token"),
    "a wrong token": (
        lambda a, _: (a.by_token, DeviceSecurity(a.path / "ca.pem", token="pipar_guess")),
        "does not know this token",
    ),
    "a token of another server": (
        lambda a, b: (a.by_token, DeviceSecurity(a.path / "ca.pem", token=b.tokens["pi-1"])),
        "does not know this token",
    ),
    "the hash of a token": (
        lambda a, _: (
            a.by_token,
            DeviceSecurity(a.path / "ca.pem", token=(a.path / "tokens.json").read_text("utf-8").split('"')[3]),
        ),
        "does not know this token",
    ),
    "another device's token": (
        lambda a, _: (
            replace(a.by_certificate, tokens=a.path / "tokens.json"),
            replace(a.device("pi-1"), token=a.tokens["pi-2"]),
        ),
        "The token and the certificate belong to different devices",
    ),
    "no TLS where there is": (
        lambda a, _: (a.by_token, None),
        "uses TLS: give the device the folder with ca.pem and its credential, --certs",
    ),
    "no TLS where certificates are wanted": (lambda a, _: (a.by_certificate, None), "uses TLS: give the device"),
    "TLS where there is none": (lambda a, _: (PLAIN, a.device()), "does not use TLS, but the device does"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_device_is_refused_with_one_sentence_when(case: str, ours: Folder, theirs: Folder) -> None:
    choose, sentence = REFUSALS[case]
    security, device = choose(ours, theirs)

    async def main() -> None:
        async with house(security) as server:
            with pytest.raises(CredentialError) as refused:
                await connect(server.address, security=device, timeout_s=PATIENCE_S)
            assert sentence in str(refused.value)
            assert "\n" not in str(refused.value)
            assert (server.names, server.heard) == ([], [])

    run(main())


def test_a_device_without_a_token_gets_unauthenticated_and_nothing_else(ours: Folder) -> None:
    async def main() -> None:
        credentials = grpc.ssl_channel_credentials((ours.path / "ca.pem").read_bytes())
        async with house(ours.by_token) as server, grpc.aio.secure_channel(server.address, credentials) as channel:
            for metadata in (
                [],
                [("authorization", ours.tokens["pi-1"])],  # without its scheme
                [("authorization", "Bearer ")],
                [("authorization", f"Bearer {ours.tokens['pi-1']}")] * 2,
                [("authorization", "Bearer " + "x" * 4000)],
            ):
                call = channel.stream_stream("/pipar.Link/Connect")(metadata=metadata)
                assert await call.initial_metadata() in (None, grpc.aio.Metadata())
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            assert server.names == []
            assert len(server.refused) == 5
            assert not any(name in why for why in server.refused for name in ("pi-1", "pi-2", "pipar_"))

    run(main())


def test_a_devices_name_is_that_of_its_credential_and_not_the_one_it_claims(ours: Folder) -> None:
    async def main() -> None:
        async with house(ours.by_token) as server:
            transport = await connect(server.address, security=ours.bearer("pi-2"), timeout_s=PATIENCE_S)
            hello = Message(Kind.HELLO, body=json_body({"name": "pi-1"}))
            await transport.write(next(iter(cut_message(hello, 0, 1))))
            await transport.close()
            assert server.names == ["pi-2"]

    run(main())


# --- revoked


@contextmanager
def only_for_now() -> Iterator[None]:
    """Expect a refusal that asks the device to retry."""
    with pytest.raises(LinkError, match="cannot check credentials at the moment") as refused:
        yield
    assert not isinstance(refused.value, CredentialError)


def test_a_revoked_token_and_a_revoked_certificate_are_refused_at_the_next_connection(tmp_path: Path) -> None:
    folder = Folder.make(tmp_path / "certs")

    async def main() -> None:
        async with house(folder.by_token) as tokens, house(folder.by_certificate) as named:
            await visit(tokens, folder.bearer("pi-1"))
            await visit(named, folder.device("pi-1"))
            certs("revoke", "pi-1", "--folder", str(folder.path))
            with pytest.raises(CredentialError, match="may have been revoked"):
                await visit(tokens, folder.bearer("pi-1"))
            with pytest.raises(CredentialError, match="This certificate was revoked"):
                await visit(named, folder.device("pi-1"))
            await visit(tokens, folder.bearer("pi-2"))
            certs("issue", "pi-1", "--folder", str(folder.path), "--force")
            await visit(named, folder.device("pi-1"))  # with its new certificate
            assert named.names == ["pi-1", "pi-1"]

    run(main())


def test_a_server_whose_tokens_become_unreadable_admits_no_device(tmp_path: Path) -> None:
    folder = Folder.make(tmp_path / "certs")

    async def main() -> None:
        async with house(folder.by_token) as server:
            (folder.path / "tokens.json").write_text("half", "utf-8")
            with only_for_now():
                await visit(server, folder.bearer())
            (folder.path / "tokens.json").unlink()
            with only_for_now():
                await visit(server, folder.bearer())

    run(main())


@pytest.mark.parametrize(
    "content", [b"half", b"[]", b'{"phone-1": "\\ud800"}', b'{"phone-1": 5}', b'{"phone-1": "short"}', b"\xff", None]
)
def test_a_damaged_file_of_tokens_is_reported_once_and_does_not_end_the_server(
    tmp_path: Path, content: bytes | None
) -> None:
    tokens, said = tmp_path / "tokens.json", list[str]()
    shown = [("authorization", f"Bearer {add_token(tokens, 'phone-1')}")]
    whole = tokens.read_bytes()
    authenticator = Authenticator(ServerSecurity(tokens=tokens), Notices(barred=said.append))
    assert authenticator.name_of({}, shown) == "phone-1"
    for times in (1, 2):
        tokens.unlink() if content is None else tokens.write_bytes(content)
        for _ in range(3):
            with only_for_now():
                authenticator.name_of({}, shown)
        assert len(said) == times
        assert str(tokens) in said[-1]
        with pytest.raises(InputError, match="tokens"):
            check_server(ServerSecurity(tokens=tokens), "127.0.0.1:1")
        tokens.write_bytes(whole)
        assert authenticator.name_of({}, shown) == "phone-1"


def test_a_list_of_revoked_certificates_may_be_created_later_but_not_removed(ours: Folder, tmp_path: Path) -> None:
    for name in ("ca.pem", "server.pem", "server.key"):
        (tmp_path / name).write_bytes((ours.path / name).read_bytes())
    security, denied = ServerSecurity.from_folder(tmp_path), tmp_path / "denied.json"
    check_server(security, "127.0.0.1:1")
    pem = (ours.path / "devices" / "pi-1.pem").read_bytes()
    shown, authenticator = {"x509_common_name": [b"pi-1"], "x509_pem_cert": [pem]}, Authenticator(security)
    assert authenticator.name_of(shown, []) == "pi-1"
    add_serials(denied, "pi-1", [certificates.serial_of(x509.load_pem_x509_certificate(pem))])
    with pytest.raises(CredentialError, match="This certificate was revoked"):
        authenticator.name_of(shown, [])
    beginning = Authenticator(security)
    denied.unlink()
    for one in (authenticator, beginning):
        with only_for_now():
            one.name_of(shown, [])


@pytest.mark.parametrize("content", [b'{"pi-1": [[1]]}', b'{"pi-1": "1234"}', b"null"])
def test_with_a_damaged_list_of_revoked_certificates_no_device_is_admitted(
    ours: Folder, tmp_path: Path, content: bytes
) -> None:
    denied = tmp_path / "denied.json"
    denied.write_bytes(content)
    authenticator = Authenticator(replace(ours.by_certificate, denied=denied))
    shown = {"x509_common_name": [b"pi-1"], "x509_pem_cert": [(ours.path / "devices" / "pi-1.pem").read_bytes()]}
    with only_for_now():
        authenticator.name_of(shown, [])


# --- dates


@pytest.fixture
def expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """Credentials that were made two years ago."""

    class Then(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) - timedelta(days=730)

    with monkeypatch.context() as past:
        past.setattr(certificates, "datetime", Then)
        return Folder.make(tmp_path / "old")


def test_expired_certificates_are_found_before_a_socket_is_opened(expired: Folder) -> None:
    day = (datetime.now(UTC) - timedelta(days=365)).strftime("%Y-%m-%d")
    with pytest.raises(InputError, match=rf"server\.pem expired on {day}; issue a new one"):
        check_server(expired.by_certificate, "127.0.0.1:0")

    async def main() -> None:
        with pytest.raises(InputError, match=rf"pi-1\.pem expired on {day}; issue a new one"):
            await connect("127.0.0.1:1", security=expired.device())

    run(main())


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One end does not check dates, like a program other than ours."""
    monkeypatch.setattr(certificates, "_check_dates", lambda *_: None)


@pytest.mark.usefixtures("unchecked")
def test_an_expired_server_is_refused_by_its_devices(expired: Folder) -> None:
    async def main() -> None:
        async with house(expired.by_token) as server:
            with pytest.raises(CredentialError, match="has a certificate that has expired"):
                await connect(server.address, security=expired.bearer(), timeout_s=PATIENCE_S)
            assert server.names == []

    run(main())


@pytest.mark.usefixtures("unchecked")
def test_an_expired_device_is_refused_by_the_server(expired: Folder) -> None:
    certs("server", "--folder", str(expired.path), "--force")  # the authority is valid for ten years

    async def main() -> None:
        async with house(expired.by_certificate) as server:
            with pytest.raises(CredentialError, match="refuses the device's certificate: it has expired"):
                await connect(server.address, security=expired.device(), timeout_s=PATIENCE_S)
            assert server.names == []

    run(main())


# --- security settings


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:0", True),
        ("127.9.9.9:1", True),
        ("localhost:5", True),
        ("[::1]:5", True),
        ("::1:5", True),
        ("0.0.0.0:5", False),
        ("[::]:5", False),
        ("192.168.0.5:5", False),
        ("localhost.example.org:5", False),
        ("train.local:5", False),
    ],
)
def test_only_addresses_of_this_machine_are_loopback(address: str, loopback: bool) -> None:
    assert is_loopback(address) == loopback


WRONG_SERVERS: dict[str, tuple[Callable[[Path], ServerSecurity], str]] = {
    "plain": (lambda _: ServerSecurity(), "Cannot listen on 0.0.0.0:7700 without TLS"),
    "tokens without TLS": (
        lambda f: ServerSecurity(tokens=f / "tokens.json", insecure=True),
        "without TLS: others could read the tokens",
    ),
    "TLS without credentials": (
        lambda f: ServerSecurity(f / "server.pem", f / "server.key"),
        "Any program could join at 0.0.0.0:7700",
    ),
    "no key": (lambda f: ServerSecurity(f / "server.pem"), "certificate is given without its key"),
    "no certificate": (lambda f: ServerSecurity(key=f / "server.key"), "key is given without its certificate"),
    "an authority without TLS": (lambda f: ServerSecurity(client_ca=f / "ca.pem"), "can be checked only over TLS"),
    "a missing file": (
        lambda f: ServerSecurity(f / "no.pem", f / "server.key", tokens=f / "tokens.json"),
        "no.pem: `pipar certs server --folder /",
    ),
    "a missing authority": (
        lambda f: ServerSecurity(f / "server.pem", f / "server.key", f / "no.pem"),
        "no.pem: `pipar certs init` makes the authority",
    ),
    "a missing tokens file": (
        lambda f: ServerSecurity(f / "server.pem", f / "server.key", tokens=f / "no.json"),
        "Cannot read the devices' tokens from",
    ),
    "a damaged tokens file": (
        lambda f: ServerSecurity(f / "server.pem", f / "server.key", tokens=f / "ca.pem"),
        "should hold the devices' tokens",
    ),
    "no PEM": (
        lambda f: ServerSecurity(f / "tokens.json", f / "server.key", f / "ca.pem"),
        "has no certificate in PEM format",
    ),
    "a key that is none": (
        lambda f: ServerSecurity(f / "server.pem", f / "ca.pem", f / "ca.pem"),
        "should hold a private key in PEM format",
    ),
    "another's key": (
        lambda f: ServerSecurity(f / "server.pem", f / "ca.key", f / "ca.pem"),
        "ca.key does not belong to the certificate in",
    ),
}


@pytest.mark.parametrize("case", WRONG_SERVERS)
def test_a_server_does_not_listen_with(case: str, ours: Folder) -> None:
    choose, sentence = WRONG_SERVERS[case]

    async def main() -> None:
        with pytest.raises(InputError) as refused:
            await Listener(_nobody, security=choose(ours.path)).start("0.0.0.0:7700")
        assert sentence in str(refused.value)

    run(main())


async def _nobody(transport: Transport, _: str | None) -> None:
    raise AssertionError(transport)


def test_a_device_sends_its_token_only_over_tls_or_on_loopback() -> None:
    shown = DeviceSecurity(token="pipar_secret", insecure=True)
    assert check_device(shown, "127.0.0.1:7700") is None
    with pytest.raises(InputError, match="without TLS: others could read the tokens"):
        check_device(shown, "192.168.0.5:7700")
    with pytest.raises(InputError, match=r"Cannot connect to 192\.168\.0\.5:7700 without TLS"):
        check_device(DeviceSecurity(), "192.168.0.5:7700")
    assert check_device(DeviceSecurity(insecure=True), "192.168.0.5:7700") is None
    assert "secret" not in repr(shown)


def test_the_error_for_a_missing_certificate_names_the_command_that_makes_it(
    ours: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ours.path.parent)
    away = DeviceSecurity.from_folder(ours.path, "pi-9")
    with pytest.raises(InputError) as refused:
        check_device(away, "192.168.0.5:7700")
    makes = f"`pipar certs issue pi-9 --folder {ours.path}` makes the device's certificate and key"
    assert str(refused.value).startswith(f"There is no {ours.path}/devices/pi-9.pem: {makes}")
    with pytest.raises(InputError, match="`pipar certs issue pi-9` makes"):
        check_device(DeviceSecurity.from_folder(Path("certs"), "pi-9"), "192.168.0.5:7700")


@pytest.mark.parametrize("token", ["", "two words", "line\n", "ü"])
def test_a_token_that_cannot_be_sent_is_refused_before_connecting(token: str) -> None:
    with pytest.raises(InputError, match="token has characters that no token has"):
        check_device(DeviceSecurity(token=token), "127.0.0.1:7700")


@pytest.mark.parametrize("address", ["train.local", ":7700", "train.local:x", "train.local:70000", "", "a:-1"])
def test_an_address_is_a_host_and_a_port(address: str, ours: Folder) -> None:
    with pytest.raises(InputError, match=f"'{address}' is not an address: write HOST:PORT"):
        check_device(ours.device(), address)


def test_explicitly_insecure_is_allowed(ours: Folder) -> None:
    assert check_server(ServerSecurity(insecure=True), "0.0.0.0:7700") is None
    without_credentials = ServerSecurity(ours.path / "server.pem", ours.path / "server.key", insecure=True)
    assert check_server(without_credentials, "0.0.0.0:7700") is not None


def test_a_certificate_without_a_valid_device_name_is_refused(ours: Folder) -> None:
    authenticator = Authenticator(ours.by_certificate)
    shown = (ours.path / "devices" / "pi-1.pem").read_bytes()
    for names in ([b"../pi"], [b""], [b"pi 1"], [b"p" * 65], [b"\xff"], [b"pi-1", b"pi-2"], []):
        with pytest.raises(CredentialError):
            authenticator.name_of({"x509_common_name": names, "x509_pem_cert": [shown]}, ())
    assert authenticator.name_of({"x509_common_name": [b"pi-1"], "x509_pem_cert": [shown]}, ()) == "pi-1"


def test_a_token_is_stored_as_a_hash_and_replaced_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    token = add_token(path, "pi")
    assert token not in path.read_text("utf-8")
    assert len(token) >= 43
    with pytest.raises(InputError, match="pi already has a token in"):
        add_token(path, "pi")
    assert add_token(path, "pi", force=True) != token


# --- health


@pytest.mark.parametrize("kind", ["plain", "tls"])
def test_health_needs_no_credential_and_ends_with_the_server(kind: str, ours: Folder) -> None:
    async def main() -> None:
        server = House(PLAIN if kind == "plain" else ours.by_token)
        address = f"127.0.0.1:{await server.listener.start('127.0.0.1:0')}"
        credentials = grpc.ssl_channel_credentials((ours.path / "ca.pem").read_bytes())
        channel = (
            grpc.aio.insecure_channel(address) if kind == "plain" else grpc.aio.secure_channel(address, credentials)
        )
        async with channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for service in ("", "pipar.Link"):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="pipar.Link"))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            stopping = asyncio.ensure_future(server.listener.stop())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
            await stopping
        assert server.names == []

    run(main())

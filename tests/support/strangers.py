"""Programs other than a pipar server that answer at its address."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

#: What a program sends to a device that connects, whatever the device has sent.
ANSWERS = {
    "garbage": bytes(range(256)) * 4,
    "HTTP": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    "SSH": b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n",
    "TLS alert": bytes.fromhex("15030300020228"),
    "HTTP/2 settings, then garbage": bytes.fromhex("000000040000000000") + b"\xff" * 500,
    "nothing": b"",
}


@contextlib.contextmanager
def stranger(
    answer: bytes = b"", *, certs: Path | None = None, port: int = 0, heard: threading.Event | None = None
) -> Iterator[int]:
    """Yield the port on which a program answers every connection with these bytes, and closes it.

    With a folder of certificates it first makes a TLS handshake as the server of that folder. `heard` is set when a
    peer has got the whole answer and closed the connection.
    """
    context = None
    if certs is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certs / "server.pem", certs / "server.key")
        context.set_alpn_protocols(["h2"])
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen()
        answering = threading.Thread(target=_answer_all, args=(listening, answer, context, heard), daemon=True)
        answering.start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)  # ends the thread's `accept`
            answering.join()


def _answer_all(
    listening: socket.socket, answer: bytes, context: ssl.SSLContext | None, heard: threading.Event | None
) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError):
            connection.settimeout(5.0)
            if context is None:
                _answer(connection, answer)
                _wait_for_end(connection)
                if heard is not None:
                    heard.set()
            else:
                with context.wrap_socket(connection, server_side=True) as protected:
                    _answer(protected, answer)


def _wait_for_end(connection: socket.socket) -> None:
    """Return when the peer has closed the connection, after it has read everything."""
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(4096):
        pass


def _answer(connection: socket.socket, answer: bytes) -> None:
    connection.recv(4096)
    connection.sendall(answer)

"""What one plain TCP connection carries up a shaped link: the limit with which transports compare."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from benchmarks.shaped_namespaces import SERVER_HOST, ShapedLink, inside, namespaces

_PORT = 50052
_SECONDS = 6.0
_RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as listener:
    print("listening", flush=True)
    connection, _ = listener.accept()
    times, count = [], 0
    while got := len(connection.recv(1 << 20)):
        count += got
        times.append((time.monotonic(), count))
    # After the first second, in which the connection finds its rate.
    first = next(one for one in times if one[0] > times[0][0] + 1)
    print((times[-1][1] - first[1]) * 8 / (times[-1][0] - first[0]))
"""
_SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    connection.sendall(bytes(int(sys.argv[3])))
"""


def carried_bps(link: ShapedLink) -> float:
    """Return the bits of data per second that a stream carries up the link, which has to be limited."""
    assert link.up is not None
    size = str(int(link.up * 1e6 / 8 * _SECONDS))
    with namespaces(["pi"], link) as spaces:
        receiver = _start(inside(spaces.server, [sys.executable, "-c", _RECEIVE, SERVER_HOST, str(_PORT)]))
        assert receiver.stdout is not None
        try:
            receiver.stdout.readline()
            send = [sys.executable, "-c", _SEND, SERVER_HOST, str(_PORT), size]
            subprocess.run(inside(spaces.devices["pi"], send), check=True, timeout=60)
            return float(receiver.communicate(timeout=60)[0])
        finally:
            receiver.kill()
            receiver.wait()


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

"""A server and its devices in network namespaces of their own, joined by shaped links; needs root, `ip` and `tc`.

Each device has one link to the server, a veth pair. Its own end shapes what it sends, and the server's end what it
receives, each by a token bucket. Nothing outside these namespaces is reachable from them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pipar.errors import InputError

#: The server's address, on its own loopback: the same for every device.
SERVER_HOST = "10.79.0.1"
_BURST, _QUEUE = "32kb", "100ms"
#: Ethernet, IP and TCP with time stamps, for each segment.
_HEADER_BYTES = 66


@dataclass(frozen=True)
class ShapedLink:
    """The rates of a link in Mbit/s; None is unlimited. Written "10/25" or "unlimited"."""

    up: float | None = None
    down: float | None = None

    def __str__(self) -> str:
        return "unlimited" if self.up is None else f"{self.up:g}/{self.down:g}"

    @classmethod
    def parse(cls, text: str) -> ShapedLink:
        if text == "unlimited":
            return cls()
        try:
            up, down = (float(rate) for rate in text.split("/"))
        except ValueError:
            up = down = 0.0
        if up <= 0 or down <= 0:
            raise InputError(f"'{text}' is not a link; write Mbit/s up and down as in 10/25, or unlimited.")
        return cls(up, down)


class Namespaces:
    """The namespaces of one deployment, and what travelled over the devices' links."""

    def __init__(self, prefix: str, devices: Sequence[str], link: ShapedLink) -> None:
        self.server = f"{prefix}-server"
        self.devices = {device: f"{prefix}-{device}" for device in devices}
        self._link = link

    def create(self) -> None:
        _run("ip", "netns", "add", self.server)
        _in(self.server, "ip", "link", "set", "lo", "up")
        _in(self.server, "ip", "address", "add", f"{SERVER_HOST}/32", "dev", "lo")
        for number, namespace in enumerate(self.devices.values(), start=1):
            self._join(number, namespace)

    def _join(self, number: int, namespace: str) -> None:
        _run("ip", "netns", "add", namespace)
        near, far, subnet = f"down{number}", "wan0", f"10.79.{number}"
        _run("ip", "link", "add", near, "netns", self.server, "type", "veth", "peer", "name", far, "netns", namespace)
        _in(namespace, "ip", "link", "set", "lo", "up")
        for owner, name, host in ((self.server, near, 1), (namespace, far, 2)):
            _in(owner, "ip", "address", "add", f"{subnet}.{host}/24", "dev", name)
            _in(owner, "ip", "link", "set", name, "up")
        _in(namespace, "ip", "route", "add", SERVER_HOST, "via", f"{subnet}.1", "src", f"{subnet}.2")
        _shape(namespace, far, self._link.up)
        _shape(self.server, near, self._link.down)

    def delete(self) -> None:
        """Delete them, as far as they exist; their links go with them."""
        for namespace in (*self.devices.values(), self.server):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)

    def tcp_bytes(self) -> dict[str, tuple[int, int]]:
        """Return for each device what TCP carried up and down so far, without headers; needs a limited link."""
        return {
            device: (_tcp_bytes(namespace, "wan0"), _tcp_bytes(self.server, f"down{number}"))
            for number, (device, namespace) in enumerate(self.devices.items(), start=1)
        }


@contextmanager
def namespaces(devices: Sequence[str], link: ShapedLink) -> Iterator[Namespaces]:
    """Create namespaces for these devices, and delete them in the end, also after Ctrl-C."""
    if why := why_unavailable():
        raise InputError(why)
    made = Namespaces(f"pipar{os.getpid()}", devices, link)
    try:
        made.create()
        yield made
    finally:
        made.delete()


def why_unavailable() -> str | None:
    """Return why this machine has no namespaces for us; None if it has."""
    if os.geteuid() != 0:
        return "Network namespaces need root."
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    return f"'{missing[0]}' is missing: install the package iproute2." if missing else None


def inside(namespace: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs this one in a namespace."""
    return ["ip", "netns", "exec", namespace, *command]


def _shape(namespace: str, interface: str, mbit_s: float | None) -> None:
    if mbit_s is not None:
        rate = f"{mbit_s * 1000:.0f}kbit"
        bucket = ("tbf", "rate", rate, "burst", _BURST, "latency", _QUEUE)
        _in(namespace, "tc", "qdisc", "add", "dev", interface, "root", *bucket)


def _tcp_bytes(namespace: str, interface: str) -> int:
    shown = _in(namespace, "tc", "-s", "-j", "qdisc", "show", "dev", interface)
    counted: dict[str, Any] = json.loads(shown)[0]
    return int(counted["bytes"]) - _HEADER_BYTES * int(counted["packets"])


def _in(namespace: str, *command: str) -> str:
    return _run(*inside(namespace, command))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout

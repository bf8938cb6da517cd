"""A server and a device in separate network namespaces, on a shaped link that is cut in mid-epoch."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.credentials import certs
from support.deployments import check_nothing_is_left, check_weights, training
from support.programs import Place, address_of, place
from support.waiting import PATIENCE_S

SERVER_IP, DEVICE_IP = "10.213.7.1", "10.213.7.2"


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=PATIENCE_S)


def _why_not() -> str:
    """Return why namespaces cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "ip and tc (iproute2) are not installed"
    try:
        with _two_machines():
            return ""
    except (subprocess.SubprocessError, OSError) as error:
        return f"network namespaces do not work here: {error}"


@dataclass(frozen=True)
class Wire:
    """Two namespaces, and the link between them."""

    server: str
    device: str

    def cut(self) -> None:
        _run("ip", "-n", self.device, "link", "set", "up0", "down")

    def mend(self) -> None:
        _run("ip", "-n", self.device, "link", "set", "up0", "up")


@contextmanager
def _two_machines() -> Iterator[Wire]:
    """Yield two namespaces with a link of 20 Mbit/s each way; both are removed at the end."""
    mark = uuid.uuid4().hex[:8]
    wire = Wire(f"pipar-{mark}-s", f"pipar-{mark}-d")
    try:
        for namespace in (wire.server, wire.device):
            _run("ip", "netns", "add", namespace)
        _run("ip", "link", "add", "up0", "netns", wire.server, "type", "veth", "peer", "up0", "netns", wire.device)
        for namespace, address in ((wire.server, SERVER_IP), (wire.device, DEVICE_IP)):
            _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", "up0")
            _run("ip", "-n", namespace, "link", "set", "up0", "up")
            _run(
                "tc", "-n", namespace, "qdisc", "add", "dev", "up0", "root",
                "tbf", "rate", "20mbit", "burst", "64kb", "latency", "400ms",
            )  # fmt: skip
        yield wire
    finally:
        for namespace in (wire.server, wire.device):
            with suppress(subprocess.SubprocessError, OSError):
                _run("ip", "netns", "delete", namespace)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _where_namespaces_work() -> None:
    if why_not := _why_not():
        pytest.skip(why_not)


def lone_training(**server: Any) -> dict[str, Any]:
    tree = training(epochs=3)
    tree["plan"]["replan"] = False
    tree["server"] |= {"resume_window": "60s", "keepalive": "1s", **server}
    tree["devices"] = [{"name": "pi-1"}]
    tree["data"]["samples_per_device"] = 40
    return tree


@pytest.fixture
def wire() -> Iterator[Wire]:
    with _two_machines() as made:
        yield made


@pytest.fixture
def here(tmp_path: Path, profiles: Path) -> Iterator[Place]:
    with place(tmp_path, profiles, lone_training()) as made:
        certs("init", "--folder", str(tmp_path / "certs"), "--host", SERVER_IP)
        certs("issue", "pi-1", "--folder", str(tmp_path / "certs"))
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, profiles: Path) -> str:
    """Return the hash of the weights of the same training on loopback without a cut."""
    with place(tmp_path_factory.mktemp("undisturbed"), profiles, lone_training()) as at:
        server = at.server()
        device = at.device("pi-1", address_of(server))
        assert (server.ends(), device.ends()) == (0, 0)
        weights: str = at.result()["weights_sha256"]
        return weights


def start(here: Place, wire: Wire) -> tuple[Any, Any]:
    """Start both programs and return them when the device is in mid-epoch."""
    server = here.server("--certs", "certs", listen=f"{SERVER_IP}:0", namespace=wire.server)
    address = address_of(server)
    here.hold("pi-1")
    device = here.device("pi-1", address, "--certs", "certs", namespace=wire.device)
    here.wait_until_held("pi-1")
    return server, device


@pytest.mark.parametrize("keepalive", ["1s", "30s"])
def test_a_cut_of_five_seconds_in_mid_epoch_changes_no_bit(
    here: Place, wire: Wire, undisturbed: str, keepalive: str
) -> None:
    """With short keepalives both sides notice and the session continues; with the default, TCP alone recovers."""
    tree = lone_training(keepalive=keepalive)
    here.write(tree)
    server, device = start(here, wire)
    began = time.monotonic()
    wire.cut()
    here.let_go("pi-1")  # it continues to compute, and its messages are lost
    if keepalive == "1s":
        server.says("pi-1 lost its connection")
    time.sleep(max(0.0, began + 5 - time.monotonic()))
    wire.mend()
    if keepalive == "1s":
        server.says("pi-1 reconnected")
    assert (server.ends(), device.ends()) == (0, 0)
    assert "lost:" not in server.text()
    assert here.result()["weights_sha256"] == undisturbed
    assert [entry["counted"] for entry in here.rounds()] == [{"pi-1": 40}] * 3
    check_nothing_is_left(here)


def test_a_cut_longer_than_the_window_loses_the_round_and_the_device_joins_again(here: Place, wire: Wire) -> None:
    tree = lone_training(resume_window="3s")
    here.write(tree)
    server, device = start(here, wire)
    wire.cut()
    here.let_go("pi-1")
    server.says("pi-1 is lost: its link was lost for more than 3 s")
    server.says("round 1 excludes pi-1")
    wire.mend()
    server.says("pi-1 joined", times=2)
    assert (server.ends(), device.ends()) == (0, 0)
    check_weights(here, tree)
    check_nothing_is_left(here)

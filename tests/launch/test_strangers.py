"""Other programs answer at the server's address while it is down; the devices wait for their own server."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from support.credentials import certs, expire
from support.deployments import check_nothing_is_left, check_weights, counted, training
from support.programs import Place, address_of, place
from support.strangers import ANSWERS, stranger

pytestmark = pytest.mark.slow


@pytest.fixture
def here(tmp_path: Path, profiles: Path) -> Iterator[Place]:
    with place(tmp_path, profiles, training()) as made:
        yield made


def test_devices_outlast_whatever_answers_at_the_address_of_their_server(here: Place) -> None:
    ours, theirs, old = (here.folder / name for name in ("certs", "theirs", "old"))
    for folder in (ours, theirs):
        certs("init", "--folder", str(folder), "--host", "train.local")
        certs("issue", "pi-1", "--folder", str(folder))
    shutil.copytree(ours, old)
    expire(old, "server.pem")
    server = here.server("--certs", "certs")
    address = address_of(server)
    port = int(address.rpartition(":")[2])
    here.hold("pi-1")
    device = here.device("pi-1", address, "--certs", "certs")
    here.wait_until_held("pi-1")
    here.let_go("pi-1")
    server.says("round 1 finished")
    server.signal(signal.SIGKILL)
    server.ends()

    strangers: dict[str, AbstractContextManager[int]] = {
        "does not use TLS": stranger(ANSWERS["HTTP"], port=port),
        "cannot be verified with the device's ca.pem": stranger(certs=theirs, port=port),
        "has a certificate that has expired": stranger(certs=old, port=port),
    }
    for reason, answering in strangers.items():
        with answering:
            device.says(rf"no connection to .*{reason}.*; attempt \d+ in")
    again = here.server("--certs", "certs", "--resume", listen=address)
    assert (again.ends(), device.ends()) == (0, 0)
    assert counted(here) == [{"pi-1"}] * 6
    check_weights(here, training())
    check_nothing_is_left(here)


def test_a_device_that_starts_while_a_stranger_answers_is_restarted_by_systemd(here: Place) -> None:
    """Exit code 2 would leave it stopped for good, although its own settings are right."""
    certs("init", "--folder", str(here.folder / "certs"), "--host", "train.local")
    certs("issue", "pi-1", "--folder", str(here.folder / "certs"))
    with stranger(ANSWERS["HTTP"]) as port:
        device = here.device("pi-1", f"127.0.0.1:{port}", "--certs", "certs")
        assert device.ends() == 1
    assert "does not use TLS" in device.lines()[-1]

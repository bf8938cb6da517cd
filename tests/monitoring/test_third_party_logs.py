"""Every line of a log in JSON is JSON, also those that gRPC and child processes write themselves."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from pipar.events import Stopping
from pipar.monitoring.logs import logged


def in_python() -> None:
    print("from Python", file=sys.__stderr__, flush=True)


def in_c() -> None:
    os.write(2, b"E0000 00:00:1700000000.000000  123 ssl_transport_security.cc:1884] Handshake failed \xff\n")


def in_a_child() -> None:
    subprocess.run(["/bin/sh", "-c", "echo from a child >&2"], check=True)


def without_end_of_line() -> None:
    os.write(2, b"killed by")


@pytest.mark.parametrize("write", [in_python, in_c, in_a_child, without_end_of_line], ids=lambda one: one.__name__)
def test_lines_of_other_code_are_json_too(write: Callable[[], None], capfd: pytest.CaptureFixture[str]) -> None:
    with logged("json") as observe:
        observe(Stopping("One."))
        write()
        observe(Stopping("Two."))
    rows = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert sorted(row.get("event") or row["logger"] for row in rows) == ["Stopping", "Stopping", "stderr"]
    foreign = next(row for row in rows if "logger" in row)
    assert foreign["level"] == "warning"
    assert any(words in foreign["message"] for words in ("from Python", "Handshake failed", "from a child", "killed"))


def test_standard_error_is_as_before_afterwards(capfd: pytest.CaptureFixture[str]) -> None:
    with logged("json"):
        pass
    in_python()
    assert capfd.readouterr().err == "from Python\n"


def test_a_log_that_cannot_be_written_does_not_log_that_forever(capfd: pytest.CaptureFixture[str]) -> None:
    with logged("json") as observe:
        nowhere = os.open(os.devnull, os.O_RDONLY)
        for handler in logging.getLogger().handlers:
            if type(handler).__name__ == "_LineHandler":
                os.dup2(nowhere, handler.stream.fileno())  # type: ignore[attr-defined]
        os.close(nowhere)
        for _ in range(3):
            observe(Stopping("Nobody reads this."))
    assert capfd.readouterr().err == ""

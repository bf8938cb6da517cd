"""The commands on a real terminal of 80 columns and 24 lines, as an emulator of it shows them."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pyte
import pytest
from support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

#: Draws everything that a run can show, of 300 devices with long names, and ends without clearing it away.
_DRAW = """
import os
from pipar.monitoring.display import Display
from pipar.events import EpochResult, Preparing, Progress, ReplanFailed, Replanned, Started, TrackerFailed
from pipar.cli.tables import console

names = [f"a-device-with-a-name-of-many-letters-in-a-building-far-away-{n:03d}" for n in range(300)]
plans = {name: f"P={1 + n % 17} N={1 + n % 41} 1f1b(12) sparse-planes/planes" for n, name in enumerate(names)}
whole = {name: {"split_point": 1 + n % 17, "micro_batches": 1 + n % 41} for n, name in enumerate(names)}
ROOM = EpochResult(1, 123456.789, 10**9, 1e30, 1e30, 1.0, 1, 1, 123456.789, 123456.789, 1, 1.0, 1)
EMULATED = "; ".join(f"{name}: 1 device, link 10/25 Mbit/s" for name in names)
with Display(console(stderr=True), emulated=EMULATED) as display:
    def draw():
        if display._live is not None:
            display._live.refresh()
    draw()
    display.observe(Preparing("Trying every plan of a fleet with many kinds of devices: " + "very " * 30 + "long", 0.5))
    draw()
    samples, iterations = dict.fromkeys(names, 500), dict.fromkeys(names, 5)
    display.observe(Started("runs/" + "x" * 200, "pipar", 1000, 64, plans, samples, iterations))
    draw()
    for iteration in (1, 2):
        for name in names:
            busy = {"compute": 1.0 * iteration, "uplink": 0.5 * iteration}
            display.observe(Progress(name, 1, iteration, 500, 12345.678, 1000.0 * iteration, busy))
        display.observe(Progress("server", 1, iteration, 500, None, 1.0 * iteration, {"core 0": 0.25 * iteration}))
        draw()
    display.observe(ROOM)
    display.observe(Replanned(2, whole))
    display.observe(ReplanFailed("New plans could not be chosen: " + "because " * 30))
    display.observe(TrackerFailed("mlflow", "OSError: " + "the disk is full " * 20))
    draw()
    os._exit(0)
"""


def _on_a_terminal(program: list[str], **environment: str) -> bytes:
    """Run a program on a terminal of 80x24; return all that it wrote there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    around = {
        key: value for key, value in os.environ.items() if key not in ("CI", "NO_COLOR", "FORCE_COLOR", "COLUMNS")
    }
    ended = subprocess.Popen(
        program, stdin=theirs, stdout=theirs, stderr=theirs, env=around | {"TERM": "xterm-256color"} | environment
    )
    os.close(theirs)
    written = b""
    try:
        while piece := os.read(ours, 65536):
            written += piece
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
    assert ended.wait(PATIENCE_S) == 0, written.decode()
    return written


def _shown(written: bytes, columns: int = 80, lines: int = 24) -> list[str]:
    """Return the final content of the screen, without the empty lines below."""
    screen = pyte.Screen(columns, lines)
    pyte.ByteStream(screen).feed(written)
    return "\n".join(line.rstrip() for line in screen.display).rstrip("\n").splitlines()


def _draw(**environment: str) -> bytes:
    return _on_a_terminal([sys.executable, "-c", _DRAW], **environment)


def test_the_live_view_fits_80_columns_and_24_lines_with_any_content() -> None:
    written = _draw()
    shown = _shown(written)
    # A line that is wrapped at 80 columns is not on a wider screen; lines that scroll away are there on a longer one.
    assert shown == _shown(written, columns=200)[-24:] == _shown(written, lines=100)
    words = "\n".join(shown)
    assert re.search(r"^epoch 1/1000  iteration 2/5 ", words, re.MULTILINE)
    assert re.search(r"^epoch .* 40 % +\d+:\d\d, [\d:]+ left$", words, re.MULTILINE)
    assert [
        lane for lane in ("device", "uplink", "server", "downlink") if not re.search(rf"^{lane} ", words, re.M)
    ] == []


@pytest.mark.parametrize(
    ("environment", "forbidden"),
    [
        ({"NO_COLOR": "1"}, rb"\x1b\[[0-9;]*\b(3[0-7]|4[0-7]|9[0-7]|38|48)\b[0-9;]*m"),
        ({"CI": "true"}, rb"\x1b\[[0-9;?]*[A-LSThl]"),
        ({"TERM": "dumb"}, rb"\x1b"),
    ],
)
def test_a_limited_terminal_gets_no_unsupported_codes(environment: dict[str, str], forbidden: bytes) -> None:
    written = _draw(**environment)
    assert re.search(forbidden, written) is None
    assert any(line.startswith("    1 123456.8 ") for line in _shown(written, lines=100))


_TIMING_ONLY = ["--timing-only", "--epochs", "2", "--set", "devices.profile=raspberry-pi-3b"]
_TIMING_ONLY += ["--set", "server.profile=i7-11850h"]


def test_json_is_the_only_output_on_the_terminal(tmp_path: Path) -> None:
    written = _on_a_terminal([sys.executable, "-m", "pipar", "run", "--json", *_TIMING_ONLY], PIPAR_RUNS=str(tmp_path))
    assert len(json.loads(written.replace(b"\r\n", b"\n"))["epochs"]) == 2

"""Starts commands of pipar fast: a process that has done their slow imports, and forks once for each command.

The result is an ordinary process with its own pid, signals and exit code. gRPC does not survive a fork, so each
process imports it itself. Requests are lines of JSON on the standard input, answered in order on the output:
{"start": [WORD, ...], "folder", "environment", "output", "namespace", "files", "finalize"} by a pid, {"poll": PID} by
an exit code or null.
The words are those of a command of pipar, a script that ends in .py, or `-m` and a module.
A program that gets SIGUSR1 writes to OUTPUT.live how many bytes it has in use.
Networks are measured for a fraction of a second only: no test of these programs needs exact times of layers.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

_PRELOAD = (
    "torch", "torch._dynamo", "safetensors.torch", "cryptography.x509", "prometheus_client", "google.protobuf",
    "pipar.cli.deploy", "pipar.cli.train", "pipar.monitoring.display", "pipar.job.workload", "pipar.job.model_setup",
    "pipar.job.prepare", "pipar.job.explain", "pipar.profiling.measure", "pipar.storage.run_folder",
    "pipar.profiling.repeated_timing",
    "pipar.storage.checkpoint_writer", "pipar.server.enrolment", "pipar.monitoring.logs", "pipar.monitoring.metrics",
    "pipar.transport.certificates", "pipar.transport.tls", "pipar.report", "pipar.launch.virtual",
)  # fmt: skip
_CLONE_NEWNET = 0x40000000
_BLOCK_BYTES = 64  # of a small Python object, which Python allocates by itself and only counts


def _be(request: dict[str, Any]) -> NoReturn:
    """Become the requested program, and exit when it ends."""
    _prepare(request)
    try:
        _run(request["start"], Path(request["folder"]))
    except SystemExit as end:
        if request["finalize"]:
            raise
        _exit(end.code)
    _exit(0)


def _prepare(request: dict[str, Any]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in ((0, nothing), (1, output), (2, output)):
        os.dup2(file, number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    faulthandler.enable(2)  # SIGABRT shows what a program that hangs is doing
    signal.signal(signal.SIGUSR1, lambda *_: _tell_live_bytes(Path(request["output"] + ".live")))
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if request.get("namespace"):
        _enter(request["namespace"])
    if request.get("files"):  # the soft and the hard limit of open files
        resource.setrlimit(resource.RLIMIT_NOFILE, tuple(request["files"]))


def _run(words: list[str], folder: Path) -> None:
    """Run a program as `__main__`; a command of pipar ends with SystemExit."""
    if words[0] != "-m" and not words[0].endswith(".py"):
        sys.argv = ["pipar", *words]
        from pipar.cli import main

        main(words)
    sys.path[:0] = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def _exit(code: object) -> NoReturn:
    """Exit as Python does, but leave the modules: to free them would touch, and so copy, all pages, a second's work."""
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:  # a script may close them
            stream.flush()
    os._exit((code or 0) if isinstance(code, int | None) else 1)


class _MallInfo(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "mapped", "usmblks", "fsmblks", "in_use", "free", "top")
    ]


def _tell_live_bytes(path: Path) -> None:
    """Write how much is allocated and not freed; the system's number also counts memory that is free for reuse."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallInfo
    info = libc.mallinfo2()
    live_bytes = info.in_use + info.mapped + sys.getallocatedblocks() * _BLOCK_BYTES
    new = path.with_suffix(".new")
    new.write_text(str(live_bytes), "utf-8")
    new.replace(path)


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(file, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _poll(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which end what they have started
    modules = {name: importlib.import_module(name) for name in _PRELOAD}
    modules["pipar.profiling.repeated_timing"].PAUSE_S = 0.0
    modules["pipar.job.prepare"].measured_profile.__kwdefaults__["budget_s"] = 0.1
    gc.collect()
    gc.freeze()  # a collection in a program would touch, and so copy, all imported pages
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            answer = _poll(request["poll"])
        else:
            answer = os.fork()
            if answer == 0:
                _be(request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
